"""Files of the hub: those of its client's cache where it is not to be had; no hub has a path."""

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import snapshot_download

from lockstep.machine.progress import Progress
from pipeline.net import limits
from pipeline.net.transfers import hub_files, store
from pipeline.runfile import Network
from pipeline.runfile.data import DataHub, DataPreprocessed, DataText, Limit, ShuffleDontShuffle
from pipeline.sources.text import tokenizing
from pipeline.sources.token_files.remote_files import REPO_ID, list_dataset
from pipeline.weights import hub_model
from tests import tiny
from tests.errors import refused
from tests.pipeline.sources import corpora
from tests.pipeline.sources.options import fetch_into, options, refusal
from tests.servers import hub as hub_server
from tests.servers.hub import REPO, Repo

NETWORK = Network(attempts=1)
TOKENS = {f"{n}.ds": np.arange(100 + n, dtype="<u2").tobytes() for n in range(3)}
README = "---\nconfigs:\n- config_name: ours\n  data_files:\n  - path: data/*\n---\n"
ROWS = corpora.parquet_of([[1, 2, 3]] * 20, column="inputs")
DATA = TOKENS | {
    "README.md": README.encode(),
    "data/0.parquet": corpora.parquet_of(corpora.stories(300)),
    "rows/train.parquet": ROWS,
    "rows/val.parquet": ROWS,
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model and a dataset, both in the client's cache."""
    with hub_server.running_hub(monkeypatch, tmp_path / "home") as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        model = corpora.write_tokenizer(tmp_path / "model")
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(bytes(5000))
        hub.add(model)
        hub.datasets["ours/data"] = Repo()
        hub.datasets["ours/data"].commit(DATA)
        yield hub


def lost(monkeypatch, how: str) -> None:
    """The hub is not to be had from now on."""
    monkeypatch.setattr(limits, "pause", lambda *_: None)
    if how == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")


def without_listing(cache: Path, kind: str) -> None:
    """As clients before 2.0 leave it."""
    shutil.rmtree(cache / kind / "trees")


def as_copies(cache: Path, kind: str) -> None:
    """As it is where there are no links."""
    for path in (cache / kind / "snapshots").rglob("*"):
        if path.is_symlink():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    shutil.rmtree(cache / kind / "blobs")


@pytest.mark.parametrize("how", ["offline", "out of reach"])
@pytest.mark.parametrize("change", [None, without_listing, as_copies])
def test_a_commit_that_the_clients_cache_has_is_that_of_the_hub(
    tmp_path, hub, monkeypatch, how, change
):
    commit = hub.refs["main"]
    snapshot_download(REPO, revision=commit)
    if change:
        change(tmp_path / "cache", f"models--{REPO.replace('/', '--')}")
    asked = len(hub.seen)
    lost(monkeypatch, how)
    folder = hub_model.download(REPO, commit, tmp_path / "store", NETWORK)
    assert folder.name == commit
    expected = {name for name in hub.files if name != "README.md"}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: hub.files[name] for name in expected
    }
    location = corpora.location("text", tokenizer=REPO, tokenizer_revision=commit)
    how_to_fetch = options(tmp_path / "store2")
    assert tokenizing.copy_tokenizer(location, tmp_path / "t", how_to_fetch).vocab_size == 302
    assert len(hub.seen) == asked


def test_a_branch_is_what_the_client_last_took_it_for_only_where_all_is_offline(
    tmp_path, hub, monkeypatch
):
    commit = hub.refs["main"]
    snapshot_download(REPO)
    lost(monkeypatch, "out of reach")
    assert "expected an answer" in refusal(
        hub_model.download, REPO, None, tmp_path / "store", NETWORK
    )
    lost(monkeypatch, "offline")
    assert hub_model.download(REPO, None, tmp_path / "store", NETWORK).name == commit
    said = refusal(hub_model.download, REPO, "0" * 40, tmp_path / "store", NETWORK)
    assert "HF_HUB_OFFLINE is set" in said


@pytest.mark.parametrize("how", ["offline", "out of reach"])
def test_a_dataset_in_the_clients_cache_gives_what_the_hub_gives(tmp_path, hub, monkeypatch, how):
    commit = hub.datasets["ours/data"].refs["main"]
    text = {"vocab_size": 270, "held_out_percent": 30.0, "shuffle": ShuffleDontShuffle()}
    locations = {
        "tokens": DataHub(repo_id="ours/data", revision=commit),
        "text": DataText(source="ours/data", revision=commit, subset="ours", **text),
    }
    if how == "offline":
        locations["rows"] = DataPreprocessed(source="ours/data")
    expected = shards_of(locations, tmp_path / "hub")
    snapshot_download("ours/data", repo_type="dataset")
    asked = len(hub.seen)
    lost(monkeypatch, how)
    assert shards_of(locations, tmp_path / "none") == expected
    assert len(hub.seen) == asked


def shards_of(locations: dict, folder: Path) -> dict[str, bytes]:
    """What is made of each location, and of the text within a limit."""
    for name, location in locations.items():
        fetch_into(folder / "all" / name, location)
    fetch_into(folder / "limited" / "text", locations["text"], Limit(tokens=500))
    files = tiny.contents(folder)
    return {name: content for name, content in files.items() if "/store/" not in name}


def test_what_the_cache_lacks_or_has_damaged_is_one_line_with_its_name(tmp_path, hub, monkeypatch):
    where = "datasets/ours/data"
    folder = Path(snapshot_download("ours/data", repo_type="dataset"))
    lost(monkeypatch, "offline")
    (folder / "0.ds").unlink()
    with open(folder / "1.ds", "r+b") as file:
        file.write(b"?")
    listed = hub_files.list_repo(where, folder.name, "here", NETWORK).files
    assert listed.keys() == DATA.keys()
    for name in ("0.ds", "1.ds"):
        transfer = store.Transfer(name, listed[name], listed[name].size)
        with Progress("fetch", total=1, unit="byte") as bar:
            said = refusal(store.fetch, [transfer], tmp_path / "store", NETWORK, bar)
        assert f"{name}: HF_HUB_OFFLINE is set, expected it in the store" in said


@pytest.mark.parametrize("name", ["/nothere", "./nothere", "../nothere", "~/nothere"])
def test_a_name_that_can_only_be_a_path_is_asked_for_on_no_hub(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # were a hub asked, the error would name this
    monkeypatch.chdir(tmp_path)
    rest = (None, tmp_path / "store", ("*",), "a folder", NETWORK, partial(Progress, "new"))
    with refused(name, "no such folder"):
        hub_files.download(f"Hub: {name}", name, *rest)
    with refused(name, "no such folder"):
        list_dataset(name, None, f"Hub: {name}", NETWORK)
    assert not REPO_ID.fullmatch(name)
