"""`lockstep push`: an accepted export goes where it is told, and loads again from there."""

import shutil
import tomllib
from pathlib import Path

import pytest

from lockstep.files import read_json, sha256_file
from parts.publication import publish
from pipeline import __main__, runfile, version
from pipeline.pages.card import with_commit
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import commit_source
from tests.pipeline import trained_run
from tests.pipeline.conversion import convert_in
from tests.pipeline.sources import options
from tests.servers.bucket import running_bucket
from tests.servers.hub import REPO, running_hub

TOKEN = "hf_sentinel"
FORM = "owner/name on the hub or gs://bucket/prefix, each name of at most 64 bytes"
SAMPLE = tomllib.loads((PROJECT / "tests/fixtures/psyche_older_spelling.toml").read_text())
OLDER = SAMPLE["config"] | {
    "min_clients": 4,
    "total_steps": trained_run.ROUNDS,
}  # checkpointers too


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A finished run that was accepted, made with the source of a commit."""
    root = tmp_path_factory.mktemp("exported")
    trained_run.make(root)
    commit_source(root / "checkout")
    return root


@pytest.fixture
def root(exported, tmp_path, monkeypatch) -> Path:
    """A copy of it to change."""
    monkeypatch.setattr(version, "CHECKOUT", exported / "checkout")
    return shutil.copytree(exported, tmp_path / "root")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub(monkeypatch, tmp_path / "home") as server:
        yield server


@pytest.fixture
def gcs(monkeypatch):
    with running_bucket(monkeypatch) as server:
        yield server


def run(root: Path, *destinations: str, private: bool = False) -> None:
    publish.push(root / "run.toml", root, destinations, private=private)


def refusal(root: Path, *destinations: str) -> str:
    return options.refusal(run, root, *destinations)


def checkpoint_of(line: str) -> dict:
    """The TOML at a line's end, which its reader copies."""
    return tomllib.loads(line[line.index("checkpoint = ") :])["checkpoint"]


def export_of(root: Path) -> dict[str, bytes]:
    files = tiny.contents(root / "data" / "export")
    card = with_commit(files["README.md"].decode(), version.commit())
    exported = {name: content for name, content in files.items() if not name.startswith("made-")}
    return exported | {"README.md": card.encode()}


# ---- There and back ----


def test_an_export_goes_to_the_hub_and_loads_by_the_revision_that_is_printed(
    root, hub, tmp_path, capsys
):
    run(root, REPO)
    key = Paths("train", root / "run.toml", root).key
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"push: {REPO} has step {trained_run.ROUNDS} of run {key}; ")
    assert hub.messages == [f"Step {trained_run.ROUNDS} of run {key}"]
    assert hub.private is False
    attributes = {".gitattributes": hub.files[".gitattributes"]}
    assert hub.files == export_of(root) | attributes
    checkpoint = checkpoint_of(line)
    assert checkpoint == {"Hub": {"repo_id": REPO, "revision": hub.refs["main"]}}
    hub.commit({"model.safetensors": b"of somebody else"})
    (tmp_path / "next").mkdir()
    out = convert_in(tmp_path / "next", checkpoint)
    files = read_json(out / "source.json")["files"]
    weights = sha256_file(root / "data" / "export" / "model.safetensors")
    assert files["model.safetensors"] == weights
    assert f"Bearer {TOKEN}" in {said for _, _, said in hub.seen}


def test_an_export_goes_to_a_bucket_and_loads_by_the_generation_that_is_printed(
    root, gcs, tmp_path, capsys
):
    run(root, "gs://ours/runs/a")
    line = capsys.readouterr().out.splitlines()[-1]
    live = gcs.live()
    del live["runs/a/manifest.json"]
    assert live == {f"runs/a/{name}": content for name, content in export_of(root).items()}
    generation = gcs.find("runs/a/manifest.json", None).generation
    checkpoint = checkpoint_of(line)
    where = {"bucket": "ours", "prefix": "runs/a", "generation": generation}
    assert checkpoint == {"Gcs": where}
    gcs.put("runs/a/model.safetensors", b"of somebody else")
    (tmp_path / "next").mkdir()
    out = convert_in(tmp_path / "next", checkpoint)
    weights = sha256_file(root / "data" / "export" / "model.safetensors")
    assert read_json(out / "source.json")["files"]["model.safetensors"] == weights


def test_the_run_files_checkpointers_are_destinations_each_once(tmp_path, hub, gcs, capsys):
    trained_run.make(tmp_path / "older", config=OLDER | {"checkpointers": [REPO, "gs://ours/a"]})
    run(tmp_path / "older", "gs://ours/b", REPO)
    said = capsys.readouterr().out.splitlines()
    pushed = [line.split()[1] for line in said if line.startswith("push: ") and "step" in line]
    assert pushed == ["gs://ours/b", REPO, "gs://ours/a"]
    assert len(hub.messages) == 1
    assert {name.partition("/")[0] for name in gcs.objects} == {"a", "b"}


# ---- What is not pushed ----


def test_a_refused_export_is_refused(tmp_path, hub, gcs):
    finding = {"round": 2, "peer": 1, "kind": "message", "detail": "d"}
    trained_run.make(tmp_path / "run", verdict={"accepted": False, "findings": [finding]})
    said = refusal(tmp_path / "run", REPO, "gs://ours")
    assert said == (
        f"{tmp_path}/run/data/export/refused.json: peer 1 in round 2 (message); expected an export "
        "that the witness accepted"
    )
    assert hub.seen == gcs.seen == []


def test_an_export_that_is_edited_of_other_parameters_or_missing_is_refused(root, gcs):
    config, file = root / "data/export/config.json", root / "run.toml"
    before, missing = config.read_text(), "missing, expected from stage export with the current"
    config.write_text("{}")
    assert "config.json: found 2 bytes of sha256" in refusal(root, "gs://ours")
    config.write_text(before)
    file.write_text(file.read_text().replace('dtype = "float32"', 'dtype = "bfloat16"'))
    assert missing in refusal(root, "gs://ours")
    file.write_text(file.read_text().replace('dtype = "bfloat16"', 'dtype = "float32"'))
    shutil.rmtree(root / "data" / "export")
    assert missing in refusal(root, "gs://ours")
    assert gcs.seen == []


def test_no_destination_is_one_line_nor_is_one_that_has_not_what_is_asked_for(root):
    for asked in ({"private": True}, {"private": False, "with_proof": True}):
        with refused("gs://ours", "expected a repository on the hub"):
            publish.push(root / "run.toml", root, ["gs://ours"], **asked)
    assert refusal(root) == (
        f"{root}/run.toml: [config] checkpointers names no destination, and neither does the "
        f"command; expected {FORM}"
    )


def test_a_destination_of_another_form_is_refused_wherever_it_stands(root, gcs):
    document = tomllib.loads((root / "run.toml").read_text())
    for name in (
        *("name", "owner/", "https://huggingface.co/owner/name", "./owner/name", "owner/../name"),
        *("gs://Ours", "gs://ours/../theirs", "gs://ours/a//b", "gs://ours/" + "a" * 65),
        *("owner/" + "n" * 60, ""),
    ):
        assert refusal(root, "gs://ours", name) == f"{name!r}: expected {FORM}"
        document["config"] = OLDER | {"checkpointers": ["owner/name", name]}
        with refused("run.toml: config.checkpointers[1] is", f"expected {FORM}"):
            runfile.parse(document, "run.toml")
    assert gcs.seen == []


# ---- The command ----


def test_the_command_says_what_a_server_refused_and_keeps_the_token(root, hub, monkeypatch, capfd):
    hub.refuse = ("repos/create", 403)
    arguments = ["push", REPO, "--run", str(root / "run.toml"), "--root", str(root), "--private"]
    monkeypatch.setattr("sys.argv", ["lockstep", *arguments])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    said = str(caught.value.code)
    assert said.startswith(f"error: {REPO}: 403 Forbidden: we do not like Bearer ... that is")
    assert "\n" not in said
    printed = capfd.readouterr()
    assert TOKEN not in said + printed.out + printed.err
    assert f"Bearer {TOKEN}" in {said for _, _, said in hub.seen}
    hub.refuse = None
    with pytest.raises(SystemExit) as caught:
        __main__.main()
    assert caught.value.code == 0
    assert hub.private
    assert TOKEN not in "".join(capfd.readouterr())
