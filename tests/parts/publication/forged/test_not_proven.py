"""What nobody can find, and is named as not proven."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.files import read_json
from lockstep.transcript.trees import load_arrays
from parts.publication import layout
from parts.publication.claims import VerifyOutcome
from pipeline import runfile, scores
from pipeline.language_model import held_out
from pipeline.recheck import outputs
from pipeline.weights import exported
from tests import tiny
from tests.parts.publication.forged.changes import (
    HEADER,
    another_machine,
    better,
    change_card,
    new_transcript_hash,
)
from tests.parts.publication.published_run import (
    add,
    change_json,
    change_round,
    change_tensors,
    entry,
    forge,
    refusal,
    verify,
)
from tests.pipeline import finished_run, trained_run

pytestmark = pytest.mark.long


def test_a_header_that_names_another_machine_changes_the_exit_status_and_the_line(folder, capsys):
    change_json(HEADER, another_machine)(folder)
    forge(folder)
    verified = verify(folder)
    assert not verified.bitwise
    assert verified.claim("weights").values["chain"]  # on any machine
    line = verified.text
    assert line.startswith("consistent, not verified: windows are not comparable here\n")
    claim = verified.claim("not_comparable")
    assert claim.kind == "stated" and "device_kind is 'cpu' here" in claim.values["why"]
    assert claim.text in line and not any(c.name == "windows" for c in verified.claims)


def of_rounds(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        for number in range(1, 7):
            change_round(folder, number, change)
        new_transcript_hash(folder)

    return changed


def elsewhere(line: dict) -> None:
    """Peer 1 says that its machine was another than the others'."""
    line["evidence"]["messages"]["1"]["environment"] = "ab" * 32


def test_windows_of_the_peers_that_say_another_machine_alone_are_stated(folder):
    of_rounds(elsewhere)(folder)
    forge(folder)
    verified = verify(folder)
    assert not verified.bitwise and verified.outcome is VerifyOutcome.CONSISTENT
    repeated, stated = (verified.claim(name) for name in ("windows", "not_comparable"))
    assert {peer for _, _, peer in repeated.values["repeated"]} == {0}
    assert {peer for _, _, peer in stated.values["windows"]} == {1}
    assert "(2 of the 4 chosen; " in repeated.text and "(2 of the 4 chosen; " in stated.text


def own_draw(folder: Path) -> None:
    """The author's own seed and percent of the audit, and its verdict."""
    sample = {"seed": "of the author's own", "replay_percent": 0.0}
    change_json(outputs.RUN, lambda tables: tables["witness"].update(sample))(folder)
    verdict = {"sample_seed": sample["seed"], "sample_seed_of": "auditor"}
    verdict |= {"replayed_windows": [], "drawn_windows": 0}
    change_json(outputs.VERDICT, lambda v: v.update(verdict))(folder)


def other_words(folder: Path) -> None:
    """A tokenizer whose words mean other tokens than those of the training."""
    add("tokenizer.json")(folder)
    tokenizer = trained_run.make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    data = rows_of(folder)
    said = read_json(folder / outputs.EVALUATED)
    loss = held_out.MeanLoss(said["held_out_loss"], said["held_out_stderr"])
    for name, value in held_out.numbers(loss, data, tokenizer, []).items():
        better(name, value)(folder)
    name = layout.made("export")
    here = entry(folder / "tokenizer.json")
    change_json(name, lambda m: m["files"].update({"tokenizer.json": here}))(folder)


def rows_of(folder: Path) -> held_out.HeldOutRows:
    arrays = load_arrays(folder / outputs.HELD_OUT)
    split_size = read_json(folder / outputs.EVALUATED)["split_sequences"]
    return held_out.HeldOutRows(arrays["rows"], ("inputs",), arrays["indices"], split_size)


def easiest(tensors: dict) -> None:
    for name in tensors:
        tensors[name] = tensors[name].copy()
    tensors["rows"][:] = tensors["rows"][0]


def measured_on(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Other held-out rows, and the loss that is measured on them."""

    def changed(folder: Path) -> None:
        change_tensors(outputs.HELD_OUT, change)(folder)
        data, model = rows_of(folder), exported.read(folder)
        run = runfile.parse(read_json(folder / outputs.RUN), "run.json")
        with tiny.like_a_process():
            loss = held_out.exported_loss(model, data, run.peers)
        found = held_out.numbers(loss, data, None, [])
        for name, value in found.items():
            better(name, value)(folder)

    return changed


def invented_score(folder: Path) -> None:
    task = json.loads(json.dumps(scores.report(finished_run.NEXT_LINE)))
    change_json(outputs.RESULTS, lambda r: r.update(tasks=[task]))(folder)
    flat = scores.flat(finished_run.NEXT_LINE)
    change_json(outputs.EVALUATED, lambda e: e.update(tasks={"next_line": flat}))(folder)


def another_release(folder: Path) -> None:
    change_json(layout.MANIFEST, lambda m: m.update(release="9.9.9"))(folder)
    change_card(folder, "\n## Data\n", "\nAudited by an independent lab.\n\n## Data\n")


NAMED = {
    "other losses in all rounds": (
        of_rounds(lambda entry: entry.update(loss=0.5)),
        "losses while training",
    ),
    "the author's own draw of the audit": (own_draw, "that the author's audit replayed 0 windows"),
    "another source of the data": (
        change_json(outputs.SHARDS, lambda s: s["source"].update(read="FineWeb-Edu")),
        "where the sequences come from",
    ),
    "a tokenizer of other words": (other_words, "tokenizer.json"),
    "a score that nobody measured": (invented_score, "the scores of next_line"),
    "the same held-out sequence four times": (measured_on(easiest), ", of which only 1 differ\n"),
    "a card of another release": (
        another_release,
        "the text of the card, which release 9.9.9 wrote",
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_nobody_can_find_is_named_as_not_proven(folder, case):
    change, said = NAMED[case]
    change(folder)
    forge(folder, card=change is not another_release)
    assert said in verify(folder).text


def test_easy_held_out_sequences_are_found_by_a_reader_with_the_same_data(published, folder):
    measured_on(easiest)(folder)
    forge(folder)
    shards = published.root / "data/shards"
    said = refusal(folder, shards=shards)
    assert said.startswith("proof/held_out.safetensors: ") and f" {shards}, expected " in said
