"""A published run verifies from anywhere, whatever it began with and however it was trained."""

import shutil
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from parts.publication import layout, publish
from parts.publication.claims import VerifyOutcome
from pipeline import version
from pipeline.recheck import outputs
from pipeline.stage import devices
from pipeline.stage.artifacts import Paths
from tests import tiny
from tests.parts.publication.published_run import STAGES, TRANSCRIPT, print_of, refusal, verify
from tests.pipeline.audit.bundle.bundled_run import TWO_LIARS
from tests.pipeline.conversion import write_model
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub
from tests.servers.misbehaviour import Misbehaviour, flipped


def test_a_published_run_verifies_from_a_plain_web_server(published, tmp_path):
    with Files().serving() as server:
        server.add(published.folder)
        code, said = print_of("verify", server.address, "--root", str(tmp_path))
    count = len(tiny.contents(published.folder)) - 1
    named = ("model.safetensors", outputs.RUN, layout.MANIFEST)
    digests = ", ".join(f"{sha256_file(published.folder / name)} of {name}" for name in named)
    first, last, peer = window_of(published.folder)
    commit = read_json(published.folder / layout.MANIFEST)["commit"]
    measured = read_json(published.root / "metrics/evaluate.json")
    loss, error = measured["held_out_loss"], measured["held_out_stderr"]
    assert (code, said.splitlines()) == (
        VerifyOutcome.CONSISTENT.status,
        [
            "consistent, not verified: its author could choose what was repeated",
            "proven, computed again here",
            f"  - SHA-256 {digests}",
            f"  - {count} files as published",
            "  - the run begins with fresh weights of seed 0",
            "  - all messages that were applied in 6 rounds, 12 of 12 sent, lead from there to the "
            "weights, bit for bit",
            f"  - held-out loss {loss:.4f} measured again on 4 of 12 held-out sequences, standard "
            f"error {error:.3f}",
            "  - the card says what the records say",
            "  - generation_config.json made again",
            "sampled, computed again here for some of the run",
            f"  - window {first}-{last} of peer {peer} with 3 messages (1 of 4, drawn by the "
            "author: by the transcript's hash, which the author can vary) repeats bit for bit",
            "stated by the author, not proven",
            "  - who published it",
            "  - who was late or silent: 12 messages sent, 12 applied, 0 late or lost, peers "
            "silent 0 times, states withheld 0 times, 0 peers ejected, nothing applied in 0 of 6 "
            "rounds",
            "  - the work in 3 of 4 windows",
            "  - that the held-out split has 12 sequences",
            "  - that the author's audit replayed 4 windows",
            "  - losses while training",
            f"  - with what code and packages; the card says, of commit {commit}",
            "  - where the sequences come from",
        ],
    )
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["store"]


def test_it_is_pushed_to_the_hub_and_verifies_from_there(published, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_sentinel")
    monkeypatch.setattr(version, "CHECKOUT", published.checkout)
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        older = {"proof/old.json": b"{}", "model.sig": b"{}"}
        hub.commit(older | {"NOTES.txt": b"mine"})
        publish.push(published.run_file, published.root, [REPO], private=False, with_proof=True)
        pushed = dict(hub.files)
        assert pushed.pop("NOTES.txt") == b"mine"  # and nothing is left of an older proof
        assert pushed == tiny.contents(published.whole)
        arguments = ["verify", REPO, "--root", str(tmp_path)]
        _, said = print_of(*arguments)
        assert said.endswith(
            "NOTES.txt: a file that proof/publication.json does not list, expected none\n"
        )
        commit = hub.commit(pushed)
        code, said = print_of(*arguments)
        assert f"that the hub has these files in commit {commit}" in said
        assert (code, said[:10]) == (
            VerifyOutcome.VERIFIED.status,
            "verified: ",
        )  # all four windows
        hub.faults.append(Misbehaviour(flipped, where="README.md"))
        code, said = print_of("verify", REPO, "--root", str(tmp_path / "elsewhere"))
        assert code == 1 and "not verified: README.md: received git-sha1:" in said


def window_of(folder: Path) -> tuple[int, int, int]:
    """The first round, the last round and the peer of a publication of one window."""
    (name,) = (folder / outputs.ROWS).iterdir()
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


def test_rounded_weights_verify_too_and_without_a_report(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    tiny.write_run(run_file, tiny.run_document(published.data, export__dtype="bfloat16"))
    tiny.make(run_file, root, "export", "evaluate")
    publish.write(tmp_path / "rounded", run_file, root, 1, None)
    line = verify(tmp_path / "rounded").text
    assert "12 of 12 sent, lead from there to the weights, bit for bit" in line


def test_a_reader_with_the_same_data_knows_where_the_sequences_come_from(published):
    verified = verify(published.folder, shards=published.root / "data/shards")
    said = "the sequences of this window and the held-out ones are those of the reader's data"
    assert verified.claim("data").kind == "proven" and said in verified.text


@pytest.mark.long
def test_a_run_from_a_checkpoint_is_followed_from_the_readers_copy_of_it(published, tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, seed in ((own, 3), (other, 4)):
        write_model(folder, "float32", seed)
        (folder / "tokenizer.json").unlink()
        (folder / "generation_config.json").unlink()
    run_file, root = tiny.start(tmp_path, model__LLM__checkpoint={"Hub": {"repo_id": str(own)}})
    tiny.make(run_file, root, *STAGES)
    folder = tmp_path / "published"
    publish.write(folder, run_file, root, 1, None)
    assert "expected --checkpoint FOLDER" in refusal(folder)
    verified = verify(folder, checkpoint=own)
    assert (
        f"begins with the checkpoint in {own}\n  - all messages that were applied in 6"
        in verified.text
    )
    with pytest.raises(LockstepError, match="^proof/transcript: the params .* hash"):
        verify(folder, checkpoint=other)
    with pytest.raises(LockstepError, match=f"^--checkpoint {own}: "):
        verify(published.folder, checkpoint=own)


@pytest.mark.soak
def test_a_run_that_extends_another_is_followed_from_its_authors_state(published, tmp_path):
    root, run_file = shutil.copytree(published.root, tmp_path / "root"), tmp_path / "run.toml"
    key = Paths("train", published.run_file, published.root).key
    changes = {"config__total_steps": 9, "model__LLM__checkpoint": {"Run": key}}
    tiny.write_run(run_file, tiny.run_document(published.data, **changes))
    tiny.make(run_file, root, *STAGES)
    publish.write(tmp_path / "published", run_file, root, 1, None)
    verified = verify(tmp_path / "published")
    assert verified.claim("start").kind == "stated"
    assert f"  - that the run begins with the author's state of run {key}" in verified.text


@pytest.mark.soak
def test_on_another_machine_its_windows_are_stated_and_it_says_why(published, monkeypatch):
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "float32")  # the same bits on a CPU
    claim = verify(published.folder).claim("not_comparable")
    assert claim.kind == "stated" and "matmul_precision is 'float32' here" in claim.values["why"]
    monkeypatch.undo()
    devices.prepare_alone()  # which tells the tests' JAX


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", [tiny.ADAMW, tiny.DILOCO], ids=["AdamW", "DiLoCo"])
def test_a_run_whose_messages_are_not_kept_is_verified_for_all_its_peers(optimizer, tmp_path):
    run_file, root = tiny.start(tmp_path, model__LLM__optimizer=optimizer)
    tiny.make(run_file, root, *STAGES)
    publish.write(tmp_path / "published", run_file, root, 1, None)
    verified = verify(tmp_path / "published")
    assert verified.claim("windows").values["repeated"] == [(4, 6, 0), (4, 6, 1)]
    assert not verified.claim("weights").values["chain"]
    assert "the params before round 4, since messages as large as these are not kept" in (
        verified.text
    )
    publish.write(tmp_path / "whole", run_file, root, 2, None)
    line = verify(tmp_path / "whole").text
    assert "begins with fresh weights of seed 0" in line
    assert "replays of all windows lead from there to the weights" in line


@pytest.mark.soak
def test_an_honest_verdict_that_names_liars_verifies(tmp_path):
    run_file, root = tiny.start(tmp_path, **TWO_LIARS)
    tiny.make(run_file, root, *STAGES)
    for name, count, is_shown in (("whole", 99, True), ("one", 1, False)):
        publish.write(tmp_path / name, run_file, root, count, None)
        verified = verify(tmp_path / name)
        assert "what the author's audit found of peer 4 in round 1 (commitment)" in verified.text
        (claim,) = (c for c in verified.claims if "peer 0 in round 1 (check)" in c.text)
        assert claim.kind == ("proven" if is_shown else "stated")
