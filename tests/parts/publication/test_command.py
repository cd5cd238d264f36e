"""What `verify` prints and leaves, whatever the publication or its server is."""

import errno
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import jax
import pytest
from typer.main import get_command

from parts.publication import claims, publish, readers_checks
from parts.publication.claims import VerifyOutcome
from parts.publication.layout import ReaderAsks
from pipeline import version
from pipeline.__main__ import app
from pipeline.audit import unchecked_bundle
from pipeline.recheck import outputs
from pipeline.recheck.evaluate import held_out_claim
from pipeline.stage.keys import PROJECT
from pipeline.weights import hf
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import LIMITS, WORD, flip, print_of, verify
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour, silent, untagged


def test_the_command_says_why_and_exits_with_one(folder):
    flip("README.md")(folder)
    code, said = print_of("verify", str(folder))
    assert code == 1 and said.startswith("not verified: README.md: found ")
    code, said = print_of("verify", str(folder), "--json")
    said = json.loads(said)
    assert (code, said["verified"], said["claims"]) == (1, False, {})


def test_each_outcome_has_a_status_of_its_own_and_the_page_says_which():
    assert len({one.status for one in VerifyOutcome}) == len(VerifyOutcome) == 6
    page = (PROJECT / "docs/how-to/read-an-audit.md").read_text()
    for one in VerifyOutcome:
        assert f"\n| {one.status} | `{one.word}:` | " in page
        assert f"{one.status}  {one.word}: " in claims.table()


def test_the_line_counts_held_out_sequences_that_are_fewer_or_repeated(published):
    values = verify(published.folder).claim("held_out").values
    assert values["loss"] > 0
    assert (values["sequences"], values["different"], values["asked"]) == (4, 4, 4)
    for held, sample, said in (
        ((1.5, 0.25, 14, 14, 64, 90), "14 of 90 held-out sequences, ", "the 64 asked for"),
        ((1.5, 0.0, 64, 1, 64, 64), "64 of 64 held-out sequences, ", "only 1 differ"),
    ):
        text = held_out_claim(*held).text
        assert sample in text and text.endswith(said)
    assert set(outputs.COMPANIONS) == set(hf.COMPANIONS)


# A source of `verify`, and the options that nothing reads there: all but ALWAYS are of some.
ALWAYS = {"source", "root", "key", "max_gb", "as_json", "signing_key"}
IDLE = {
    "{folder}": (
        *readers_checks.OF_VOLUNTEERS,
        *readers_checks.OVER_NETWORK,
        *readers_checks.OF_WORKLOAD,
    ),
    "owner/name": readers_checks.OF_VOLUNTEERS,
    "file:///no/store": readers_checks.OF_PUBLICATION
    + readers_checks.OF_WORKLOAD
    + readers_checks.OVER_NETWORK,
}
VALUES = {"tasks": (), "follow": (), "seed": (WORD,), "replays": ("0:0",), "shards": ("{shards}",)}
VALUES |= {"stall_seconds": ("1.5",), "worker_module": ("mine",)}


@pytest.mark.parametrize(("source", "name"), [(s, name) for s in IDLE for name in IDLE[s]])
def test_an_option_of_verify_that_nothing_would_read_is_refused_with_its_value(
    source, name, published, tmp_path
):
    places = {"folder": published.folder, "shards": published.root / "data" / "shards"}
    option = {"replays": "--replay"}.get(name, f"--{name.replace('_', '-')}")
    given = [text.format(**places) for text in (option, *VALUES.get(name, ("1",)))]
    command = ["verify", source.format(**places), "--root", str(tmp_path / "root"), *given]
    code, said = print_of(*command)
    assert (code, said.count("\n")) == (VerifyOutcome.NOT_ASKED.status, 1)
    assert f"{' '.join(given)}: expected none" in said and not list(tmp_path.iterdir())


def test_every_option_of_verify_is_read_always_or_in_a_case_that_is_named():
    options = {option.name for option in get_command(app).commands["verify"].params}
    assert options == ALWAYS.union(*IDLE.values())


@pytest.mark.parametrize(("module", "named"), [("mine", "--worker-module"), ("1", "worker_module")])
def test_replay_takes_no_worker_without_a_workload_nor_one_that_cannot_be(module, named, published):
    with tiny.like_a_process(), refused(named, module):
        app(["replay", str(published.folder / outputs.PROOF), "--worker-module", module])


@pytest.mark.parametrize("word", ["", "mine", "0" * 32])
def test_a_word_that_can_be_guessed_draws_nothing(tmp_path, word):
    given = ["--seed", word]
    code, said = print_of("verify", "owner/name", *given, "--root", str(tmp_path))
    assert code == VerifyOutcome.NOT_ASKED.status and said.count("\n") == 1
    assert "openssl rand -hex 16" in said
    with refused("--seed", "openssl rand -hex 16"):
        tiny.invoked("publish", tmp_path / "new", *given)
    assert not list(tmp_path.iterdir())


def test_what_verify_makes_again_does_not_look_like_a_training(capsys):
    with redirect_stdout(readers_checks.StagesAgain(sys.stdout)):
        print("train: round 3/6  loss 1.0\ntraining: as it is")
    assert capsys.readouterr().out.splitlines() == [
        "verify: train again: round 3/6  loss 1.0", "training: as it is",
    ]  # fmt: skip


def test_a_silent_server_is_named_at_once_and_given_up_after_the_attempts_that_were_asked_for(
    tmp_path,
):
    with Files().serving() as server:
        server.faults.append(Misbehaviour(silent))
        limits = ["--attempts", 2, "--stall-seconds", 0.1, "--root", tmp_path]
        done = tiny.invoked("verify", f"{server.address}/x?signature=secret", *limits)
    asked = f"{server.address}/x/proof/publication.json?..."
    assert done.stderr.splitlines() == [
        f"verify: asks {asked}, at most 2 times for 0.1 s",
        f"{asked} timed out; asks again, 1 attempts are left",
    ]
    assert done.stdout == (
        f"not fetched: {asked} timed out, expected an answer within 2 attempts; run again\n"
    )
    paths = {path for _, path, _ in server.seen}
    assert paths == {"/x/proof/publication.json?signature=secret"}
    assert done.exit_code == VerifyOutcome.NOT_FETCHED.status and not list(tmp_path.iterdir())


OF_THIS_MACHINE = [
    *(OSError(e, os.strerror(e), "x.safetensors") for e in (errno.ENOSPC, errno.EACCES, errno.EIO)),
    *(MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: allocating 9 bytes.\nstack")),
]


@pytest.mark.parametrize("error", OF_THIS_MACHINE, ids=repr)
def test_a_readers_own_disk_and_memory_say_nothing_of_a_publication(
    published, tmp_path, monkeypatch, error
):
    def no_room(*_):
        raise error

    attested = tmp_path / "attested.json"
    command = ["verify", str(published.folder), "--root", str(tmp_path), "--attest", str(attested)]
    monkeypatch.setattr(unchecked_bundle, "read_run", no_room)
    code, said = print_of(*command)
    assert (code, code) == (6, VerifyOutcome.NOT_FINISHED.status)
    assert said.startswith("not finished: ") and said.count("\n") == 1
    assert not attested.exists()
    code, _ = print_of("replay", str(tmp_path))  # 1: a finding is not confirmed
    assert code == VerifyOutcome.NOT_FINISHED.status


def test_a_list_that_is_not_there_was_not_fetched(tmp_path):
    with Files().serving() as server:
        code, said = print_of("verify", server.address, "--root", str(tmp_path))
    assert code == VerifyOutcome.NOT_FETCHED.status and said.startswith("not fetched: ")


@pytest.mark.parametrize(
    "asked",
    [
        ["no-such-name"],
        ["{}", "--shards", "no-such-folder"],
        ["{}", "--attest", "no-such-folder/kept.json"],
    ],
    ids=["a name", "data", "an attestation"],
)
def test_a_wrong_request_says_so_and_makes_no_folder(asked, published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = tiny.invoked("verify", *(word.format(published.folder) for word in asked))
    assert done.exit_code == VerifyOutcome.NOT_ASKED.status and "no-such-" in done.output
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
            assert readers_checks.verify_publication(
                server.address, root, LIMITS, ReaderAsks()
            ).bitwise
        sizes = {name: len(content) for name, content in server.files.items()}
        assert server.sent["model.safetensors"] < 2 * sizes["model.safetensors"]


def test_it_is_written_into_this_folder_and_where_a_link_leads(published, tmp_path, monkeypatch):
    monkeypatch.setattr(version, "CHECKOUT", published.checkout)
    here, end, link = (tmp_path / name for name in ("here", "end", "link"))
    here.mkdir()
    end.mkdir()
    link.symlink_to(end)
    monkeypatch.chdir(here)
    for folder in (Path(), link):
        publish.write(folder, published.run_file, published.root, 4, None)
    monkeypatch.chdir(tmp_path)
    assert tiny.contents(here) == tiny.contents(end) == tiny.contents(published.whole)
    assert link.is_symlink() and {path.name for path in tmp_path.iterdir()} == {
        "here", "end", "link",
    }  # fmt: skip
