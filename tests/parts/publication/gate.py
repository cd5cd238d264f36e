"""Publications that are spoiled, in a folder and on a server, for the tables of tests/gate."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from lockstep.files import sha256_file
from parts.publication import fetch, in_toto, layout, transcript
from pipeline.recheck import outputs
from pipeline.runfile import Network
from tests.gate.cases import BOMB, DEEP, DEVICE, PIPE, SPARSE
from tests.gate.folders import ALONE, IN_TREE, IRREGULAR, MOST, ONLY_BOMB, PLAIN, WITHIN, FolderRow
from tests.gate.servers import FILE, JSON, LISTING, NAMED, Place, ServerRow, model_on_hub
from tests.pipeline.net import token_servers


def _publication(folder: Path) -> None:
    """Files that a publication has, of no sense, and their list."""
    made = map(layout.made, layout.ALWAYS)
    rows = f"{outputs.ROWS}/00001-000.safetensors"
    needed = (*layout.REQUIRED, "config.json", rows, *made)
    for name in needed:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name * 200)
    files = {n: {"bytes": len(n) * 200, "sha256": sha256_file(folder / n)} for n in needed}
    how = {"format": 3, "release": "1", "commit": None, "windows": 1, "seed": None}
    how |= {"columns": ["inputs"], "rounds": "0" * 64}
    (folder / layout.MANIFEST).write_text(json.dumps(how | {"files": files}))


def _signed_publication(folder: Path) -> None:
    _publication(folder)
    (folder / layout.SIGNATURE).write_text("{}")


def _packed(folder: Path) -> None:
    (folder / "rounds.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))


def _unpack(folder: Path, out: Path) -> None:
    transcript.unpack_file(folder / "rounds.jsonl.gz", out / "rounds.jsonl", 1000)


def _attestation(folder: Path) -> None:
    (folder / "a.json").write_text("{}")


def _read_attestation(folder: Path, _: Path) -> None:
    in_toto.read(folder / "a.json", (), ())


def _verify(source: Path | str, out: Path, network: Network = Network()) -> None:  # noqa: B008
    listing = fetch.find(str(source), out / "store", fetch.Limits(1, network))
    with listing.bring(out, set()):
        pass


def _verify_there(place: Place, out: Path, network: Network) -> None:
    _verify(place.source, out, network)


def _published(home: Path) -> dict[str, bytes]:
    (folder := home / "published").mkdir(parents=True)
    _publication(folder)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextmanager
def _on_server(home: Path, patch: pytest.MonkeyPatch) -> Iterator[Place]:
    with token_servers.serving("plain", {}, home, patch) as source:
        files = _published(home)
        for name, content in files.items():
            source.server.put(f"p/{name}", content)

        def put(name: str) -> None:
            listed = json.loads(files[layout.MANIFEST])
            listed["files"][name] = {"bytes": 1, "sha256": "0" * 64}
            source.server.put(f"p/{layout.MANIFEST}", json.dumps(listed).encode())

        places = {"listing": f"^GET /p/{layout.MANIFEST}", "bytes": "^GET /p/README.md"}
        yield Place(source.server, "plain", source.server.url("p"), places, put)


_IN_FOLDER = {**WITHIN, SPARSE: MOST, **IN_TREE, BOMB: PLAIN}
_A_FILE = {**WITHIN, SPARSE: "expected 1800 as", **IN_TREE, BOMB: "expected 1800 as"}
FOLDERS = [
    FolderRow("`verify`, a folder: a file", _publication, "README.md", _verify, _A_FILE),
    FolderRow("`verify`, a folder: its list", _publication, layout.MANIFEST, _verify, _IN_FOLDER),
    FolderRow(
        "`verify`, a folder: its signature", _signed_publication, layout.SIGNATURE, _verify,
        _IN_FOLDER),
    FolderRow(
        "`verify`: a compressed file", _packed, "rounds.jsonl.gz", _unpack,
        ONLY_BOMB | {BOMB: "over 1000 bytes unpacked"}),
    FolderRow(
        "`attestation`", _attestation, "a.json", _read_attestation,
        {PIPE: IRREGULAR, DEVICE: IRREGULAR, SPARSE: "over ", **ALONE, BOMB: PLAIN}),
]  # fmt: skip
SERVERS = [
    ServerRow("`verify`, an address", _on_server, _verify_there, JSON | {DEEP: NAMED}, FILE),
    ServerRow(
        "`verify`, the hub",
        partial(model_on_hub, _published, "^GET /.*/README.md"),
        _verify_there,
        LISTING,
        FILE,
    ),
]
