"""The store itself, whatever is fetched into it."""

import hashlib
import random

import pytest

from lockstep.errors import LockstepError
from lockstep.machine.progress import Progress
from pipeline.net import remote, web
from pipeline.net.errors import NetError
from pipeline.net.limits import FetchLimit
from pipeline.net.origin import Origin
from pipeline.net.transfers import hub_files, store
from pipeline.runfile import Network
from tests.errors import refused
from tests.servers import hub as hub_server
from tests.servers.files import Files
from tests.servers.hub import Repo
from tests.servers.misbehaviour import Misbehaviour, meanwhile, truncated, untagged

NETWORK = Network(connections=1, attempts=1)


def fetch(files: Files, folder, attempts: int = 1, **known: str) -> store.StoredFile:
    """Fetch a.ds, of which this is known beside its size."""
    size, how = len(files.files["a.ds"]), Network(connections=1, attempts=attempts)
    origin = Origin(url=files.url("a.ds"), size=size, **known)
    with Progress("fetch", total=size, unit="byte") as bar:
        return store.fetch([store.Transfer("a.ds", origin, size)], folder, how, bar)[0]


@pytest.mark.parametrize("suffix", ["whole", "part"])
def test_a_link_in_the_store_is_neither_read_nor_written_through(tmp_path, suffix):
    with Files({"a.ds": b"1234"}).serving() as files:
        tag = files.tags["a.ds"]
        first = fetch(files, tmp_path / "store", tag=tag).path
        (tmp_path / "ours").write_bytes(b"1234" if suffix == "whole" else b"12")
        first.unlink()
        link = first if suffix == "whole" else first.with_suffix(".part")
        link.symlink_to(tmp_path / "ours")
        if suffix == "whole":
            assert not fetch(files, tmp_path / "store", tag=tag).path.is_symlink()
        else:
            with pytest.raises(LockstepError, match="expected to write there"):
                fetch(files, tmp_path / "store", tag=tag)
    assert (tmp_path / "ours").read_bytes() == (b"1234" if suffix == "whole" else b"12")


def test_files_beyond_a_readers_limit_are_refused_before_a_byte_of_them_comes(tmp_path):
    with Files({"a.ds": b"1234", "b.ds": b"12"}).serving() as files:

        def fetch_one(name: str, size: int) -> None:
            transfer = store.Transfer(name, Origin(url=files.url(name), size=size), size)
            with Progress("fetch", total=size, unit="byte") as bar:
                store.fetch([transfer], tmp_path / "store", NETWORK, bar)

        with FetchLimit(5, "say so with --max-gb"):
            fetch_one("a.ds", 4)
            fetch_one("a.ds", 4)  # counts once
            with refused(6, 5, "--max-gb"):
                fetch_one("b.ds", 2)
        assert not any("b.ds" in path for _, path, _ in files.seen)
        fetch_one("b.ds", 2)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.JSON.gz", "a.jsonl.zst"])
def test_json_is_itself_where_the_file_is_named_for_it(tmp_path, name):
    others = {"a.ds": b"{}", "json/a": b"{}"}
    with Files(files={name: b"{}"} | others, kind="application/json").serving() as files:
        for url in (files.url(name), f"{files.url(name)}?key=1"):
            assert web.head(remote.resolve_web(url), NETWORK).size == 2
        for other in others:
            with pytest.raises(NetError, match="a web page"):
                web.head(remote.resolve_web(files.url(other)), NETWORK)


def fetch_checked(files: Files, folder, content: bytes) -> bytes:
    """Fetch a file of which nothing but its SHA-256 is known, as a publication lists it."""
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return fetch(files, folder, attempts=2, checksum=checksum).path.read_bytes()


def test_a_file_whose_hash_is_known_resumes_though_the_server_names_no_version(tmp_path):
    content = random.Random(0).randbytes(100_000)
    with Files({"a.ds": content}).serving() as files:
        files.faults += [Misbehaviour(untagged), Misbehaviour(truncated, times=2)]
        assert fetch_checked(files, tmp_path, content) == content
        assert files.sent["a.ds"] == len(content) and len(files.seen) == 3


def test_it_resumes_what_another_process_left_and_begins_again_if_that_is_of_another_version(
    tmp_path,
):
    old, new = (random.Random(seed).randbytes(1000) for seed in (1, 2))
    with Files({"a.ds": new}).serving() as files:
        files.faults.append(Misbehaviour(untagged))
        assert fetch_checked(files, tmp_path, new) == new
        (whole,) = tmp_path.glob("files/*/*")
        part = whole.with_suffix(".part")
        for begun, asked in ((new[:900], 1100), (old[:900], 2200)):
            whole.unlink()
            part.write_bytes(begun)
            assert fetch_checked(files, tmp_path, new) == new
            assert files.sent["a.ds"] == asked


def test_a_file_that_changes_while_it_is_fetched_is_fetched_again_if_its_hash_says_so(tmp_path):
    old, new = (random.Random(seed).randbytes(1000) for seed in (1, 2))
    with Files({"a.ds": old}).serving() as files:
        files.faults += [
            Misbehaviour(untagged),
            Misbehaviour(meanwhile(lambda: files.put("a.ds", new)), times=1),
        ]
        assert fetch_checked(files, tmp_path, new) == new


@pytest.mark.parametrize("end", [b"", b"?"])
def test_a_file_in_the_cache_of_the_hubs_client_is_verified_and_not_fetched_again(
    tmp_path, monkeypatch, end
):
    content = {"data/a.parquet": b"0123456789" * 99, "small.json": b"{}"}
    with hub_server.running_hub(monkeypatch, tmp_path / "home") as hub:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.datasets["ours/web"] = Repo()
        commit = hub.datasets["ours/web"].commit(content)
        snapshot = tmp_path / "cache" / "datasets--ours--web" / "snapshots" / commit
        for name, data in content.items():
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).write_bytes(data[: len(data) - len(end)] + end)
        listed = hub_files.list_repo("datasets/ours/web", None, "here", NETWORK).files
        transfers = [store.Transfer(name, listed[name], listed[name].size) for name in content]
        with Progress("fetch", total=1, unit="byte") as bar:
            stored = store.fetch(transfers, tmp_path / "store", NETWORK, bar)
        fetched = sum(hub.sent.values())
    assert [one.path.read_bytes() for one in stored] == [*content.values()]
    assert (fetched == 0) == (not end)  # a damaged one is fetched
