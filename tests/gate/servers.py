"""Every command that asks a server, of each kind, and what becomes of it where that is strange."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from lockstep.machine.progress import Progress
from pipeline import runfile
from pipeline.net.transfers.stream import Streams
from pipeline.runfile import Network
from pipeline.sources import provider as sources
from pipeline.tokens.shards import read_shards, write_shards
from pipeline.weights import bucket as weights_bucket
from pipeline.weights import hub_model as weights_hub
from tests.gate import folders
from tests.gate.cases import (
    BREAK,
    DEEP,
    DRIPPING,
    ENDLESS,
    PAGES,
    RIGHT,
    SILENT,
    SURROGATE,
    TOKEN,
    Cells,
    No,
)
from tests.pipeline.net import token_servers
from tests.pipeline.net.token_servers import HOW, SECRETS
from tests.servers import hub as hub_server
from tests.servers import s3 as s3_server
from tests.servers import web
from tests.servers.bucket import Bucket

SHARDS = token_servers.make_shards(0, 3000)
MODEL = {"config.json": b"{}", "model.safetensors": bytes(3000), "a.md": b"a", "b.md": b"b"}


@dataclass
class Place:
    """A server, and what is asked of it.

    Attributes:
      served: the server.
      kind: "plain", "hub", "bucket" or "s3".
      source: what the command is given.
      places: patterns of what is asked, as in token_servers.
      put: adds a file by its name.
      secrets: that nobody is to see.
    """

    served: web.Served
    kind: str
    source: object
    places: dict[str, str]
    put: Callable[[str], object] | None = None
    secrets: tuple[str, ...] = SECRETS


@dataclass(frozen=True)
class ServerRow:
    """A command that asks a server.

    Attributes:
      what: the command and the location.
      serving: a good server, in a home of its own.
      read: reads it; the folder is for what it writes.
      listing: what becomes of each case in a listing, or in what is asked first.
      content: what becomes of each case in the bytes of a file; none where nothing is read of one.
    """

    what: str
    serving: Callable[[Path, pytest.MonkeyPatch], Iterator[Place]]
    read: Callable[[Place, Path, Network], object]
    listing: Cells
    content: Cells = field(default_factory=dict)


# ---- Servers ----


@contextmanager
def _of_tokens(kind: str, home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with token_servers.serving(kind, SHARDS, home, patch) as source:
        served = source.server

        def put(name: str) -> None:
            if isinstance(served, Bucket):
                served.put(f"d/{name}", b"1234")
            else:
                served.datasets[token_servers.DATASET].files[f"d/{name}"] = b"1234"

        yield Place(served, kind, source.location, source.places, put)


@contextmanager
def _s3(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with s3_server.running_s3(patch) as served:
        served.objects |= {f"d/{name}": content for name, content in SHARDS.items()}
        yield Place(
            served,
            "s3",
            {"Url": {"url": "s3://ours/d", **HOW}},
            {"listing": r"^GET /ours\?", "bytes": r"^GET /ours/d/1\.ds"},
            lambda name: served.objects.update({f"d/{name}": b"1234"}),
            (served.key, served.secret),
        )


@contextmanager
def _mixed(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with token_servers.serving("plain", SHARDS, home, patch) as source:
        document = {"shuffle": HOW["shuffle"], "providers": [source.location["Http"]]}
        source.server.put("mix.json", json.dumps(document).encode())
        location = {"WeightedHttp": source.server.url("mix.json")}
        yield Place(source.server, "plain", location, {"listing": "^GET /mix"})


@contextmanager
def _rows_on_hub(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    (home / "rows").mkdir(parents=True)
    folders._rows(home / "rows")
    rows = {path.name: path.read_bytes() for path in (home / "rows").iterdir()}
    with token_servers.serving("hub", SHARDS, home, patch) as source:
        repo = source.server.datasets[token_servers.DATASET]
        repo.commit(rows)
        location = {"Preprocessed": token_servers.DATASET}
        places = source.places | {"bytes": "^GET /large/.*train"}
        put = lambda name: repo.files.update({name: b"1234"})  # noqa: E731
        yield Place(source.server, "hub", location, places, put)


@contextmanager
def model_on_hub(
    files: Callable[[Path], dict[str, bytes]], where: str, home: Path, patch: pytest.MonkeyPatch
) -> Iterator[Place]:
    patch.setenv("HF_TOKEN", token_servers.HUB_TOKEN)
    with hub_server.running_hub(patch, home) as hub:
        hub.token = token_servers.HUB_TOKEN
        hub.commit(dict(files(home)))
        places = {"listing": "^GET /api/models/", "pages": "^GET /api/.*/tree/", "bytes": where}
        put = lambda name: hub.files.update({name: b"1234"})  # noqa: E731
        yield Place(hub, "hub", hub_server.REPO, places, put)


@contextmanager
def _model_in_bucket(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with _of_tokens("bucket", home, patch) as place:
        bucket = place.served
        for name, content in MODEL.items():
            bucket.put(f"m/{name}", content)

        def put(name: str) -> None:
            bucket.put("m/c.md", b"1234")
            bucket.claims["m/c.md"] = {"name": f"m/{name}"}  # though folders were not asked for

        source = runfile.CheckpointGcs(bucket=bucket.name, prefix="m")
        places = place.places | {"bytes": "^GET /download/.*safetensors"}
        yield Place(bucket, "bucket", source, places, put)


# ---- Who asks them ----


def _options(out: Path, network: Network, *, stream: bool) -> sources.FetchOptions:
    progress = partial(Progress, "download")
    return sources.FetchOptions(out / "store", None, stream, network, progress)


def _location(place: Place) -> runfile.data.Data:
    document = token_servers.document(place.source)
    return runfile.parse(document, "a test").llm.data_location


def _download(place: Place, out: Path, network: Network) -> None:
    (shards := out / "shards").mkdir()
    sources.fetch(_location(place), shards, _options(out, network, stream=False))


def _stream(place: Place, out: Path, network: Network) -> None:
    fetched = sources.fetch(_location(place), out, _options(out, network, stream=True))
    write_shards(out, fetched)
    with_origin = [file.origin for file in read_shards(out).files]
    found = Streams(network).read([(origin, 0, origin.size) for origin in with_origin])
    assert found == [*SHARDS.values()]


# ---- The table ----


NO_NAMES, NO_BODY = No("it lists no names"), No("an answer to HEAD has no body")
ONE_PAGE = No("it has one page")
GIVEN_UP, AGAIN = "within 2 attempts; run again", "again to resume"
NAMED, REFUSED, LONG = "lists a file named", "answered 403", "a listing of over "
INVALID = "invalid listing"  # half of a pair of surrogates is no JSON
HEAD = {
    **{SILENT: GIVEN_UP, DRIPPING: NO_BODY, ENDLESS: NO_BODY, PAGES: ONE_PAGE, TOKEN: NO_BODY},
    **{BREAK: NO_BODY, SURROGATE: NO_NAMES, DEEP: NO_NAMES},
}
JSON = {
    **{SILENT: GIVEN_UP, DRIPPING: GIVEN_UP, ENDLESS: LONG, PAGES: ONE_PAGE, TOKEN: REFUSED},
    **{BREAK: GIVEN_UP, SURROGATE: NO_NAMES, DEEP: NO_NAMES},
}
LISTING = JSON | {
    PAGES: ("a listing of over 9 pages", "a page that links to itself"),
    SURROGATE: INVALID,
    DEEP: NAMED,
}
FILE = {
    **{SILENT: AGAIN, DRIPPING: AGAIN, ENDLESS: "sends more than ", PAGES: No("it has no pages")},
    **{TOKEN: (REFUSED, "expected plain bytes"), BREAK: RIGHT},
}
S3_LISTING = LISTING | {
    **{SILENT: "timed out, expected an answer", DRIPPING: "timed out, expected an answer"},
    **{TOKEN: "expected a readable folder", BREAK: "timed out, expected an answer"},
    SURROGATE: No("XML cannot contain such a name"),
}
S3_FILE = FILE | {
    ENDLESS: "sends no length, expected ",
    TOKEN: ("expected a readable file", RIGHT),
    BREAK: AGAIN,
}
ROWS = [
    ServerRow("`download`, `Http`", partial(_of_tokens, "plain"), _download, HEAD, FILE),
    ServerRow(
        "`download`, `Http` with `Gcp`", partial(_of_tokens, "bucket"), _download, LISTING, FILE
    ),
    ServerRow("`download`, `Hub`", partial(_of_tokens, "hub"), _download, LISTING, FILE),
    ServerRow("`download`, `Url`: `s3://`", _s3, _download, S3_LISTING, S3_FILE),
    ServerRow("`download`, `WeightedHttp`", _mixed, _download, JSON),
    ServerRow("`download`, `Preprocessed` from the hub", _rows_on_hub, _download, LISTING, FILE),
    ServerRow("`stream`, `Http`", partial(_of_tokens, "plain"), _stream, HEAD, FILE),
    ServerRow("`stream`, `Http` with `Gcp`", partial(_of_tokens, "bucket"), _stream, {}, FILE),
    ServerRow("`stream`, `Hub`", partial(_of_tokens, "hub"), _stream, {}, FILE),
    ServerRow("`stream`, `Url`: `s3://`", _s3, _stream, {}, S3_FILE),
    ServerRow(
        "`convert`, `Hub`",
        partial(model_on_hub, lambda _: MODEL, "^GET /large/"),
        lambda place, out, network: weights_hub.download(place.source, None, out, network),
        LISTING,
        FILE,
    ),
    ServerRow(
        "`convert`, `Gcs`",
        _model_in_bucket,
        lambda place, out, network: weights_bucket.download(place.source, out, network),
        LISTING,
        FILE,
    ),
]
