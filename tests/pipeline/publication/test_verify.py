"""A published run verifies from anywhere; a bad one does not, however its hashes are updated."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from pipeline import runfile
from pipeline.__main__ import app
from pipeline.errors import LockstepError
from pipeline.pages import push
from pipeline.publication import commands, layout, publish
from pipeline.publication.fetch import Limits
from pipeline.publication.repeat import Measured
from pipeline.runfile import Network
from pipeline.stage.artifacts import _digest, read_json, sha256_file, write_json
from pipeline.stage.keys import PROJECT, needs
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf
from pipeline.weights.trees import load_arrays, save_tree
from pipeline.wire.commitment import tree_hash
from tests import tiny
from tests.pipeline import trained_run
from tests.pipeline.audit.test_strange_bundles import put
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub
from tests.servers.misbehaviour import Misbehaviour, silent, untagged

STAGES = layout.STAGES
TRANSCRIPT = layout.TRANSCRIPT
LIMITS = Limits(1, Network(attempts=2, stall_seconds=1))


class Published:
    """A finished tiny run, and its publication."""

    def __init__(self, folder: Path):
        self.run_file, self.root = folder / "run.toml", folder / "root"
        self.data = tiny.write_data(folder / "tokens")
        self.folder = folder / "published"
        tiny.write_run(self.run_file, tiny.run_document(self.data))
        tiny.make(self.run_file, self.root, *STAGES, layout.REPORT)
        publish.write(self.folder, self.run_file, self.root, 1, None)


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Published:
    return Published(tmp_path_factory.mktemp("published"))


@pytest.fixture
def folder(published, tmp_path) -> Path:
    """A copy of the publication, to change."""
    return shutil.copytree(published.folder, tmp_path / "folder")


def verify(source: Path | str, seed: str | None = None):
    """What the command proves, or the error that it prints."""
    root = Path(source).parent / "reader"
    try:
        with tiny.like_a_process():
            return commands._verify(str(source), root, seed, LIMITS)
    finally:
        assert not root.exists()  # nothing of a folder is copied, or left


def refusal(source: Path) -> str:
    with pytest.raises(LockstepError) as caught:
        verify(source)
    assert "\n" not in str(caught.value) and "/tmp" not in str(caught.value)
    return str(caught.value)


def print_of(capsys, *arguments: str) -> tuple[int, str]:
    """The exit status of the command, and what it prints."""
    with tiny.like_a_process(), pytest.raises(SystemExit) as caught:
        app(list(arguments))
    return caught.value.code, capsys.readouterr().out


# ---- Good ones ----


def test_a_published_run_verifies_from_a_plain_web_server(published, tmp_path, capsys):
    with Files().serving() as server:
        server.add(published.folder)
        code, said = print_of(capsys, "verify", server.address, "--root", str(tmp_path))
    count, peer = len(tiny.contents(published.folder)) - 1, last_peer(published.folder)
    loss = read_json(published.root / "metrics/evaluate.json")["held_out_loss"]
    assert (code, said) == (
        0,
        f"verified: {count} files as published; the transcript begins with fresh weights of seed "
        f"0; the weights are the params after round 6; window 4-6 of peer {peer}, drawn by the "
        f"transcript's hash, repeats bit for bit; held-out loss {loss:.4f} measured again on 4 "
        "sequences; not proven: 3 of 4 windows, generation_config.json, the text of the card, and "
        "where the sequences come from\n",
    )
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["store"]


def test_it_is_pushed_to_the_hub_and_verifies_from_there(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_sentinel")
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        hub.commit({"proof/old.json": b"{}", "NOTES.txt": b"mine"})
        push.push(published.run_file, published.root, [REPO], private=False, with_proof=True)
        pushed = dict(hub.files)
        assert pushed.pop("NOTES.txt") == b"mine"  # and nothing is left of an older proof
        assert pushed == tiny.contents(published.folder)
        arguments = ["verify", REPO, "--root", str(tmp_path)]
        _, said = print_of(capsys, *arguments)
        assert said.endswith(
            "NOTES.txt: a file that proof/publication.json does not list, expected none\n"
        )
        hub.commit(pushed)
        code, said = print_of(capsys, *arguments)
        assert (code, said[:10]) == (0, "verified: ")
        hub.damaged = "README.md"
        code, said = print_of(capsys, "verify", REPO, "--root", str(tmp_path / "elsewhere"))
        assert code == 1 and "not verified: README.md: received git-sha1:" in said


def last_peer(folder: Path) -> int:
    """The peer whose state a publication of one window holds."""
    (own,) = (folder / TRANSCRIPT).glob("snapshots/*/own-*")
    return int(own.stem.removeprefix("own-"))


def test_it_holds_nothing_twice(published):
    names = set(tiny.contents(published.folder))
    opening = f"{TRANSCRIPT}/snapshots/00003"
    assert {name for name in names if name.startswith(TRANSCRIPT)} == {
        f"{TRANSCRIPT}/header.json",
        f"{TRANSCRIPT}/rounds.jsonl",
        f"{TRANSCRIPT}/payloads/00004.bin",
        *(f"{TRANSCRIPT}/snapshots/{step:05}/state.json" for step in (0, 3, 6)),
        f"{opening}/params.safetensors",
        f"{opening}/shared.safetensors",
        f"{opening}/own-{last_peer(published.folder):03}.safetensors",
        f"{TRANSCRIPT}/snapshots/00006/shared.safetensors",
    }


def test_a_reader_may_ask_for_windows_that_nobody_could_foresee(published, tmp_path):
    folder = tmp_path / "asked"
    publish.write(folder, published.run_file, published.root, 3, "a reader's word")
    proven = verify(folder, "a reader's word")
    assert len(proven.repeated) == 3 and (4, 6) in {(a, b) for a, b, _ in proven.repeated}
    assert (
        "drawn by the transcript's hash and the reader's seed, repeat bit for bit" in proven.line()
    )
    with pytest.raises(LockstepError, match="seed is .*a reader's word.*, expected 'another'"):
        verify(folder, "another")
    assert "the transcript's hash and the publisher's seed, repeat" in verify(folder).line()


def test_rounded_weights_verify_too_and_without_a_report(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, export__dtype="bfloat16"))
    tiny.make(run_file, root, "export", "evaluate")
    publish.write(tmp_path / "rounded", run_file, root, 1, None)
    assert verify(tmp_path / "rounded").last == 6


# ---- Bad ones, whose author updates every hash ----


def forge(folder: Path) -> None:
    """Makes card, made files and list agree with the files, as anybody could."""
    listed = read_json(folder / layout.MANIFEST)
    text = (folder / "README.md").read_text()
    for name, file in listed["files"].items():
        if (folder / name).is_file():
            text = text.replace(file["sha256"], sha256_file(folder / name))
    (folder / "README.md").write_text(text)
    places = {  # of a stage's files, here and in its own folder
        "train": (f"{TRANSCRIPT}/", "transcript/"),
        "witness": ("proof/", ""),
        "export": ("", ""),
        "report": ("", ""),
        "evaluate": ("proof/", "metrics/"),
    }
    for stage in (*STAGES, layout.REPORT):
        path = folder / layout.made(stage)
        if not path.is_file():
            continue
        made = read_json(path)
        del made["sha256"]
        made["needs"] = {n: sha256_file(folder / layout.made(n)) for n in needs(stage)}
        place, original = places.get(stage, ("nowhere/", ""))
        for name in made["files"]:
            found = folder / f"{place}{name.removeprefix(original)}"
            if name.startswith(original) and found.is_file():
                made["files"][name] = entry(found)
        write_json(path, made | {"sha256": _digest(made)})
    for name in listed["files"]:
        if (folder / name).is_file():
            listed["files"][name] = entry(folder / name)
    write_json(folder / layout.MANIFEST, listed)


def entry(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def change_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        said = read_json(folder / name)
        change(said)
        write_json(folder / name, said)

    return changed


def change_tensors(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_arrays(folder / name)
        change(tensors)
        save_tree(folder / name, tensors)

    return changed


def flip(name: str) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)

    return changed


def change_round(folder: Path, number: int, change: Callable[[dict], object]) -> None:
    path = folder / TRANSCRIPT / "rounds.jsonl"
    lines = path.read_text().splitlines()
    said = json.loads(lines[number - 1])
    change(said)
    lines[number - 1] = json.dumps(said, separators=(",", ":"))
    path.write_text("\n".join(lines) + "\n")


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


def other_seed(folder: Path) -> None:
    """The run file and the transcript's header say another seed of the fresh weights."""

    def change(tables: dict) -> None:
        tables["model"]["LLM"]["checkpoint"]["Init"]["seed"] = 1

    change_json(layout.RUN, change)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: change(header["run"]))(folder)


def change_token(tensors: dict) -> None:
    tensors["rows"] = tensors["rows"].copy()
    tensors["rows"][:, 3] = (tensors["rows"][:, 3] + 1) % 64


def new_transcript_hash(folder: Path) -> None:
    """The verdict is of the rounds as they are."""
    found = Transcript(folder / TRANSCRIPT).hash
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


def better_loss(folder: Path) -> None:
    change_json(layout.EVALUATED, lambda e: e.update(held_out_loss=1.0))(folder)
    change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0")


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def better(name: str, value: object) -> Callable[[Path], None]:
    """Another number in evaluate.json, and on the card if it is there."""

    def changed(folder: Path) -> None:
        change_json(layout.EVALUATED, lambda e: e.update({name: value}))(folder)
        with suppress(AssertionError):
            change_card(folder, f"(type: {name}\n +value:) [0-9.]+", rf"\1 {value}")

    return changed


def no_loss(folder: Path) -> None:
    names = ("held_out_loss", "perplexity", "bits_per_byte")
    change_json(layout.EVALUATED, lambda e: e.update(dict.fromkeys(names)))(folder)


def without_results(folder: Path) -> None:
    change_card(folder, "(?s)model-index:.*?---\n", "---\n")


def fewer_rows(tensors: dict) -> None:
    for name, array in tensors.items():
        tensors[name] = array[:2]


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def add(name: str) -> Callable[[Path], None]:
    """One more file, which the list has."""

    def changed(folder: Path) -> None:
        (folder / name).write_bytes(b"{}")
        change_json(layout.MANIFEST, lambda m: m["files"].update({name: entry(folder / name)}))(
            folder
        )

    return changed


FORGED = {
    "weights of another run": (
        other_weights,
        "the weights: params of hash ",
    ),
    "weights of another run, with their hash in the transcript": (
        other_weights_and_their_hash,
        "round 6, params: the params do not follow from the window's messages",
    ),
    "another model in config.json": (
        change_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)),
        "config.json: ",
    ),
    "a changed round": (change_commitment, "round 2, decision: does not follow from the evidence"),
    "a changed token": (
        change_tensors(layout.TOKENS, change_token),
        ", message: sent ",
    ),
    "a changed payload": (flip(f"{TRANSCRIPT}/payloads/00004.bin"), "proof/transcript: round "),
    "a changed state": (
        flip(f"{TRANSCRIPT}/snapshots/00003/params.safetensors"),
        "round 3, snapshot: ",
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
    "other fresh weights": (
        other_seed,
        "proof/transcript: params before the first round of hash ",
    ),
    "a better loss on the card": (
        lambda folder: change_card(folder, "(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held_out_loss of held_out is 1.0 in its model-index, expected ",
    ),
    "a better perplexity on the card": (
        lambda folder: change_card(folder, "(type: perplexity\n +value:) [0-9.]+", r"\1 1.05"),
        "README.md: perplexity of held_out is 1.05 in its model-index, expected ",
    ),
    "a better loss on the card, twice said": (
        lambda folder: change_card(folder, "(held_out_loss\n( +)value:)", r"\1 1.0\n\2value:"),
        "README.md: its front matter is not as the stages export and report write",
    ),
    "another name of the perplexity on the card": (
        lambda folder: change_card(folder, "name: perplexity per token", "name: MMLU, accuracy"),
        "README.md: perplexity of held_out has another name in its model-index, expected ",
    ),
    "a score that nobody measured on the card": (
        lambda folder: change_card(folder, "type: held_out\n", "type: mmlu\n"),
        "README.md: held_out_loss of mmlu is ",
    ),
    "a better loss, on the card too": (
        better_loss,
        "proof/evaluate.json: held_out_loss is 1.0000, expected ",
    ),
    "a better perplexity, on the card too": (
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
        "README.md: no bits_per_byte of held_out in its model-index, expected it as in proof/",
    ),
    "a text for a perplexity": (
        better("perplexity", "a" * 3000),
        "proof/evaluate.json: perplexity is ",
    ),
    "no loss though something was held out": (
        no_loss,
        "README.md: held_out_loss of held_out is ",
    ),
    "no loss, nor on the card": (
        lambda folder: (no_loss(folder), without_results(folder)),
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
    "messages of nobody": (
        lambda folder: append(folder / TRANSCRIPT / "payloads/00004.bin", bytes(10**6)),
        "payloads/00004.bin: 100",
    ),
    "payloads that no drawn window needs": (
        add(f"{TRANSCRIPT}/payloads/00001.bin"),
        "payloads/00001.bin: a file that no drawn window needs, expected none",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_what_contradicts_itself_is_not_verified_though_all_hashes_agree(folder, case):
    change, said = FORGED[case]
    change(folder)
    forge(folder)
    assert said in refusal(folder)


@pytest.mark.soak  # compiles another program
def test_another_learning_rate_in_the_transcript_too_is_found_by_the_replay(folder):
    change_json(layout.RUN, other_rate)(folder)
    change_json(f"{TRANSCRIPT}/header.json", lambda header: other_rate(header["run"]))(folder)
    forge(folder)
    assert ", message: sent " in refusal(folder)


CHANGED = {
    "a card with one flipped bit": (flip("README.md"), "README.md: found "),
    "a missing file": (lose("config.json"), "config.json: no such file, expected it as proof/"),
    "a file too many": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        "adapter_config.json: a file that proof/publication.json does not list, expected none",
    ),
    "a file elsewhere": (
        change_json(
            layout.MANIFEST, lambda m: m["files"].update({"../x.json": m["files"]["README.md"]})
        ),
        "lists a file named '../x.json', expected a path inside it",
    ),
    "code": (
        change_json(
            layout.MANIFEST, lambda m: m["files"].update({"x.py": m["files"]["README.md"]})
        ),
        "lists 'x.py', expected files of an export and of proof/ alone",
    ),
    "a file beside the weights that others would load": (
        add("adapter_config.json"),
        "lists 'adapter_config.json', expected files of an export and of proof/ alone",
    ),
    "a file of the proof that no stage leaves": (
        add("proof/x1.json"),
        "lists 'proof/x1.json', expected files of an export and of proof/ alone",
    ),
    "2,000 folders": (
        change_json(
            layout.MANIFEST,
            lambda m: m["files"].update({"a/" * 2000 + "b": m["files"]["README.md"]}),
        ),
        "..., expected a path inside it",
    ),
    "a sparse file of 100 GB in place of a small one": (
        lambda folder: os.truncate(folder / "README.md", 10**11),
        "README.md: found 100000000000 bytes, expected ",
    ),
    "no rounds": (
        change_json(layout.MANIFEST, lambda m: m["files"].pop(f"{TRANSCRIPT}/rounds.jsonl")),
        "does not list proof/transcript/rounds.jsonl, expected it in a publication",
    ),
    "100 GB": (
        change_json(layout.MANIFEST, lambda m: m["files"]["README.md"].update(bytes=10**11)),
        "100.0 GB, expected at most 1 GB; where a publication may be that large",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_what_its_list_does_not_have_is_not_verified(folder, case):
    change, said = CHANGED[case]
    change(folder)
    with pytest.raises(LockstepError) as caught:
        verify(folder)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_command_says_why_and_exits_with_one(folder, capsys):
    flip("README.md")(folder)
    code, said = print_of(capsys, "verify", str(folder))
    assert code == 1 and said.startswith("not verified: README.md: found ")
    code, said = print_of(capsys, "verify", str(folder), "--json")
    assert (code, json.loads(said)["proven"]) == (1, False)


def test_a_card_of_other_weights_is_not_verified(folder):
    text = (folder / "README.md").read_text()
    forge(folder)
    weights = sha256_file(folder / "model.safetensors")
    (folder / "README.md").write_text(text.replace(weights, "0" * 64))
    forge(folder)
    assert refusal(folder).startswith("README.md: another SHA-256 of model.safetensors, expected")


# ---- What is said, and what is left ----


def test_a_header_that_says_that_bits_differ_changes_the_exit_status_and_the_line(folder, capsys):
    change_json(f"{TRANSCRIPT}/header.json", lambda h: h.update(bitwise=False))(folder)
    forge(folder)
    code, said = print_of(capsys, "verify", str(folder), "--root", str(folder.parent))
    assert code == 3 and said.startswith("verified within a tolerance: ")
    assert (
        "compared by tolerance (distance at most 0.05, and up to 2% of the params may be "
        "anything), because the publisher says: the training machine did not repeat a step bit "
        "for bit"
    ) in said
    code, said = print_of(capsys, "verify", str(folder), "--root", str(folder.parent), "--json")
    said = json.loads(said)
    assert (code, said["proven"], said["bitwise"], said["reason"]) == (3, False, False, None)


def test_the_line_counts_held_out_sequences_that_are_fewer_or_repeated(published):
    proven = verify(published.folder)
    assert proven.held_out.loss > 0 and proven.held_out[1:] == (4, 4, 4)
    for held, said in (
        (Measured(1.5, 14, 14, 64), "1.5000 measured again on 14 sequences of the 64 asked for;"),
        (
            Measured(1.5, 64, 1, 64),
            "1.5000 measured again on 64 sequences, of which only 1 differ;",
        ),
    ):
        assert said in proven._replace(held_out=held).line()
    tokenizer = proven._replace(companions=["tokenizer.json"], tasks=["mmlu"])
    assert (
        "not proven: 3 of 4 windows, the scores of mmlu, tokenizer.json, the text of the card, and "
        "where the sequences come from"
    ) in tokenizer.line()
    assert set(layout.COMPANIONS) == set(hf.COMPANIONS)


def test_a_silent_server_is_named_at_once_and_given_up_after_the_attempts_that_were_asked_for(
    tmp_path, capsys
):
    with Files().serving() as server, tiny.like_a_process(), pytest.raises(SystemExit) as caught:
        server.faults.append(Misbehaviour(silent))
        limits = ["--attempts", "2", "--stall-seconds", "0.1", "--root", str(tmp_path)]
        app(["verify", f"{server.address}/x?signature=secret", *limits])
    said, asked = capsys.readouterr(), f"{server.address}/x/proof/publication.json?..."
    assert said.err.splitlines() == [
        f"verify: asks {asked}, at most 2 times for 0.1 s",
        f"{asked} timed out; asks again, 1 attempts are left",
    ]
    assert said.out == (
        f"not verified: {asked} timed out, expected an answer within 2 attempts; run again\n"
    )
    paths = {path for _, path, _ in server.seen}
    assert paths == {"/x/proof/publication.json?signature=secret"}
    assert caught.value.code == 1 and not list(tmp_path.iterdir())


def test_a_list_of_over_a_mebibyte_is_not_read_to_its_end(tmp_path, capsys):
    with Files().serving() as server:
        server.put(layout.MANIFEST, b" " * (2**20 + 1))
        _, said = print_of(capsys, "verify", server.address, "--root", str(tmp_path))
    assert said.endswith("a listing of over 1048576 bytes, expected less\n")


def test_a_wrong_name_makes_no_folder(tmp_path, capsys):
    code, said = print_of(capsys, "verify", "no-such-name", "--root", str(tmp_path))
    assert code == 1 and said.startswith("not verified: no-such-name: no such folder, expected")
    assert not list(tmp_path.iterdir())


def test_what_sigterm_cuts_off_leaves_downloads_alone_and_goes_on_with_them(published, tmp_path):
    root = tmp_path / "reader"
    with Files(bytes_per_second=2e4).serving() as server:
        server.add(published.folder)
        server.faults.append(Misbehaviour(untagged))
        command = [sys.executable, "-m", "pipeline", "verify", server.address, "--root", str(root)]
        with subprocess.Popen(
            command, cwd=PROJECT, env=tiny.environment(PROJECT), stderr=subprocess.PIPE, text=True
        ) as process:
            while not server.sent.get("model.safetensors"):
                time.sleep(0.01)
            process.terminate()
            said = process.stderr.read()
        assert said.endswith(
            "SIGTERM received; the same command begins again, and fetches no byte twice\n"
        )
        assert process.returncode == 143
        assert [path.name for path in (root / "data").iterdir()] == ["store"]
        server.bytes_per_second = None
        with tiny.like_a_process():
            assert commands._verify(server.address, root, None, LIMITS).bitwise
        sizes = {name: len(content) for name, content in server.files.items()}
        assert server.sent["model.safetensors"] < 2 * sizes["model.safetensors"]


# ---- What is not published ----


def test_a_refused_export_is_not_published(tmp_path):
    finding = {"round": 2, "peer": 1, "kind": "message", "detail": "d"}
    trained_run.make(tmp_path / "run", verdict={"accepted": False, "findings": [finding]})
    with pytest.raises(
        LockstepError, match=r"refused.json: peer 1 in round 2 \(message\); expected"
    ):
        publish.write(tmp_path / "new", tmp_path / "run/run.toml", tmp_path / "run", 1, None)
    assert not (tmp_path / "new").exists()


def test_files_of_others_are_not_replaced_and_no_secret_is_published(published, tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(LockstepError, match="has files, expected a new or an empty folder"):
        publish.write(tmp_path, published.run_file, published.root, 1, None)
    signed = {"Url": {"url": "https://example.org/a.ds?signature=secret"}}
    run_file = tmp_path / "signed.toml"
    tiny.write_run(run_file, tiny.run_document(Path(), model__LLM__data_location=signed))
    with pytest.raises(LockstepError, match="has a user, a password or a query") as caught:
        publish.write(tmp_path / "new", run_file, published.root, 1, None)
    assert "secret" not in str(caught.value)


def test_the_published_run_file_names_nothing_of_a_machine_and_is_valid_on_the_walls_clock():
    document = tiny.run_document(
        Path("tokens"),
        links__clock="wall",
        runtime__carrier="processes",
        runtime__by_hand=[1],
        runtime__listen="10.0.0.7:5000",
    )
    said = publish.public(runfile.parse(document.unwrap(), "run.toml"))
    assert "10.0.0.7" not in json.dumps(said) and not said["runtime"]["by_hand"]
    assert runfile.parse(said, "run.json").links.clock == "wall"


# ---- Other machines, other runs, and anything at all ----


@pytest.mark.soak
def test_on_another_machine_it_verifies_within_a_tolerance_and_says_why(published, monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "float32")  # the same bits on a CPU
    line = verify(published.folder).line()
    assert "because the publisher says: matmul_precision is 'float32' here" in line


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", [tiny.ADAMW, tiny.DILOCO], ids=["AdamW", "DiLoCo"])
def test_a_run_whose_messages_are_not_kept_is_verified_for_all_its_peers(optimizer, tmp_path):
    run_file, root = tmp_path / "run.toml", tmp_path / "root"
    data = tiny.write_data(tmp_path / "tokens")
    tiny.write_run(run_file, tiny.run_document(data, model__LLM__optimizer=optimizer))
    tiny.make(run_file, root, *STAGES)
    publish.write(tmp_path / "published", run_file, root, 1, None)
    assert verify(tmp_path / "published").repeated == [(4, 6, 0), (4, 6, 1)]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_a_mutated_publication_is_verified_or_refused_in_one_short_line(seed, folder):
    rng = random.Random(seed)
    for _ in range(rng.randint(1, 2)):
        path = folder / rng.choice(
            [n for n in tiny.contents(folder) if n.endswith(("json", "jsonl"))]
        )
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(put(rng, json.loads(lines[at])))
        path.write_text("\n".join(lines))
    with suppress(Exception):  # the lists themselves are no lists any more
        forge(folder)
    try:
        verify(folder)
    except LockstepError as error:
        assert str(error).isprintable() and len(str(error)) < 3000
