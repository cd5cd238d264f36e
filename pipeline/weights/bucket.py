"""Google Cloud Storage: a model read by the generations of its manifest, an export written so.

The manifest (manifest.py) is written last and names a generation of each file, so who reads by it
reads one checkpoint whole, whatever has been written since: in a bucket that keeps what is
overwritten. Credentials come from the environment, as Google's own tools find them; without any,
one reads what everybody may.
"""

import base64
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.net import checksum, redact
from pipeline.net.google_auth import KEY, credentials
from pipeline.stage import lock
from pipeline.stage.artifacts import write_json
from pipeline.stage.progress import Progress
from pipeline.weights import hf, manifest
from pipeline.weights.manifest import Entry
from pipeline.weights.tensorfile import Reader

if TYPE_CHECKING:
    from google.cloud.storage import Blob, Bucket

log = logging.getLogger(__name__)

SMALL = (hf.CONFIG, hf.INDEX, *hf.COMPANIONS)  # what is read beside weights: no code, no pickle
RETRY_SECONDS = 60.0  # for which a request is tried again, where that can help
CHUNK_BYTES = 2**25  # of an upload, a multiple of 256 KiB: what a broken connection can cost
MANIFEST_BYTES = 2**24  # at most: it is read into memory


class Read(NamedTuple):
    """A model that was read: its folder here, and what source.json says of where it came from."""

    folder: Path
    source: dict


class Place:
    """A folder of a bucket, open to requests.

    Args:
      bucket: its name.
      prefix: the folder; empty is the whole bucket.

    Raises:
      LockstepError: the client is not installed, or the environment's credentials are none.
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
        for library in ("google", "urllib3"):  # they say of a retry what failed, whatever it holds
            logging.getLogger(library).setLevel(logging.ERROR)
        folder = prefix.rstrip("/")
        self.name = f"gs://{bucket}/{folder}".rstrip("/")
        self.prefix = f"{folder}/" if folder else ""
        self.credentials = credentials(self.name)
        self.retry = DEFAULT_RETRY.with_timeout(RETRY_SECONDS)
        self.bucket: Bucket = storage.Client(credentials=self.credentials).bucket(bucket)

    @contextmanager
    def asked(self, expected: str) -> Iterator[None]:
        """Inside, requests are made; what goes wrong with them is one line without credentials.

        Raises:
          LockstepError: a request failed.
        """
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
            message = redact.message(error, self.credentials.token)
            # the library's error may hold what is hidden here, so none is shown behind ours
            raise LockstepError(f"{self.name}: {message}, expected {expected}") from None

    def version(self, name: str, generation: int | None) -> "Blob | None":
        """A file at one generation, or as it is now; None where there is no such thing."""
        return self.bucket.get_blob(self.prefix + name, generation=generation, retry=self.retry)

    def listed(self) -> dict[str, "Blob"]:
        """The files of the folder as they are now, without those of folders in it."""
        blobs = self.bucket.list_blobs(prefix=self.prefix, delimiter="/", retry=self.retry)
        return {blob.name.removeprefix(self.prefix): blob for blob in blobs}


# ---- Reading ----


def download(repo: runfile.CheckpointGcs, cache: Path) -> Read:
    """Fetches a model into `cache`, what is new of it.

    Args:
      repo: the bucket, the folder in it, and the manifest's generation where one is asked for.
      cache: to fill: bucket/prefix/step-<step>-<the manifest's generation>, or .../no_manifest.

    Raises:
      LockstepError: there is no such model, it may not be read, its manifest says what cannot be,
        or a file is not what manifest and server say it is.
    """
    place = Place(repo.bucket, repo.prefix or "")
    with place.asked("a model in a bucket that may be read"):
        blob = place.version(manifest.NAME, repo.generation)
        if blob is None and repo.generation is not None:
            raise _gone(place, manifest.NAME, repo.generation)
        if blob is None:
            files, name = _by_listing(place), "no_manifest"
            log.warning(
                f"convert: warning: {place.name} has no {manifest.NAME}: what lies there today is "
                "read; `lockstep pin` holds the run to that"
            )
        else:
            files, step = _by_manifest(place, blob)
            name = f"step-{step}-{blob.generation}"
            if repo.generation is None:
                log.warning(
                    f"convert: warning: {place.name}/{manifest.NAME} is generation "
                    f"{blob.generation} today; set generation to that, so that the run stays the "
                    "same"
                )
        folder = cache / repo.bucket / place.prefix / name
        with lock.hold(folder.with_name(f".{name}.lock")):
            _fetch(place, files, folder)
            if hf.WEIGHTS not in files and hf.INDEX not in files:
                _write_index(folder, files)
    generations = {name: file.generation for name, file in sorted(files.items())}
    of_manifest = blob.generation if blob else None
    return Read(folder, {"manifest_generation": of_manifest, "generations": generations})


def _by_manifest(place: Place, blob: "Blob") -> tuple[dict[str, "Blob"], int]:
    """The files that a manifest names, each at its generation, and the manifest's step."""
    where = f"{place.name}/{manifest.NAME}"
    if blob.size > MANIFEST_BYTES:
        raise LockstepError(f"{where}: {blob.size} bytes, expected at most {MANIFEST_BYTES}")
    said = manifest.parse(blob.download_as_bytes(retry=place.retry), where)
    entries = [*said.files, *(entry for entry in said.companions or () if entry.filename in SMALL)]
    files = {entry.filename: _entry(place, entry) for entry in entries}
    if said.companions is None:
        # Psyche's; it leaves the index out, so that one that is there may be of other weights
        there = place.listed()
        files |= {name: there[name] for name in SMALL if name in there and name != hf.INDEX}
    return _checked(place, files), said.metadata.step


def _entry(place: Place, entry: Entry) -> "Blob":
    blob = place.version(entry.filename, entry.generation)
    if blob is None:
        raise _gone(place, entry.filename, entry.generation)
    if blob.size != entry.size_bytes:
        raise LockstepError(
            f"{place.name}/{entry.filename}: generation {entry.generation} has {blob.size} bytes, "
            f"expected {entry.size_bytes} as {manifest.NAME} says"
        )
    return blob


def _gone(place: Place, name: str, generation: int) -> LockstepError:
    return LockstepError(
        f"{place.name}/{name}: found no generation {generation}, expected it; a bucket without "
        "object versioning keeps only the newest"
    )


def _by_listing(place: Place) -> dict[str, "Blob"]:
    """What lies in the folder now, of what makes a model."""
    there = place.listed()
    weights = [name for name in there if re.fullmatch(r"model[\w.-]*\.safetensors", name)]
    if hf.WEIGHTS in weights:
        weights = [hf.WEIGHTS]
    return _checked(place, {name: there[name] for name in (*SMALL, *weights) if name in there})


def _checked(place: Place, files: dict[str, "Blob"]) -> dict[str, "Blob"]:
    if hf.CONFIG not in files:
        raise LockstepError(f"{place.name}: found no {hf.CONFIG}, expected one beside the weights")
    if not any(name.endswith(".safetensors") for name in files):
        raise LockstepError(f"{place.name}: found no {hf.WEIGHTS} and no shards, expected weights")
    for name, blob in files.items():
        if blob.content_encoding:
            raise LockstepError(
                f"{place.name}/{name}: stored as {blob.content_encoding}, expected plain bytes"
            )
    return files


def _fetch(place: Place, files: dict[str, "Blob"], folder: Path) -> None:
    """Leaves just these files in a folder; what is there already is checked, not fetched again."""
    folder.mkdir(parents=True, exist_ok=True)
    asides = {name: f".{name}.{blob.generation}" for name, blob in files.items()}
    for path in folder.iterdir():
        if path.is_file() and path.name not in files and path.name not in asides.values():
            path.unlink()
    with Progress("convert", total=sum(blob.size for blob in files.values()), unit="byte") as bar:
        for name, blob in files.items():
            path, aside = folder / name, folder / asides[name]
            if path.is_file() and _differs(path, blob) is None:
                bar.advance(blob.size)
                continue
            with open(aside, "ab") as file:  # goes on where a killed process stopped
                bar.advance(start := file.tell())
                if start < blob.size:
                    blob.download_to_file(
                        _Counted(file, bar),
                        start=start or None,
                        raw_download=True,
                        checksum=None,  # it would see the end alone
                        retry=place.retry,
                    )
            if (wrong := _differs(aside, blob)) is not None:
                aside.unlink()
                raise LockstepError(
                    f"{place.name}/{name}: {wrong}; the damaged copy is removed: run again"
                )
            os.replace(aside, path)


def _differs(path: Path, blob: "Blob") -> str | None:
    """How a file is not what the server says of it: its size, its CRC32C, else its MD5."""
    size = path.stat().st_size
    if size != blob.size:
        return f"has {size} bytes, expected {blob.size}"
    for kind, encoded in (("crc32c", blob.crc32c), ("md5", blob.md5_hash)):
        if encoded is not None:
            found, expected = checksum.of_file(path, kind), base64.b64decode(encoded).hex()
            return None if found == expected else f"has {kind} {found}, expected {expected}"
    return None


def _write_index(folder: Path, names: Iterable[str]) -> None:
    """Writes the index of shards that came without one, out of their headers."""
    weight_map = {}
    for name in sorted(name for name in names if name.endswith(".safetensors")):
        weight_map |= dict.fromkeys(Reader(folder / name), name)
    write_json(folder / hf.INDEX, {"metadata": {}, "weight_map": weight_map})


# ---- Writing ----


def push(
    files: Sequence[Path], bucket: str, prefix: str, *, step: int, epoch: int, run: str
) -> int:
    """Uploads files: weights, then what stands beside them, and the manifest last.

    What lies there with the same bytes is not sent again. Nothing is overwritten that another
    pusher wrote since this began.

    Args:
      files: of one folder.
      bucket: its name.
      prefix: the folder in it, which may be empty.
      step: the last that was trained.
      epoch: its epoch.
      run: the run's key.

    Returns:
      The manifest's generation, by which all of it is read again.

    Raises:
      LockstepError: the bucket refused, cannot be reached, or somebody else pushed to it meanwhile.
    """
    place = Place(bucket, prefix)
    weights = [file for file in files if file.suffix == ".safetensors"]
    beside = [file for file in files if file.suffix != ".safetensors"]
    with place.asked(f"a bucket that the credentials of {KEY} may list and write to"):
        there = place.listed()
        total = sum(file.stat().st_size for file in files)
        with Progress("push", total=total, unit="byte") as bar:
            sent = [_send(place, file, there.get(file.name), bar) for file in [*weights, *beside]]
        text = manifest.render(step, epoch, run, sent[: len(weights)], sent[len(weights) :])
        blob = place.bucket.blob(place.prefix + manifest.NAME)
        blob.upload_from_string(
            text,
            content_type="application/json",
            if_generation_match=_generation(there.get(manifest.NAME)),
            retry=place.retry,
        )
        return blob.generation


def _send(place: Place, path: Path, there: "Blob | None", bar: Progress) -> Entry:
    size = path.stat().st_size
    if there is not None and not there.content_encoding and _differs(path, there) is None:
        bar.advance(size)
        return Entry(filename=path.name, generation=there.generation, size_bytes=size)
    blob = place.bucket.blob(place.prefix + path.name, chunk_size=CHUNK_BYTES)
    with open(path, "rb") as file:
        blob.upload_from_file(
            _Counted(file, bar),
            size=size,
            content_type="application/octet-stream",
            checksum="crc32c",
            if_generation_match=_generation(there),
            retry=place.retry,
        )
    return Entry(filename=path.name, generation=blob.generation, size_bytes=size)


def _generation(blob: "Blob | None") -> int:
    """What must still be there: a generation, or, by the server's rule, 0 for nothing."""
    return blob.generation if blob is not None else 0


class _Counted:
    """A file whose bytes move a bar, once each, however often they are sent."""

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

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def _move(self) -> None:
        if (position := self.file.tell()) > self.furthest:
            self.bar.advance(position - self.furthest)
            self.furthest = position
