"""Google Cloud Storage: a model read by the generations in its manifest, an export pushed as one.

The manifest says which versions of which files make up a checkpoint:

    {"metadata": {"timestamp": ..., "epoch": ..., "step": ..., "run_id": ...},
     "files": [{"filename": ..., "generation": ..., "size_bytes": ...}, ...]}

A generation is one version of an object. The format is Psyche's, whose `files` are only the
weights; `companions`, in the same format, is ours, and Psyche ignores it. The manifest is written
last. So in a bucket with object versioning its readers get one whole checkpoint, whatever was
written since. Credentials come from the environment, as Google's own tools find them; without any,
public buckets can be read.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import write_json, writes
from lockstep.machine.progress import Progress
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.validation import validate_json
from lockstep.transcript.tensorfile import TensorFile
from pipeline import runfile
from pipeline.net.google import KEY_VARIABLE, BucketFile, BucketFolder
from pipeline.net.origin import Origin, hash_file
from pipeline.net.transfers import store
from pipeline.net.transfers.store import Transfer
from pipeline.runfile import Network
from pipeline.stage import lock
from pipeline.weights import hf

log = logging.getLogger(__name__)

PUSH_NETWORK = Network()  # limits of time and attempts of a push
MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**24  # upper bound: a manifest is read into memory
Natural = Annotated[int, Field(ge=0)]


# ---- The manifest ----


class FileVersion(Table):
    """One version of a file in the folder of a bucket's manifest."""

    filename: str
    generation: Annotated[int, Field(ge=1)]
    size_bytes: Natural


class Metadata(Table, extra="ignore"):
    """The bucket's checkpoint, as far as a reader needs to know it: its last trained step."""

    step: Natural


class Manifest(Table, extra="ignore"):
    """The keys of a bucket's manifest that a reader uses; other programs may write more."""

    metadata: Metadata
    files: Annotated[tuple[FileVersion, ...], AsTuple, Field(min_length=1)]
    companions: Annotated[tuple[FileVersion, ...], AsTuple] | None = None


def _parse(content: bytes, where: str) -> Manifest:
    """Parse a bucket's manifest, called `where` in errors; it names weights in its folder."""
    manifest = validate_json(Manifest, content, where)
    names = [entry.filename for entry in manifest.files]
    for number, name in enumerate(names):
        if not re.fullmatch(hf.SHARD, name):
            raise LockstepError(
                f"{where}: files[{number}].filename is {name!r}, expected a safetensors file in "
                "the same folder"
            )
        if names.count(name) > 1 or (name == hf.WEIGHTS and len(names) > 1):
            raise LockstepError(
                f"{where}: files[{number}].filename is {name!r}, expected {hf.WEIGHTS} alone, or "
                "each of several shards once"
            )
    return manifest


# ---- Reading ----


class BucketModel(Table):
    """The files of a model in a bucket, each at one generation, which is its origin's tag.

    `generation` is that of the manifest that names them, and `step` the last trained one, as it
    says; both are None without a manifest.
    """

    files: dict[str, Origin]
    generation: int | None
    step: int | None


def download(
    repo: runfile.CheckpointGcs | runfile.CheckpointP2PGcs, cache: Path, network: Network
) -> tuple[Path, dict]:
    """Fetch a model into the store `cache`, except for files that are there already.

    Returns:
      The model's folder, gcs/bucket/prefix/step-<step>-<the manifest's generation> or
      gcs/bucket/prefix/no_manifest; and the generations of all its files, for source.json.

    Raises:
      LockstepError: The model does not exist or cannot be read, its manifest is invalid, or a file
        differs from what manifest and server say of it.
    """
    prefix, remote, model = repo.prefix or "", _folder(repo, network), find(repo, cache, network)
    if model.generation is None:
        log.warning(
            f"convert: warning: {remote.name} has no {MANIFEST}: its files as of today "
            "are read; `lockstep pin` holds the run to them"
        )
    elif repo.generation is None:
        log.warning(
            f"convert: warning: {remote.name}/{MANIFEST} is generation {model.generation} "
            "today; set generation to that, so that the run stays the same"
        )
    fetched = _fetch(remote, model.files, cache, network)
    name = "no_manifest" if model.generation is None else f"step-{model.step}-{model.generation}"
    folder = cache / "gcs" / repo.bucket / prefix / name
    with lock.hold(folder.with_name(f".{name}.lock")):
        store.link_files(fetched, folder)
        _keep_only(folder, fetched)
        if hf.WEIGHTS not in fetched and hf.INDEX not in fetched:
            _write_index(folder, fetched)
    generations = {name: int(origin.tag) for name, origin in sorted(model.files.items())}
    return folder, {"manifest_generation": model.generation, "generations": generations}


def find(
    repo: runfile.CheckpointGcs | runfile.CheckpointP2PGcs, cache: Path, network: Network
) -> BucketModel:
    """Return what a bucket has of a model; only its manifest is fetched."""
    remote = _folder(repo, network)
    key = f"{remote.name}#{repo.generation or ''}"
    look = partial(_look, remote, repo.generation, cache, network)
    return store.remembered(cache, BucketModel, key, remote.name, look)


def _folder(
    repo: runfile.CheckpointGcs | runfile.CheckpointP2PGcs, network: Network
) -> BucketFolder:
    expected = "a model in a bucket that may be read"
    return BucketFolder(repo.bucket, repo.prefix or "", network, expected)


def _look(
    remote: BucketFolder, generation: int | None, cache: Path, network: Network
) -> BucketModel:
    """Return the bucket's files that a generation of the manifest names, or else the folder's."""
    manifest, step = remote.find(MANIFEST, generation), None
    if manifest is None and generation is not None:
        raise _missing(remote, MANIFEST, generation)
    if manifest is None:
        files = _by_listing(remote, cache, network)
    else:
        files, step = _by_manifest(remote, manifest, cache, network)
        generation = int(manifest.generation)
    if hf.CONFIG not in files:
        raise LockstepError(f"{remote.name}: found no {hf.CONFIG}, expected one beside the weights")
    if not any(name.endswith(".safetensors") for name in files):
        raise LockstepError(f"{remote.name}: found no {hf.WEIGHTS} and no shards, expected weights")
    origins = {name: remote.origin(name, file) for name, file in files.items()}
    return BucketModel(files=origins, generation=generation, step=step)


def _by_manifest(
    remote: BucketFolder, manifest: BucketFile, cache: Path, network: Network
) -> tuple[dict[str, BucketFile], int]:
    """Return the files that a bucket's manifest names, each at its generation, and its step."""
    where, origin = f"{remote.name}/{MANIFEST}", remote.origin(MANIFEST, manifest)
    if origin.size > MANIFEST_BYTES:
        raise LockstepError(f"{where}: {origin.size} bytes, expected at most {MANIFEST_BYTES}")
    (stored,) = _fetch(remote, {MANIFEST: origin}, cache, network).values()
    content = _parse(stored.path.read_bytes(), where)
    small = [file for file in content.companions or () if file.filename in hf.SMALL]
    files = {file.filename: _version(remote, file) for file in (*content.files, *small)}
    if content.companions is None:
        # Psyche's manifests leave the index out, so an existing one may be of other weights
        newest = remote.files(below=False)
        files |= {name: newest[name] for name in hf.SMALL if name in newest and name != hf.INDEX}
    return files, content.metadata.step


def _version(remote: BucketFolder, file: FileVersion) -> BucketFile:
    blob = remote.find(file.filename, file.generation)
    if blob is None:
        raise _missing(remote, file.filename, file.generation)
    if int(blob.size) != file.size_bytes:
        raise LockstepError(
            f"{remote.name}/{file.filename}: generation {file.generation} has {blob.size} bytes, "
            f"expected {file.size_bytes} as {MANIFEST} says"
        )
    return blob


def _missing(remote: BucketFolder, name: str, generation: int) -> LockstepError:
    return LockstepError(
        f"{remote.name}/{name}: found no generation {generation}, expected it; a bucket without "
        "object versioning keeps only the newest"
    )


def _by_listing(remote: BucketFolder, cache: Path, network: Network) -> dict[str, BucketFile]:
    """Return the newest versions of a bucket's files of a model; only its index is fetched."""
    newest = remote.files(below=False)
    weights = [name for name in newest if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    if hf.WEIGHTS in weights:
        weights = [hf.WEIGHTS]
    elif hf.INDEX in newest:
        origins = {hf.INDEX: remote.origin(hf.INDEX, newest[hf.INDEX])}
        (index,) = _fetch(remote, origins, cache, network).values()
        weights = hf.named_shards(index.path, newest, remote.name)
    return {name: newest[name] for name in (*hf.SMALL, *weights) if name in newest}


def _fetch(
    remote: BucketFolder, files: dict[str, Origin], cache: Path, network: Network
) -> dict[str, store.StoredFile]:
    transfers = [
        Transfer(f"{remote.name}/{name}", origin, origin.size) for name, origin in files.items()
    ]
    total = sum(origin.size for origin in files.values())
    with Progress("convert", total=total, unit="byte") as bar:
        return dict(zip(files, store.fetch(transfers, cache, network, bar), strict=True))


def _keep_only(folder: Path, names_in_bucket: Iterable[str]) -> None:
    """Remove files that an earlier download of a bucket without a manifest left there."""
    with writes(folder):
        for path in folder.iterdir():
            # a folder belongs to another prefix; hidden files are locks
            if path.name not in names_in_bucket and path.name[0] != "." and not path.is_dir():
                path.unlink()


def _write_index(folder: Path, names_in_bucket: Iterable[str]) -> None:
    """Write the index of a bucket's shards that came without one, from their headers."""
    weight_map = {}
    for name in sorted(name for name in names_in_bucket if name.endswith(".safetensors")):
        weight_map |= dict.fromkeys(TensorFile(folder / name), name)
    write_json(folder / hf.INDEX, {"metadata": {}, "weight_map": weight_map})


# ---- Writing ----


def push(
    files: Sequence[Path], bucket: str, prefix: str, *, step: int, epoch: int, run: str
) -> int:
    """Upload files to the bucket: the weights, then their companions, and the manifest last.

    Files that are already there with the same bytes are not sent again. Nothing is overwritten that
    somebody else wrote since this push began. The manifest names the last trained step, its epoch
    and the key of the run.

    Returns:
      The generation of the manifest, with which the checkpoint can be read.
    """
    folder = prefix.rstrip("/")
    expected = f"a bucket that the credentials of {KEY_VARIABLE} may list and write to"
    remote = BucketFolder(bucket, folder, PUSH_NETWORK, expected, pushes=True)
    weights = [file for file in files if file.suffix == ".safetensors"]
    companions = [file for file in files if file.suffix != ".safetensors"]
    newest = {name: remote.find(name, None) for name in (*(f.name for f in files), MANIFEST)}
    with Progress("push", total=sum(file.stat().st_size for file in files), unit="byte") as bar:
        sent = [
            _send(remote, file, newest[file.name], bar.advance) for file in [*weights, *companions]
        ]
    document = {
        "metadata": {
            "client_id": "lockstep",  # required by some of Psyche's releases
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "epoch": epoch,
            "step": step,
            "run_id": run,
        },
        "files": [file.model_dump() for file in sent[: len(weights)]],
        "companions": [file.model_dump() for file in sent[len(weights) :]],
    }
    content = BytesIO(f"{json.dumps(document, indent=2)}\n".encode())
    before = _generation(newest[MANIFEST])
    return remote.put(MANIFEST, content, before, lambda count: None, "application/json")


def _send(
    remote: BucketFolder, path: Path, old: BucketFile | None, advance: Callable[[int], None]
) -> FileVersion:
    size = path.stat().st_size
    if old is not None and not old.encoding and _is_same(path, old):
        advance(size)
        generation = int(old.generation)
    else:
        with open(path, "rb") as file:
            generation = remote.put(path.name, file, _generation(old), advance)
    return FileVersion(filename=path.name, generation=generation, size_bytes=size)


def _generation(file: BucketFile | None) -> int:
    return 0 if file is None else int(file.generation)


def _is_same(path: Path, file: BucketFile) -> bool:
    """Return whether a bucket's file has the size and CRC32C, or else MD5, where it states one."""
    if path.stat().st_size != int(file.size):
        return False
    for kind, digest in (("crc32c", file.crc32c), ("md5", file.md5)):
        if digest is not None:
            return hash_file(path, kind) == digest
    return True
