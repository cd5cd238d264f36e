"""The stage, with each provider: what is true of the shards whichever of them made these."""

import hashlib
import json
import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from pipeline import config, download, providers, tokens
from pipeline.artifacts import Paths, verify
from pipeline.errors import LockstepError
from pipeline.providers import corpus

RUN = Path(__file__).parents[2] / "params" / "run.toml"
SEEDED = {"Seeded": list(range(32))}


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """What stands for the standard library."""
    folder = tmp_path / "stdlib"
    folder.mkdir()
    for n in range(20):
        (folder / f"m{n}.py").write_text("".join(f"x{i} = {i + n}\n" for i in range(60)))
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(folder))
    return folder


@pytest.fixture
def local(tmp_path) -> Path:
    """A folder of token files."""
    folder = tmp_path / "local"
    folder.mkdir()
    for n, name in enumerate(["b.ds", "a.ds", "c.ds"]):
        (np.arange(700, dtype="<u2") + n).tofile(folder / name)
    return folder


@pytest.fixture(params=["corpus", "local"])
def location(request, sources, local) -> dict:
    """Each location that has a provider, as it stands in a run file."""
    return {
        "corpus": {"Corpus": {"vocab_size": 300, "held_out_percent": 20.0, "shuffle": SEEDED}},
        "local": {
            "Local": {"path": str(local), "token_size_in_bytes": "TwoBytes", "shuffle": SEEDED}
        },
    }[request.param]


def settings(location) -> config.Run:
    document = config.read_toml(RUN)
    document["model"]["LLM"]["data_location"] = location
    return config.parse(document, "a test")


def run(location, root: Path) -> Path:
    paths = Paths("download", RUN, root)
    download.run(settings(location), paths)
    return paths.out("download")


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_two_runs_give_identical_bytes(location, tmp_path):
    assert content(run(location, tmp_path / "a")) == content(run(location, tmp_path / "b"))


def test_shards_json_tells_each_file_and_the_made_file_verifies(location, tmp_path):
    folder = run(location, tmp_path)
    (made,) = folder.glob("made-*.json")
    verify(made)
    said = json.loads((folder / "shards.json").read_text())
    assert said["format"] == 1
    assert said["shuffle"] == SEEDED
    assert len(said["source"]["sha256"]) == 64
    assert {file["split"] for file in said["files"]} == {"train", "held_out"}
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*.ds")}
    assert {file["path"] for file in said["files"]} == on_disk
    for file in said["files"]:
        data = (folder / file["path"]).read_bytes()
        assert len(data) == file["tokens"] * said["token_size_in_bytes"] > 0
        assert hashlib.sha256(data).hexdigest() == file["sha256"]


def test_every_sequence_comes_once_and_lies_in_the_vocabulary(location, tmp_path):
    folder = run(location, tmp_path)
    for split in ("train", "held_out"):
        sequences = tokens.open_shards(folder, split, 32)
        assert len(sequences) > 3
        taken = sequences.take(np.arange(len(sequences)))
        files = tokens.read_shards(folder).split(split)
        whole = [
            tokens.map_tokens(folder / file.path, 2)[: file.tokens // 32 * 32].reshape(-1, 32)
            for file in files
        ]
        in_file_order = np.concatenate(whole)
        assert sorted(map(tuple, taken)) == sorted(map(tuple, in_file_order))
        assert np.array_equal(taken, in_file_order) == (split == "held_out")
    vocab_size = tokens.read_shards(folder).vocab_size
    if vocab_size is not None:
        tokens.check_ids(folder, vocab_size)
        assert (folder / "tokenizer" / "tokenizer.json").is_file()


def test_what_was_read_is_said_in_two_lines_and_a_warning(location, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(location, tmp_path)
    *warnings, read, found = caplog.messages
    assert read.startswith("download: read ") and read.endswith("not pinned)")
    assert " train tokens in " in found and " held_out tokens in " in found
    # The folder has no held_out/, so its last file is held out.
    assert len(warnings) == ("Local" in location)


def test_an_earlier_result_is_whole_after_a_refused_run(local, tmp_path):
    location = {"Local": str(local)}
    before = content(run(location, tmp_path))
    (local / "b.ds").write_bytes(b"odd")
    with pytest.raises(LockstepError, match=r"b\.ds"):
        run(location, tmp_path)
    assert content(tmp_path / "data" / "shards") == before


@pytest.mark.parametrize(
    ("location", "name"),
    [
        ("Dummy", "Dummy"),
        ({"Server": "localhost:1234"}, "Server"),
        ({"WeightedHttp": "https://example.org/data.json"}, "WeightedHttp"),
        ({"Preprocessed": "owner/name"}, "Preprocessed"),
        (
            {
                "Http": {
                    "token_size_in_bytes": "TwoBytes",
                    "shuffle": "DontShuffle",
                    "location": {"SingleUrl": "https://example.org/a.ds"},
                }
            },
            "Http",
        ),
    ],
)
def test_location_without_a_provider_is_refused_by_name_before_any_work(location, name, tmp_path):
    with pytest.raises(LockstepError) as caught:
        run(location, tmp_path)
    assert f"model.LLM.data_location.{name}" in str(caught.value)
    assert "expected Corpus or Local" in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_a_provider_is_found_by_its_file_name():
    for location, name in providers.PROVIDERS.items():
        assert location.tag().lower() == name
        folder = Path(providers.__file__).parent
        assert (folder / f"{name}.py").is_file()


def test_one_provider_does_not_import_another(monkeypatch):
    for name in providers.PROVIDERS.values():
        monkeypatch.delitem(sys.modules, f"pipeline.providers.{name}", raising=False)
    local = next(kind for kind, name in providers.PROVIDERS.items() if name == "local")
    found = providers.get(local(path="x"))
    assert isinstance(found, types.ModuleType)
    assert "pipeline.providers.corpus" not in sys.modules
