"""Forged publications, every hash, key and card of which their author made agree."""

import gzip
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.programs import held_out
from pipeline.programs.train_step import Programs
from pipeline.protocol import consensus, driver
from pipeline.publication import commands, layout, packed, publish
from pipeline.publication.fetch import Limits
from pipeline.publication.reader import ReaderAsks
from pipeline.stage.artifacts import read_json, sha256_file
from pipeline.swarm import begin
from pipeline.tasks import scores
from pipeline.transcript.entry import Entry
from pipeline.transcript.follow import begin_round
from pipeline.weights import exported, hf
from pipeline.weights.trees import load_arrays, save_tree
from pipeline.wire import exchange
from pipeline.wire import message as wire
from pipeline.wire.commitment import tree_hash
from tests import tiny
from tests.pipeline import finished_run, trained_run
from tests.pipeline.publication.published_run import (
    LIMITS,
    TRANSCRIPT,
    add,
    change_json,
    change_round,
    change_tensors,
    entry,
    flip,
    forge,
    refusal,
    rounds_sha256,
    verify,
)

HEADER = f"{TRANSCRIPT}/header.json"
SNAPSHOT = f"{TRANSCRIPT}/snapshots/{{:05}}/state.json"


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of a publication with all windows, to change."""
    return shutil.copytree(published.whole, tmp_path / "folder")


def other_weights(folder: Path) -> None:
    """Of another run, as stage export would write them."""
    config, params = hf.read_folder(folder)
    hf.write_folder(folder, config, jax.tree.map(lambda x: 1.01 * x, params), "float32")


def other_weights_and_their_hash(folder: Path) -> None:
    other_weights(folder)
    found = tree_hash(hf.read_folder(folder)[1])
    change_json(f"{TRANSCRIPT}/snapshots/00006/state.json", lambda s: s.update(params=found))(
        folder
    )


def other_rate(tables: dict) -> None:
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 4e-3


def change_run(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Another run file, in the transcript's header too."""

    def changed(folder: Path) -> None:
        change_json(layout.RUN, change)(folder)
        change_json(HEADER, lambda header: change(header["run"]))(folder)

    return changed


def other_seed(tables: dict) -> None:
    tables["model"]["LLM"]["checkpoint"]["Init"]["seed"] = 7


def other_seed_and_its_hash(folder: Path) -> None:
    """The first snapshot has the hash of fresh weights of the claimed seed."""
    change_run(other_seed)(folder)
    architecture, config = hf.model_of(read_json(folder / HEADER)["model"], HEADER)
    found = tree_hash(jax.device_get(architecture.init(config, 7)))
    own = jax.device_get(programs_of(folder).init(architecture.init(config, 7))[0])
    change_json(SNAPSHOT.format(0), lambda s: s.update(params=found, own=[tree_hash(own)] * 2))(
        folder
    )


def larger_model(tables: dict) -> None:
    tables["model"]["LLM"]["checkpoint"]["Init"]["config"] |= {
        "num_hidden_layers": 12,
        "hidden_size": 4096,
    }


def other_theta(tables: dict) -> None:
    tables["model"]["LLM"]["checkpoint"]["Init"]["config"]["rope_theta"] = 500000.0


def another_machine(header: dict) -> None:
    header["environment"] |= {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}


def back_door(folder: Path) -> None:
    """Some of the params, and their hash in the last snapshot."""
    config, params = hf.read_folder(folder)
    params["embed"]["embedding"] = params["embed"]["embedding"].copy()
    params["embed"]["embedding"][5] += 1.0
    hf.write_folder(folder, config, params, "float32")
    change_json(SNAPSHOT.format(6), lambda s: s.update(params=tree_hash(params)))(folder)


def and_then(*changes: Callable[[Path], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        for change in changes:
            change(folder)

    return changed


def other_token(folder: Path) -> None:
    change_tensors(f"{layout.ROWS}/00001-000.safetensors", change_token)(folder)


def other_state(folder: Path, *, hashed: bool) -> None:
    """Another momentum, with its hash in the snapshot or without."""
    plain = folder / TRANSCRIPT / "snapshots/00003/own-001.safetensors"
    path = plain.with_name(plain.name + packed.PLANES)
    packed.unpack(path, plain, 2**30)
    tensors = {name: array + np.float32(0.5) for name, array in load_arrays(plain).items()}
    save_tree(plain, unflatten_dict(tensors, sep="/"))
    packed.pack(plain, path)
    found = tree_hash(unflatten_dict(tensors, sep="/"))
    plain.unlink()

    def change(state: dict) -> None:
        state["own"][1] = found

    if hashed:
        change_json(SNAPSHOT.format(3), change)(folder)


def programs_of(folder: Path) -> Programs:
    run = runfile.parse(read_json(folder / layout.RUN), "run.json")
    model = read_json(folder / HEADER)["model"]
    with tiny.like_a_process():
        return begin.blank(run, model, None, ("inputs",), 0, 0).programs


def other_message(folder: Path) -> None:
    """A message of round 2 is another, and all that is said of it agrees."""
    line = gzip.decompress((folder / layout.ROUNDS).read_bytes()).splitlines()[1]
    entry = Entry.model_validate_json(line)
    plan, message = entry.round, entry.evidence.messages[0]
    path = folder / TRANSCRIPT / "payloads" / message.payload
    data = bytearray(path.read_bytes())
    form = programs_of(folder).form
    before = wire.decode(bytes(data[message.offset :][: message.bytes]), form)
    for at in range(message.offset + message.bytes - 1, message.offset, -1):
        data[at] ^= 1
        with suppress(wire.WireError):
            decoded = wire.decode(bytes(data[message.offset :][: message.bytes]), form)
            if tree_hash(decoded) != tree_hash(before):
                break
        data[at] ^= 1
    path.write_bytes(data)
    said = replace(message, commitment=exchange.commit(decoded, 0, plan, form).hex())
    evidence = replace(entry.evidence, messages=entry.evidence.messages | {0: said})
    limit = runfile.parse(read_json(folder / layout.RUN), "run.json").config.max_round_train_time
    honest = consensus.witnessed(plan, evidence, limit)
    evidence = replace(evidence, attestations=tuple(honest))
    other = entry.model_copy(update={"evidence": evidence})
    change_round(folder, 2, lambda e: e.update(json.loads(other.model_dump_json())))
    new_transcript_hash(folder)


def decide_again(folder: Path) -> None:
    """The decisions that follow from what all rounds say was sent."""
    lines = gzip.decompress((folder / layout.ROUNDS).read_bytes()).splitlines()
    run = runfile.parse(read_json(folder / layout.RUN), "run.json")
    with tiny.like_a_process():
        model = read_json(folder / HEADER)["model"]
        setup = begin.blank(run, model, None, ("inputs",), 0, 0)
    progress = setup.start.progress(setup.settings)
    for number, line in enumerate(lines, start=1):
        said = Entry.model_validate_json(line)
        progress = begin_round(progress, said)
        progress, decision = driver.finish_round(progress, said.round, said.evidence)
        other = json.loads(said.model_copy(update={"decision": decision}).model_dump_json())
        change_round(folder, number, lambda e, other=other: e.update(other))


def splice(other: Path) -> Callable[[Path], None]:
    """The second half is another run's, which began with other weights: rounds, states, weights."""

    def changed(folder: Path) -> None:
        lines = gzip.decompress((other / layout.ROUNDS).read_bytes()).splitlines()
        for number in (4, 5, 6):
            change_round(folder, number, lambda e, n=number: e.update(json.loads(lines[n - 1])))
        decide_again(folder)
        new_transcript_hash(folder)
        for name in ("model.safetensors", layout.EVALUATED, layout.RESULTS):
            shutil.copyfile(other / name, folder / name)
        names = [SNAPSHOT.format(step) for step in (3, 6)]
        names += [f"{TRANSCRIPT}/payloads/00004.bin"]
        for path in (other / TRANSCRIPT / "snapshots/00003").glob("own-*"):
            names.append(path.relative_to(other).as_posix())
        for name in names:
            shutil.copyfile(other / name, folder / name)

    return changed


def change_token(tensors: dict) -> None:
    tensors["rows"] = tensors["rows"].copy()
    tensors["rows"][:, 3] = (tensors["rows"][:, 3] + 1) % 64


def new_transcript_hash(folder: Path) -> None:
    """The verdict is of the rounds as they are."""
    found = rounds_sha256(folder)
    change_json(layout.VERDICT, lambda v: v.update(transcript=found, sample_seed=found))(folder)


def change_commitment(folder: Path) -> None:
    """One message of the first window, which is not published, is committed to as another."""
    change_round(folder, 2, lambda e: e["evidence"]["messages"]["0"].update(commitment="ab" * 32))
    new_transcript_hash(folder)


def change_card(folder: Path, pattern: str, said: str) -> None:
    path = folder / "README.md"
    text, count = re.subn(pattern, said, path.read_text(), count=1)
    assert count
    path.write_text(text)


def better(name: str, value: object) -> Callable[[Path], None]:
    """Another number in evaluate.json."""

    def changed(folder: Path) -> None:
        for file in (layout.EVALUATED, layout.RESULTS):
            change_json(file, lambda e: e.update({name: value}))(folder)

    return changed


def no_loss(folder: Path) -> None:
    names = ("held_out_loss", "perplexity", "bits_per_byte")
    for file in (layout.EVALUATED, layout.RESULTS):
        change_json(file, lambda e: e.update(dict.fromkeys(names)))(folder)


def without_results(folder: Path) -> None:
    change_card(folder, "(?s)model-index:.*?---\n", "---\n")


def fewer_rows(tensors: dict) -> None:
    for name, array in tensors.items():
        tensors[name] = array[:2]


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


FORGED = {
    "weights of another run": (other_weights, "model.safetensors: "),
    "weights of another run, with their hash in the transcript": (
        other_weights_and_their_hash,
        "round 6, params: the params at the snapshot are ",
    ),
    "a back door in some params, and a header that says that bits differ": (
        and_then(back_door, change_json(HEADER, lambda h: h.update(bitwise=False))),
        "round 6, params: the params at the snapshot are ",
    ),
    "a back door, and a header that names another machine": (
        and_then(back_door, change_json(HEADER, another_machine)),
        "round 6, params: the params at the snapshot are ",
    ),
    "a header that says that bits differ, on a machine like the reader's": (
        change_json(HEADER, lambda h: h.update(bitwise=False)),
        "header.json: bitwise is false, expected true: this machine is like the one that",
    ),
    "another model in config.json": (
        change_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)),
        "config.json: ",
    ),
    "a larger model in the run file": (
        change_run(larger_model),
        "header.json: head_dim of the model is 8, expected 2048 as model.LLM.checkpoint.Init",
    ),
    "another theta in the run file": (
        change_run(other_theta),
        "of the model is ",
    ),
    "a changed round": (change_commitment, "round 2, peer 0, commitment: payload hashes to "),
    "a changed message in a window that is not published": (
        other_message,
        "round 3, params: the params at the snapshot are ",
    ),
    "a changed token": (other_token, ", message: sent "),
    "a changed payload": (flip(f"{TRANSCRIPT}/payloads/00004.bin"), "proof/transcript: round "),
    "a changed state": (
        lambda folder: other_state(folder, hashed=False),
        "snapshot: its files do not have the hashes",
    ),
    "a changed state, with its hash": (
        lambda folder: other_state(folder, hashed=True),
        "proof/transcript: ",
    ),
    "a hash of params that nothing gives": (
        change_json(SNAPSHOT.format(3), lambda s: s.update(params="ab" * 32)),
        "round 3, params: the params at the snapshot are abababababab, expected ",
    ),
    "a verdict that was refused": (
        change_json(
            layout.VERDICT,
            lambda v: v["findings"].append(
                {"round": 2, "peer": 1, "kind": "message", "detail": "d", "applied": True}
            ),
        ),
        "proof/verdict.json: accepted is True, expected False, which follows from",
    ),
    "a verdict that replayed more": (
        change_json(layout.VERDICT, lambda v: v.update(windows=9)),
        "proof/verdict.json: windows is 9, expected 4",
    ),
    "a verdict whose honest repeats loosen a fixed tolerance": (
        change_json(
            layout.VERDICT,
            lambda v: v.update(
                method="tolerance", why_not_bitwise="because", tolerance=0.4, repeats=0.1
            ),
        ),
        "proof/verdict.json: tolerance is 0.4, expected 0.05, which follows from",
    ),
    "a run file with another learning rate": (
        change_json(layout.RUN, other_rate),
        "round 0, header: its run differs from the auditor's own",
    ),
    "another seed of fresh weights": (
        change_run(other_seed),
        "proof/transcript: params before the first round of hash ",
    ),
    "another seed of fresh weights, with its hash": (
        other_seed_and_its_hash,
        "round 3, params: the params at the snapshot are ",
    ),
    "a better loss": (
        better("held_out_loss", 1.0),
        "proof/evaluate.json: held_out_loss is 1.0000, expected ",
    ),
    "a better perplexity": (
        better("perplexity", 1.05),
        "proof/evaluate.json: perplexity is 1.0500, expected ",
    ),
    "more tokens": (
        better("tokens", 10**9),
        "proof/evaluate.json: tokens is 1000000000, expected 60 as measured here",
    ),
    "more sequences": (
        better("sequences", 10**6),
        "proof/evaluate.json: sequences is 1000000, expected 4 as measured here",
    ),
    "bits per byte without a tokenizer": (
        better("bits_per_byte", 1.0),
        "proof/evaluate.json: bits_per_byte is 1.0000, expected null as measured here",
    ),
    "a text for a perplexity": (
        better("perplexity", "a" * 3000),
        "proof/evaluate.json: perplexity is ",
    ),
    "no loss though something was held out": (
        no_loss,
        "proof/evaluate.json: held_out_loss is null, expected ",
    ),
    "fewer held-out sequences": (
        change_tensors(layout.HELD_OUT, fewer_rows),
        "proof/evaluate.json: ",
    ),
    "other held-out sequences than the first": (
        change_tensors(layout.HELD_OUT, lambda t: t.update(indices=t["indices"] + 1)),
        "proof/held_out.safetensors: 4 sequences up to 4, expected at most the first 4",
    ),
    "scores in one file of the two": (
        change_json(layout.EVALUATED, lambda e: e.update(tasks={"mmlu": {"acc": 0.99}})),
        "proof/results.json: other numbers than proof/evaluate.json, expected the same",
    ),
    "a base model that the run did not begin with": (
        change_json(layout.SOURCE, lambda s: s.update(repo_id="meta/large", commit="ab" * 20)),
        "proof/source.json: repo_id is 'meta/large', expected None as in proof/run.json",
    ),
    "other token ids where a text begins": (
        change_json("generation_config.json", lambda g: g.update(bos_token_id=3)),
        "generation_config.json: ",
    ),
    "other tables than the run file's in a made file": (
        change_json(layout.made("train"), lambda m: m["tables"]["peers"].update(count=9)),
        "proof/made/train.json: [peers] is ",
    ),
    "messages of nobody": (
        lambda folder: append(folder / TRANSCRIPT / "payloads/00004.bin", bytes(10**6)),
        "payloads/00004.bin: 100",
    ),
    "params that nobody needs": (
        add(f"{TRANSCRIPT}/snapshots/00003/params.safetensors"),
        "snapshots/00003/params.safetensors: a file that no drawn window needs, expected none",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_contradicts_itself_is_not_verified_though_all_hashes_agree(folder, case):
    change, said = FORGED[case]
    change(folder)
    forge(folder)
    assert said in refusal(folder)


@pytest.mark.parametrize(
    "data, said",
    [
        (gzip.compress(bytes(10**7)), "rounds.jsonl.gz: over "),
        (b"[]", "rounds.jsonl.gz: Not a gzipped file (b'[]'), expected a gzip file"),
    ],
    ids=["a bomb", "no gzip file"],
)
def test_rounds_that_do_not_unpack_are_refused(folder, data, said):
    (folder / layout.ROUNDS).write_bytes(data)
    change_json(
        layout.MANIFEST, lambda m: m["files"].update({layout.ROUNDS: entry(folder / layout.ROUNDS)})
    )(folder)
    with tiny.like_a_process(), pytest.raises(LockstepError, match=re.escape(said)):
        commands._verify(str(folder), folder.parent, Limits(0.005, LIMITS.network), ReaderAsks())


CARDS = {
    "a better loss": (
        ("(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held_out_loss of held_out is 1.0 in its model-index, expected ",
    ),
    "a better perplexity": (
        ("(type: perplexity\n +value:) [0-9.]+", r"\1 1.05"),
        "README.md: perplexity of held_out is 1.05 in its model-index, expected ",
    ),
    "a better loss, twice said": (
        ("(held_out_loss\n( +)value:)", r"\1 1.0\n\2value:"),
        "README.md: its front matter is not as the stages export and report write",
    ),
    "another name of the perplexity": (
        ("name: perplexity per token", "name: MMLU, accuracy"),
        "README.md: perplexity of held_out has another name in its model-index, expected ",
    ),
    "a score that nobody measured": (
        ("type: held_out\n", "type: mmlu\n"),
        "README.md: held_out_loss of mmlu is ",
    ),
    "no results": (
        ("(?s)model-index:.*?---\n", "---\n"),
        "README.md: ",
    ),
    "a word of praise": (
        ("\n## Data\n", "\nAudited by an independent lab; MMLU 91.2.\n\n## Data\n"),
        "README.md: line ",
    ),
    "a heading": (("\n# llama, ", "\n# GPT-5, "), "expected '# llama, "),
    "a word at the end": (("\\Z", "trust me\n"), "README.md: line "),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_of_which_a_word_was_changed_is_not_verified(folder, case):
    (pattern, said), expected = CARDS[case]
    change_card(folder, pattern, said)
    forge(folder, card=False)
    assert expected in refusal(folder)


def test_a_card_of_other_weights_is_not_verified(folder):
    text = (folder / "README.md").read_text()
    weights = sha256_file(folder / "model.safetensors")
    (folder / "README.md").write_text(text.replace(weights, "0" * 64))
    forge(folder, card=False)
    assert refusal(folder).startswith("README.md: another SHA-256 of model.safetensors, expected")


def test_a_second_half_of_another_run_is_not_verified(published, folder, tmp_path):
    splice(published.of_another_seed(tmp_path / "other"))(folder)
    forge(folder)
    assert "round 3, params: the params at the snapshot are " in refusal(folder)


# ---- What is not found, and is named as not proven ----


def test_a_header_that_names_another_machine_changes_the_exit_status_and_the_line(folder, capsys):
    change_json(HEADER, another_machine)(folder)
    forge(folder)
    verified = verify(folder)
    assert not verified.bitwise
    assert verified.claim("weights").values["chain"]  # on any machine
    line = verified.line()
    assert line.startswith("consistent within a tolerance, not verified: ")
    assert (
        "compared by tolerance (distance of a message at most 0.05, within which it may be "
        "anything; the peers' states are not compared), because the publisher says: device_kind is "
        "'cpu' here, was 'NVIDIA H100 80GB HBM3' in training"
    ) in line


def of_rounds(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        for number in range(1, 7):
            change_round(folder, number, change)
        new_transcript_hash(folder)

    return changed


def own_draw(folder: Path) -> None:
    """The author's own seed and percent of the audit, and its verdict."""
    sample = {"seed": "of the author's own", "replay_percent": 0.0}
    change_json(layout.RUN, lambda tables: tables["witness"].update(sample))(folder)
    verdict = {"replayed_windows": [], "sample_seed": sample["seed"], "sample_seed_of": "auditor"}
    change_json(layout.VERDICT, lambda v: v.update(verdict))(folder)


def other_words(folder: Path) -> None:
    """A tokenizer whose words mean other tokens than those of the training."""
    add("tokenizer.json")(folder)
    tokenizer = trained_run.make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    data = held_out.HeldOutRows(load_arrays(folder / layout.HELD_OUT)["rows"], ("inputs",))
    loss = read_json(folder / layout.EVALUATED)["held_out_loss"]
    for name, value in held_out.numbers(loss, data, tokenizer, []).items():
        better(name, value)(folder)
    name = layout.made("export")
    here = entry(folder / "tokenizer.json")
    change_json(name, lambda m: m["files"].update({"tokenizer.json": here}))(folder)


def other_packages(folder: Path) -> None:
    for stage in layout.STAGES:
        change_json(layout.made(stage), invented)(folder)


def invented(made: dict) -> None:
    made["environment"]["jax"] = "9.9"
    made["content"] |= {"pipeline/train.py": "ab" * 32}


def easiest(tensors: dict) -> None:
    for name in tensors:
        tensors[name] = tensors[name].copy()
    tensors["rows"][:] = tensors["rows"][0]


def measured_on(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Other held-out rows, and the loss that is measured on them."""

    def changed(folder: Path) -> None:
        change_tensors(layout.HELD_OUT, change)(folder)
        rows_NW = load_arrays(folder / layout.HELD_OUT)["rows"]
        model = exported.read(folder, scan=False)
        data = held_out.HeldOutRows(rows_NW, ("inputs",))
        run = runfile.parse(read_json(folder / layout.RUN), "run.json")
        with tiny.like_a_process():
            loss = held_out.exported_loss(model.features, model.head, model.params, data, run.peers)
        found = held_out.numbers(loss, data, None, [])
        for name, value in found.items():
            better(name, value)(folder)

    return changed


def one_row(tensors: dict) -> None:
    for name, array in tensors.items():
        tensors[name] = array[:1]


def invented_score(folder: Path) -> None:
    task = json.loads(json.dumps(scores.report(finished_run.NEXT_LINE)))
    change_json(layout.RESULTS, lambda r: r.update(tasks=[task]))(folder)
    flat = scores.flat(finished_run.NEXT_LINE)
    change_json(layout.EVALUATED, lambda e: e.update(tasks={"next_line": flat}))(folder)


def another_release(folder: Path) -> None:
    change_json(layout.MANIFEST, lambda m: m.update(release="9.9.9"))(folder)
    change_card(folder, "\n## Data\n", "\nAudited by an independent lab.\n\n## Data\n")


NAMED = {
    "other losses in all rounds": (
        of_rounds(lambda entry: entry.update(loss=0.5)),
        "losses while training",
    ),
    "the author's own draw of the audit": (
        own_draw,
        "that the author's audit replayed 0 windows",
    ),
    "another source of the data": (
        change_json(layout.SHARDS, lambda s: s["source"].update(read="FineWeb-Edu")),
        "where the sequences come from",
    ),
    "other packages and code": (other_packages, "with what code and packages"),
    "a tokenizer of other words": (other_words, "tokenizer.json"),
    "a score that nobody measured": (invented_score, "the scores of next_line"),
    "one held-out sequence": (
        measured_on(one_row),
        "measured again on 1 sequence of the 4 asked for;",
    ),
    "the same held-out sequence four times": (
        measured_on(easiest),
        "measured again on 4 sequences, of which only 1 differ;",
    ),
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
    assert said in verify(folder).line()


def test_easy_held_out_sequences_are_found_by_a_reader_with_the_same_data(published, folder):
    measured_on(easiest)(folder)
    forge(folder)
    said = refusal(folder, shards=published.root / "data/shards")
    assert said.startswith("proof/held_out.safetensors: other sequences than those of ")


def test_a_draw_by_the_authors_own_seed_is_said_to_be_that(published, tmp_path):
    tried = tmp_path / "tried"
    publish.write(tried, published.run_file, published.root, 1, "mine")
    assert "drawn by the transcript's hash and the author's own seed" in verify(tried).line()


@pytest.mark.soak  # compiles another program
def test_another_learning_rate_in_the_transcript_too_is_found_without_replay(folder):
    change_run(other_rate)(folder)
    forge(folder)
    assert "round 3, params: the params at the snapshot are " in refusal(folder)
