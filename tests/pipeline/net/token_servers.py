"""Token files on servers of each kind, and the stage that fetches them from there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pipeline import download, runfile
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT
from pipeline.tokens.shards import read_shards
from pipeline.toml_file import read_toml
from tests import tiny
from tests.servers import hub as hub_server
from tests.servers import web
from tests.servers.bucket import running_bucket
from tests.servers.files import Files
from tests.servers.hub import Repo

RUN = PROJECT / "params" / "run.toml"
KINDS = ("plain", "hub", "bucket")
DATASET = "ours/tokens"
HUB_TOKEN, PASSWORD = "hf_tokensentinel", "passwordsentinel"
# the password also as it is sent; and what the hub signs addresses with
SECRETS = (HUB_TOKEN, PASSWORD, "bWU6cGFzc3dvcmRzZW50aW5lb", hub_server.SIGNATURE)
HOW = {"token_size_in_bytes": "TwoBytes", "shuffle": {"Seeded": list(range(32))}}

Shards = dict[str, bytes]


def make_shards(seed: int, size: int = 40_000) -> Shards:
    """Three token files of about `size` bytes, of which the last is held out."""
    rng = np.random.default_rng(seed)
    return {f"{number}.ds": rng.bytes(size + 4 * number) for number in range(3)}


TRUTH = make_shards(0)
OTHER = make_shards(1)  # of the same sizes


@dataclass
class Source:
    """A server that has the token files."""

    server: web.Served  #: What it serves.
    location: dict  #: The data location, as a run file has it.
    #: Patterns of what is asked: of the bytes of 1.ds, of what there is, and of the pages of a
    #: listing.
    places: dict[str, str]
    put: Callable[[Shards], object]  #: Puts files in the place of those that are there.


@contextmanager
def serving(kind: str, shards: Shards, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A server of a kind: "plain", which asks for a password; "hub"; or "bucket"."""
    patch.delenv("HF_TOKEN", raising=False)
    with {"plain": _plain, "hub": _hub, "bucket": _bucket}[kind](home, patch) as source:
        source.put(shards)
        yield source


@contextmanager
def _plain(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Source]:
    home.mkdir(exist_ok=True)
    (home / "netrc").write_text(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    patch.setenv("NETRC", str(home / "netrc"))
    with Files(user=f"me:{PASSWORD}").serving() as files:
        numbered = {"start_index": 0, "n_left_pad_zeros": 1, "num_files": 3}
        where = {"NumberedFiles": {"url_template": files.url("d/{}.ds"), **numbered}}
        yield Source(
            files,
            {"Http": {**HOW, "location": where}},
            {"bytes": r"^GET /d/1\.ds", "listing": r"^HEAD /d/1\.ds"},
            lambda shards: [files.put(f"d/{name}", content) for name, content in shards.items()],
        )


@contextmanager
def _hub(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Source]:
    patch.setenv("HF_TOKEN", HUB_TOKEN)
    with hub_server.running_hub(patch, home) as hub:
        hub.token = HUB_TOKEN
        repo = hub.datasets[DATASET] = Repo()
        yield Source(
            hub,
            {"Hub": {"repo_id": DATASET, **HOW}},
            {
                "bytes": r"^GET /large/.*1\.ds",
                "listing": "^GET /api/datasets/",
                "pages": "^GET /api/datasets/.*/tree/",
            },
            lambda shards: repo.commit({f"d/{name}": shards[name] for name in shards}),
        )


@contextmanager
def _bucket(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Source]:
    with running_bucket(patch) as bucket:
        where = {"Gcp": {"bucket_name": bucket.name, "filter_directory": "d"}}
        yield Source(
            bucket,
            {"Http": {**HOW, "location": where}},
            {
                "bytes": r"^GET /download/.*1\.ds",
                "listing": r"^GET /storage/v1/b/ours/o\?",
                "pages": r"^GET /storage/v1/b/ours/o\?",
            },
            lambda shards: [bucket.put(f"d/{name}", content) for name, content in shards.items()],
        )


def document(location: dict, pin: str = "", limit: dict | None = None, **runtime: object) -> dict:
    """A run file whose data are at a location, and whose network gives up soon."""
    run = read_toml(RUN)
    run["model"]["LLM"]["data_location"] = location
    run["runtime"] |= {"attempts": 3, "stall_seconds": 0.5} | runtime
    run["pins"]["data"] = pin
    if limit is not None:
        run["download"]["limit"] = limit
    return run


def fetch(location: dict, root: Path, pin: str = "", limit: dict | None = None) -> Path:
    """Runs the stage; data/shards."""
    paths = Paths("download", RUN, root)
    download.run(runfile.parse(document(location, pin, limit), "a test"), paths)
    return paths.out("download")


def check(folder: Path, shards: Shards) -> None:
    """Sees that a result is these files, the last held out, and no other."""
    *train, held_out = shards.values()
    for split, expected in (("train", train), ("held_out", [held_out])):
        files = read_shards(folder).split(split)
        assert [(folder / file.path).read_bytes() for file in files] == expected
    assert len(list(folder.rglob("*.ds"))) == len(shards)


def check_store(root: Path, shards: Shards) -> None:
    """Sees that what is kept of the files is right: whole, or the beginning of one."""
    for name, content in tiny.contents(root / "data" / "store" / "files").items():
        if name.endswith(".part"):
            assert any(whole.startswith(content) for whole in shards.values()), name
        else:
            assert content in shards.values(), name
