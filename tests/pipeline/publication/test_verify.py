"""A published run verifies from anywhere; a bad one does not, however its hashes are updated."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline import runfile
from pipeline.__main__ import app
from pipeline.errors import LockstepError
from pipeline.publication import commands, layout, publish, push
from pipeline.publication.checks import verify as verifying
from pipeline.publication.checks.measured import Measured
from pipeline.publication.reader import ReaderAsks
from pipeline.stage.artifacts import Paths, read_json
from pipeline.stage.keys import PROJECT
from pipeline.weights import hf
from tests import tiny
from tests.pipeline import trained_run
from tests.pipeline.audit.test_strange_bundles import put
from tests.pipeline.conversion import write_model
from tests.pipeline.publication.published_run import (
    LIMITS,
    STAGES,
    TRANSCRIPT,
    add,
    change_json,
    flip,
    forge,
    lose,
    refusal,
    verify,
)
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub
from tests.servers.misbehaviour import Misbehaviour, silent, untagged


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
    count = len(tiny.contents(published.folder)) - 1
    first, last, peer = window_of(published.folder)
    loss = read_json(published.root / "metrics/evaluate.json")["held_out_loss"]
    assert (code, said) == (
        0,
        f"verified: {count} files as published; the run begins with fresh weights of seed 0; all "
        "messages of 6 rounds lead from there to the weights, bit for bit; window "
        f"{first}-{last} of peer {peer} (1 of 4, drawn by the author: by the transcript's hash, "
        "which has free digits) repeats bit for bit; held-out loss "
        f"{loss:.4f} measured again on 4 sequences; the card made again; generation_config.json "
        "made again; not proven: the work in 3 of 4 windows, that the author's audit replayed 4 "
        "windows, losses while training, with what code and packages, and where the sequences come "
        "from\n",
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


def window_of(folder: Path) -> tuple[int, int, int]:
    """The first round, the last round and the peer of a publication of one window."""
    (name,) = (folder / layout.ROWS).iterdir()
    first, peer = map(int, name.stem.split("-"))
    return first, first + 2, peer


def test_it_has_all_messages_and_no_params_but_the_weights(published):
    names = set(tiny.contents(published.folder))
    first, _, peer = window_of(published.folder)
    own = f"snapshots/{first - 1:05}/own-{peer:03}.safetensors.planes.gz"
    assert {name for name in names if name.startswith(TRANSCRIPT)} == {
        f"{TRANSCRIPT}/header.json",
        f"{TRANSCRIPT}/rounds.jsonl.gz",
        f"{TRANSCRIPT}/payloads/00001.bin",
        f"{TRANSCRIPT}/payloads/00004.bin",
        *(f"{TRANSCRIPT}/snapshots/{step:05}/state.json" for step in (0, 3, 6)),
        f"{TRANSCRIPT}/{own}",
    }


# ---- Which windows ----


def test_a_reader_may_ask_for_windows_that_nobody_could_foresee(published, tmp_path):
    folder = tmp_path / "asked"
    publish.write(folder, published.run_file, published.root, 3, "a reader's word")
    verified = verify(folder, seed="a reader's word")
    assert len(verified.claim("windows").values["repeated"]) == 3
    assert "(3 of 4, drawn by the transcript's hash and the reader's seed) repeat bit" in (
        verified.line()
    )
    with pytest.raises(LockstepError, match="has 3 of the run's 4 windows, drawn by its author"):
        verify(folder, seed="another", windows=3)
    assert "the transcript's hash and the author's own seed" in verify(folder, windows=1).line()


def test_a_reader_draws_among_the_published_windows_and_fetches_no_others(published, tmp_path):
    folder, seen = tmp_path / "all", set()
    publish.write(folder, published.run_file, published.root, 4, None)
    with Files().serving() as server:
        server.add(folder)
        for seed in "abcd":
            with tiny.like_a_process():
                verified = commands._verify(server.address, tmp_path, LIMITS, ReaderAsks(seed))
            seen |= {*verified.claim("windows").values["repeated"]}
            assert "(1 of 4, drawn by the reader's seed from the 4 that are published)" in (
                verified.line()
            )
        fetched = {path for path, count in server.sent.items() if count}
    assert 1 < len(seen) < 5
    rows = {name for name in fetched if name.startswith(layout.ROWS)}
    assert len(rows) == len(seen) == len([name for name in fetched if "/own-" in name])
    assert "(4 of 4, all there are) repeat bit for bit" in verify(folder).line()
    with pytest.raises(LockstepError, match="4 windows are published, expected 5; ask the author"):
        verify(folder, windows=5)


def test_a_seed_that_would_draw_nothing_is_refused(published):
    with pytest.raises(LockstepError, match="has 1 of the run's 4 windows, drawn by its author"):
        verify(published.folder, seed="mine")


def test_rounded_weights_verify_too_and_without_a_report(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, export__dtype="bfloat16"))
    tiny.make(run_file, root, "export", "evaluate")
    publish.write(tmp_path / "rounded", run_file, root, 1, None)
    line = verify(tmp_path / "rounded").line()
    assert "all messages of 6 rounds lead from there to the weights, bit for bit" in line


def test_a_reader_with_the_same_data_knows_where_the_sequences_come_from(published):
    verified = verify(published.folder, shards=published.root / "data/shards")
    said = "the sequences of this window and the held-out ones are those of the reader's data"
    assert verified.claim("data").kind == "proven" and said in verified.line()


def test_a_beacon_draws_audit_and_publication_and_the_line_says_which(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, witness__beacon="4 8 15 16 23 42"))
    tiny.make(run_file, root, "witness", "export", "evaluate")
    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["sample_seed"] == f"4 8 15 16 23 42 {verdict['transcript']}"
    assert verdict["sample_seed_of"] == "beacon"
    publish.write(tmp_path / "drawn", run_file, root, 1, None)
    line = verify(tmp_path / "drawn").line()
    assert (
        "drawn by the transcript's hash and the beacon, '4 8 15 16 23 42', given by hand)" in line
    )
    assert ", that the transcript was public before the beacon," in line


# ---- What the run began with ----


def test_a_run_from_a_checkpoint_is_followed_from_the_readers_copy_of_it(published, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, seed in ((own, 3), (other, 4)):
        write_model(folder, "float32", seed)
        (folder / "tokenizer.json").unlink()
        (folder / "generation_config.json").unlink()
    document = tiny.run_document(published.data)
    document["model"]["LLM"]["checkpoint"] = {"Hub": {"repo_id": str(own)}}
    tiny.write_run(tmp_path / "run.toml", document)
    tiny.make(tmp_path / "run.toml", tmp_path / "root", *STAGES)
    folder = tmp_path / "published"
    publish.write(folder, tmp_path / "run.toml", tmp_path / "root", 1, None)
    assert "expected its folder, as config.json and safetensors, by --checkpoint" in refusal(folder)
    verified = verify(folder, checkpoint=own)
    assert f"begins with the checkpoint in {own}; all messages of 6 rounds" in verified.line()
    with pytest.raises(LockstepError, match="params before the first round of hash"):
        verify(folder, checkpoint=other)
    with pytest.raises(LockstepError, match="began with fresh weights, expected it without"):
        verify(published.folder, checkpoint=own)


@pytest.mark.soak
def test_a_run_that_extends_another_is_followed_from_its_authors_state(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    key = Paths("train", published.run_file, published.root).key
    document = tiny.run_document(published.data, config__total_steps=9)
    document["model"]["LLM"]["checkpoint"] = {"Run": key}
    tiny.write_run(run_file, document)
    tiny.make(run_file, root, *STAGES)
    publish.write(tmp_path / "published", run_file, root, 1, None)
    verified = verify(tmp_path / "published")
    assert verified.claim("start").kind == "stated"
    assert f"not proven: that the run begins with the author's state of run {key}" in (
        verified.line()
    )


# ---- Bad ones, whose list or content is another ----

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
        change_json(layout.MANIFEST, lambda m: m["files"].pop(layout.ROUNDS)),
        "does not list proof/transcript/rounds.jsonl.gz, expected it in a publication",
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
    said = json.loads(said)
    assert (code, said["verified"], said["claims"]) == (1, False, {})


# ---- What is said, and what is left ----


def test_the_line_counts_held_out_sequences_that_are_fewer_or_repeated(published):
    values = verify(published.folder).claim("held_out").values
    assert values["loss"] > 0
    assert (values["sequences"], values["different"], values["asked"]) == (4, 4, 4)
    for held, said in (
        (Measured(1.5, 14, 14, 64), "1.5000 measured again on 14 sequences of the 64 asked for"),
        (Measured(1.5, 64, 1, 64), "1.5000 measured again on 64 sequences, of which only 1 differ"),
    ):
        assert verifying._held_out(held).text.endswith(said)
    assert set(layout.COMPANIONS) == set(hf.COMPANIONS)


def test_the_object_for_scripts_has_a_field_for_each_claim(published, capsys):
    code, said = print_of(capsys, "verify", str(published.folder), "--json")
    said = json.loads(said)
    assert (code, said["verified"], said["bitwise"], said["reason"]) == (0, True, True, None)
    assert {name: claim["is"] for name, claim in said["claims"].items()} == {
        "files": "proven",
        "start": "proven",
        "weights": "proven",
        "windows": "sampled",
        "held_out": "proven",
        "card": "proven",
        "generation_config.json": "proven",
        "other_windows": "stated",
        "verdict": "stated",
        "losses": "stated",
        "keys": "stated",
        "data": "stated",
    }


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
            assert commands._verify(server.address, root, LIMITS, ReaderAsks()).bitwise
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
    verified = verify(tmp_path / "published")
    assert verified.claim("windows").values["repeated"] == [(4, 6, 0), (4, 6, 1)]
    assert not verified.claim("weights").values["chain"]
    assert "the params before round 4, since messages as large as these are not kept" in (
        verified.line()
    )
    publish.write(tmp_path / "whole", run_file, root, 2, None)
    line = verify(tmp_path / "whole").line()
    assert "with fresh weights of seed 0; replays of all windows lead from there to the" in line


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
