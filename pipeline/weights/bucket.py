"""Google Cloud Storage: a model read by the generations in its manifest, an export pushed as one.

The manifest (manifest.py) is written last and names a generation of each file. So in a bucket with
object versioning its readers get one whole checkpoint, whatever was written since. Credentials come
from the environment, as Google's own tools find them; without any, public buckets can be read.
"""

import base64
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pipeline import runfile
from pipeline.errors import LockstepError, keep_secret
from pipeline.net import checksum, redact
from pipeline.net.google_auth import KEY, credentials
from pipeline.stage import lock
from pipeline.stage.artifacts import write_json
from pipeline.stage.given_files import no_link
from pipeline.stage.progress import Progress
from pipeline.weights import hf, manifest
from pipeline.weights.manifest import FileVersion
from pipeline.weights.tensorfile import TensorFile

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Bucket

log = logging.getLogger(__name__)

RETRY_SECONDS = 60.0  # during which a request is retried
CHUNK_BYTES = 2**25  # of an upload, a multiple of 256 KiB: what a broken connection can cost
MANIFEST_BYTES = 2**24  # upper bound: a manifest is read into memory


class BucketFolder:
    """A folder of a bucket, with a client to access it; the prefix is empty for the whole bucket.

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
    def requests(self, expected: str) -> Iterator[None]:
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
                f"{self.name}: {redact.message(error)}, expected {expected}"
            ) from None

    def version(self, name: str, generation: int | None) -> "Blob | None":
        """Return a file at one generation, or the newest; None where it does not exist."""
        return self.bucket.get_blob(self.prefix + name, generation=generation, retry=self.retry)

    def newest(self) -> dict[str, "Blob"]:
        """Return the newest versions of the folder's files, without those of folders in it."""
        blobs = self.bucket.list_blobs(prefix=self.prefix, delimiter="/", retry=self.retry)
        return {blob.name.removeprefix(self.prefix): blob for blob in blobs}


# ---- Reading ----


def download(
    repo: runfile.CheckpointGcs | runfile.CheckpointP2PGcs, cache: Path
) -> tuple[Path, dict]:
    """Fetch a model into `cache`; files that are there already are only checked.

    Returns:
      The model's folder, bucket/prefix/step-<step>-<the manifest's generation> or
      bucket/prefix/no_manifest; and the generations of all its files, for source.json.

    Raises:
      LockstepError: The model does not exist or cannot be read, its manifest is invalid, or a file
        differs from what manifest and server say of it.
    """
    remote = BucketFolder(repo.bucket, repo.prefix or "")
    with remote.requests("a model in a bucket that may be read"):
        blob = remote.version(manifest.NAME, repo.generation)
        if blob is None and repo.generation is not None:
            raise _missing(remote, manifest.NAME, repo.generation)
        if blob is None:
            files, name = _by_listing(remote), "no_manifest"
            log.warning(
                f"convert: warning: {remote.name} has no {manifest.NAME}: its files as of today "
                "are read; `lockstep pin` holds the run to them"
            )
        else:
            files, step = _by_manifest(remote, blob)
            name = f"step-{step}-{blob.generation}"
            if repo.generation is None:
                log.warning(
                    f"convert: warning: {remote.name}/{manifest.NAME} is generation "
                    f"{blob.generation} today; set generation to that, so that the run stays the "
                    "same"
                )
        folder = cache / repo.bucket / remote.prefix / name
        with lock.hold(folder.with_name(f".{name}.lock")):
            _fetch(remote, files, folder)
            if hf.WEIGHTS not in files and hf.INDEX not in files:
                _write_index(folder, files)
    generations = {name: file.generation for name, file in sorted(files.items())}
    of_manifest = blob.generation if blob else None
    return folder, {"manifest_generation": of_manifest, "generations": generations}


def _by_manifest(remote: BucketFolder, blob: "Blob") -> tuple[dict[str, "Blob"], int]:
    """Return the files that a manifest names, each at its generation, and the manifest's step."""
    where = f"{remote.name}/{manifest.NAME}"
    if blob.size > MANIFEST_BYTES:
        raise LockstepError(f"{where}: {blob.size} bytes, expected at most {MANIFEST_BYTES}")
    content = manifest.parse(blob.download_as_bytes(retry=remote.retry), where)
    small = [file for file in content.companions or () if file.filename in hf.SMALL]
    files = {file.filename: _version(remote, file) for file in (*content.files, *small)}
    if content.companions is None:
        # Psyche's manifests leave the index out, so an existing one may be of other weights
        newest = remote.newest()
        files |= {name: newest[name] for name in hf.SMALL if name in newest and name != hf.INDEX}
    return _checked(remote, files), content.metadata.step


def _version(remote: BucketFolder, file: FileVersion) -> "Blob":
    blob = remote.version(file.filename, file.generation)
    if blob is None:
        raise _missing(remote, file.filename, file.generation)
    if blob.size != file.size_bytes:
        raise LockstepError(
            f"{remote.name}/{file.filename}: generation {file.generation} has {blob.size} bytes, "
            f"expected {file.size_bytes} as {manifest.NAME} says"
        )
    return blob


def _missing(remote: BucketFolder, name: str, generation: int) -> LockstepError:
    return LockstepError(
        f"{remote.name}/{name}: found no generation {generation}, expected it; a bucket without "
        "object versioning keeps only the newest"
    )


def _by_listing(remote: BucketFolder) -> dict[str, "Blob"]:
    """Return the newest versions of the files of a model."""
    newest = remote.newest()
    weights = [name for name in newest if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    if hf.WEIGHTS in weights:
        weights = [hf.WEIGHTS]
    return _checked(
        remote, {name: newest[name] for name in (*hf.SMALL, *weights) if name in newest}
    )


def _checked(remote: BucketFolder, files: dict[str, "Blob"]) -> dict[str, "Blob"]:
    if hf.CONFIG not in files:
        raise LockstepError(f"{remote.name}: found no {hf.CONFIG}, expected one beside the weights")
    if not any(name.endswith(".safetensors") for name in files):
        raise LockstepError(f"{remote.name}: found no {hf.WEIGHTS} and no shards, expected weights")
    for name, blob in files.items():
        if blob.content_encoding:
            raise LockstepError(
                f"{remote.name}/{name}: stored as {blob.content_encoding}, expected plain bytes"
            )
    return files


def _fetch(remote: BucketFolder, files: dict[str, "Blob"], folder: Path) -> None:
    """Make a folder hold exactly these files; those already there are checked, not fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    asides = {name: f".{name}.{blob.generation}" for name, blob in files.items()}
    for path in folder.iterdir():
        if path.is_file() and path.name not in files and path.name not in asides.values():
            path.unlink()
    with Progress("convert", total=sum(blob.size for blob in files.values()), unit="byte") as bar:
        for name, blob in files.items():
            path, aside = folder / name, folder / asides[name]
            if path.is_file() and not path.is_symlink() and _differs(path, blob) is None:
                bar.advance(blob.size)
                continue
            with open(
                aside, "ab", opener=no_link
            ) as file:  # resumes where a killed process stopped
                bar.advance(start := file.tell())
                if start < blob.size:
                    blob.download_to_file(
                        _Counted(file, bar),
                        start=start or None,
                        raw_download=True,
                        checksum=None,  # of a resumed download it would cover only the end
                        retry=remote.retry,
                    )
            if (wrong := _differs(aside, blob)) is not None:
                aside.unlink()
                raise LockstepError(
                    f"{remote.name}/{name}: {wrong}; the damaged copy is removed: run again"
                )
            os.replace(aside, path)


def _differs(path: Path, blob: "Blob") -> str | None:
    """Return how a file differs from the server's size and CRC32C, or else MD5; None if equal."""
    size = path.stat().st_size
    if size != blob.size:
        return f"has {size} bytes, expected {blob.size}"
    for kind, encoded in (("crc32c", blob.crc32c), ("md5", blob.md5_hash)):
        if encoded is not None:
            actual, expected = checksum.of_file(path, kind), base64.b64decode(encoded).hex()
            return None if actual == expected else f"has {kind} {actual}, expected {expected}"
    return None


def _write_index(folder: Path, names: Iterable[str]) -> None:
    """Write the index of shards that came without one, from their headers."""
    weight_map = {}
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        weight_map |= dict.fromkeys(TensorFile(folder / name), name)
    write_json(folder / hf.INDEX, {"metadata": {}, "weight_map": weight_map})


# ---- Writing ----


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
    remote = BucketFolder(bucket, prefix)
    weights = [file for file in files if file.suffix == ".safetensors"]
    companions = [file for file in files if file.suffix != ".safetensors"]
    with remote.requests(f"a bucket that the credentials of {KEY} may list and write to"):
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


def _send(remote: BucketFolder, path: Path, old: "Blob | None", bar: Progress) -> FileVersion:
    size = path.stat().st_size
    if old is not None and not old.content_encoding and _differs(path, old) is None:
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


class _Counted:
    """A file that advances a bar by each byte once, however often it is read or written."""

    def __init__(self, file: BinaryIO, bar: Progress):
        self.file, self.bar, self.furthest = file, bar, file.tell()

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self._move()
        return data

    def write(self, data: bytes) -> int:
        written = self.file.write(data)
        self._move()
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def _move(self) -> None:
        if (position := self.file.tell()) > self.furthest:
            self.bar.advance(position - self.furthest)
            self.furthest = position
