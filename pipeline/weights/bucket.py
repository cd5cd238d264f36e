"""Google Cloud Storage: a model read by the generations in its manifest, an export pushed as one.

The manifest (manifest.py) is written last and names a generation of each file. So in a bucket with
object versioning its readers get one whole checkpoint, whatever was written since. Credentials come
from the environment, as Google's own tools find them; without any, public buckets can be read.
Reading asks the server directly (net/google_files.py), pushing goes through Google's client.
"""

import base64
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline import runfile
from pipeline.errors import LockstepError, keep_secret
from pipeline.net import checksum, redact, store
from pipeline.net.google_auth import KEY, credentials
from pipeline.net.google_files import BucketFile, BucketFolder
from pipeline.net.remote import Origin
from pipeline.net.store import Transfer
from pipeline.runfile import Network
from pipeline.runfile.table import Table
from pipeline.stage import lock
from pipeline.stage.artifacts import write_json, writes
from pipeline.stage.progress import Progress
from pipeline.weights import hf, manifest
from pipeline.weights.manifest import FileVersion
from pipeline.weights.tensorfile import TensorFile

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Bucket

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0  # during which a request of a push is retried
CHUNK_BYTES = 2**25  # of an upload, a multiple of 256 KiB: what a broken connection can cost
MANIFEST_BYTES = 2**24  # upper bound: a manifest is read into memory


# ---- Reading ----


class BucketModel(Table):
    """The files of a model in a bucket, by their names."""

    files: dict[str, Origin]
    """Each at one generation, which is its origin's tag."""
    generation: int | None
    """Version of the manifest that names them; None: there is no manifest."""
    step: int | None
    """Last trained step, as the manifest says."""


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
    prefix = repo.prefix or ""
    remote = BucketFolder(repo.bucket, prefix, network, "a model in a bucket that may be read")
    asked = f"{remote.name}#{repo.generation or ''}"
    look = partial(_look, remote, repo.generation, cache, network)
    model = store.remembered(cache, BucketModel, asked, remote.name, look)
    if model.generation is None:
        log.warning(
            f"convert: warning: {remote.name} has no {manifest.NAME}: its files as of today "
            "are read; `lockstep pin` holds the run to them"
        )
    elif repo.generation is None:
        log.warning(
            f"convert: warning: {remote.name}/{manifest.NAME} is generation {model.generation} "
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


def _look(
    remote: BucketFolder, generation: int | None, cache: Path, network: Network
) -> BucketModel:
    """Return the files that the manifest of a generation names; without one, what lies there."""
    found, step = remote.find(manifest.NAME, generation), None
    if found is None and generation is not None:
        raise _missing(remote, manifest.NAME, generation)
    if found is None:
        files = _by_listing(remote)
    else:
        files, step = _by_manifest(remote, found, cache, network)
        generation = int(found.generation)
    if hf.CONFIG not in files:
        raise LockstepError(f"{remote.name}: found no {hf.CONFIG}, expected one beside the weights")
    if not any(name.endswith(".safetensors") for name in files):
        raise LockstepError(f"{remote.name}: found no {hf.WEIGHTS} and no shards, expected weights")
    origins = {name: remote.origin(name, file) for name, file in files.items()}
    return BucketModel(files=origins, generation=generation, step=step)


def _by_manifest(
    remote: BucketFolder, found: BucketFile, cache: Path, network: Network
) -> tuple[dict[str, BucketFile], int]:
    """Return the files that a manifest names, each at its generation, and the manifest's step."""
    where, origin = f"{remote.name}/{manifest.NAME}", remote.origin(manifest.NAME, found)
    if origin.size > MANIFEST_BYTES:
        raise LockstepError(f"{where}: {origin.size} bytes, expected at most {MANIFEST_BYTES}")
    (stored,) = _fetch(remote, {manifest.NAME: origin}, cache, network).values()
    content = manifest.parse(stored.path.read_bytes(), where)
    small = [file for file in content.companions or () if file.filename in hf.SMALL]
    files = {file.filename: _version(remote, file) for file in (*content.files, *small)}
    if content.companions is None:
        # Psyche's manifests leave the index out, so an existing one may be of other weights
        newest = remote.files(below=False)
        files |= {name: newest[name] for name in hf.SMALL if name in newest and name != hf.INDEX}
    return files, content.metadata.step


def _version(remote: BucketFolder, file: FileVersion) -> BucketFile:
    found = remote.find(file.filename, file.generation)
    if found is None:
        raise _missing(remote, file.filename, file.generation)
    if int(found.size) != file.size_bytes:
        raise LockstepError(
            f"{remote.name}/{file.filename}: generation {file.generation} has {found.size} bytes, "
            f"expected {file.size_bytes} as {manifest.NAME} says"
        )
    return found


def _missing(remote: BucketFolder, name: str, generation: int) -> LockstepError:
    return LockstepError(
        f"{remote.name}/{name}: found no generation {generation}, expected it; a bucket without "
        "object versioning keeps only the newest"
    )


def _by_listing(remote: BucketFolder) -> dict[str, BucketFile]:
    """Return the newest versions of the files of a model."""
    newest = remote.files(below=False)
    weights = [name for name in newest if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    if hf.WEIGHTS in weights:
        weights = [hf.WEIGHTS]
    return {name: newest[name] for name in (*hf.SMALL, *weights) if name in newest}


def _fetch(
    remote: BucketFolder, files: dict[str, Origin], cache: Path, network: Network
) -> dict[str, store.Stored]:
    transfers = [
        Transfer(f"{remote.name}/{name}", origin, origin.size) for name, origin in files.items()
    ]
    with Progress(
        "convert", total=sum(origin.size for origin in files.values()), unit="byte"
    ) as bar:
        return dict(zip(files, store.fetch(transfers, cache, network, bar), strict=True))


def _keep_only(folder: Path, names: Iterable[str]) -> None:
    """Remove the files that an earlier look at a folder without a manifest found there."""
    with writes(folder):
        for path in folder.iterdir():
            # a folder is of another prefix, and what is hidden its locks
            if path.name not in names and path.name[0] != "." and not path.is_dir():
                path.unlink()


def _write_index(folder: Path, names: Iterable[str]) -> None:
    """Write the index of shards that came without one, from their headers."""
    weight_map = {}
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        weight_map |= dict.fromkeys(TensorFile(folder / name), name)
    write_json(folder / hf.INDEX, {"metadata": {}, "weight_map": weight_map})


# ---- Writing ----


class _Destination:
    """A folder of a bucket, with Google's client to write to it.

    Raises:
      LockstepError: The client is not installed, or the environment's credentials are invalid.
    """

    def __init__(self, bucket: str, prefix: str):
        try:
            from google.cloud import storage
            from google.cloud.storage.retry import DEFAULT_RETRY
        except ImportError as error:
            raise LockstepError(
                f"gs://{bucket}: google-cloud-storage is not installed, expected the extra gcs: "
                "pip install -c constraints.txt -e '.[gcs]'"
            ) from error
        for library in ("google", "urllib3"):  # their warnings of retries may hold credentials
            logging.getLogger(library).setLevel(logging.ERROR)
        folder = prefix.rstrip("/")
        self.name = f"gs://{bucket}/{folder}".rstrip("/")
        self.prefix = f"{folder}/" if folder else ""
        self.credentials = credentials(self.name)
        self.retry = DEFAULT_RETRY.with_timeout(RETRY_SECONDS)
        self.bucket: Bucket = storage.Client(credentials=self.credentials).bucket(bucket)

    @contextmanager
    def requests(self) -> Iterator[None]:
        """Turn an error of a request inside into one line without credentials."""
        from google.api_core.exceptions import PreconditionFailed

        try:
            yield
        except LockstepError:
            raise
        except PreconditionFailed:
            raise LockstepError(
                f"{self.name}: somebody else wrote there since this push began, expected to be the "
                "only one; look at what is there, and push again"
            ) from None
        except Exception as error:  # the client's, the network's and the file system's
            keep_secret(self.credentials.token)  # a new one, at times
            # not chained: the library's error may hold what is hidden here
            raise LockstepError(
                f"{self.name}: {redact.message(error)}, expected a bucket that the credentials of "
                f"{KEY} may list and write to"
            ) from None

    def newest(self) -> dict[str, "Blob"]:
        """Return the newest versions of the folder's files, without those of folders in it."""
        blobs = self.bucket.list_blobs(prefix=self.prefix, delimiter="/", retry=self.retry)
        return {blob.name.removeprefix(self.prefix): blob for blob in blobs}


def push(
    files: Sequence[Path], bucket: str, prefix: str, *, step: int, epoch: int, run: str
) -> int:
    """Upload files: the weights, then their companions, and the manifest last.

    Files that are already there with the same bytes are not sent again. Nothing is overwritten that
    somebody else wrote since this push began. The manifest names the last trained step, its epoch
    and the key of the run.

    Returns:
      The generation of the manifest, with which the checkpoint can be read.

    Raises:
      LockstepError: The bucket refused or cannot be reached, or somebody else pushed to it.
    """
    remote = _Destination(bucket, prefix)
    weights = [file for file in files if file.suffix == ".safetensors"]
    companions = [file for file in files if file.suffix != ".safetensors"]
    with remote.requests():
        newest = remote.newest()
        total = sum(file.stat().st_size for file in files)
        with Progress("push", total=total, unit="byte") as bar:
            sent = [
                _send(remote, file, newest.get(file.name), bar) for file in [*weights, *companions]
            ]
        text = manifest.render(step, epoch, run, sent[: len(weights)], sent[len(weights) :])
        blob = remote.bucket.blob(remote.prefix + manifest.NAME)
        blob.upload_from_string(
            text,
            content_type="application/json",
            # the precondition of a write: the newest generation, or 0 where there is no file
            if_generation_match=getattr(newest.get(manifest.NAME), "generation", 0),
            retry=remote.retry,
        )
        return blob.generation


def _send(remote: _Destination, path: Path, old: "Blob | None", bar: Progress) -> FileVersion:
    size = path.stat().st_size
    if old is not None and not old.content_encoding and _is_same(path, old):
        bar.advance(size)
        return FileVersion(filename=path.name, generation=old.generation, size_bytes=size)
    blob = remote.bucket.blob(remote.prefix + path.name, chunk_size=CHUNK_BYTES)
    with open(path, "rb") as file:
        blob.upload_from_file(
            _Counted(file, bar),
            size=size,
            content_type="application/octet-stream",
            checksum="crc32c",
            if_generation_match=getattr(old, "generation", 0),
            retry=remote.retry,
        )
    return FileVersion(filename=path.name, generation=blob.generation, size_bytes=size)


def _is_same(path: Path, blob: "Blob") -> bool:
    """Return whether a file has the server's size and CRC32C, or else MD5, where it states one."""
    if path.stat().st_size != blob.size:
        return False
    for kind, encoded in (("crc32c", blob.crc32c), ("md5", blob.md5_hash)):
        if encoded is not None:
            return checksum.of_file(path, kind) == base64.b64decode(encoded).hex()
    return True


class _Counted:
    """A file that advances a bar by each byte once, however often it is read."""

    def __init__(self, file: BinaryIO, bar: Progress):
        self.file, self.bar, self.furthest = file, bar, file.tell()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        if (position := self.file.tell()) > self.furthest:
            self.bar.advance(position - self.furthest)
            self.furthest = position
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)
