"""Files in a folder of a bucket of Google Cloud Storage, read and written by generation.

The server is asked directly: its client has a patience of its own, of minutes. A public bucket is
read without credentials; another with those of the environment, for which the extra gcs is needed.
"""

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Annotated, Any, BinaryIO, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from pydantic import AfterValidator, BaseModel, Field

from lockstep.errors import LockstepError, brief, keep_secret
from lockstep.tables.explain import validate, validate_json
from pipeline.net import checksum, google_auth, limits, retry, web
from pipeline.net.connection import NotFoundError, Request, opened
from pipeline.net.remote import Origin
from pipeline.net.retry import Attempts, TransientError
from pipeline.runfile import Network
from pipeline.stage.given_files import check_name

FIELDS = "name,size,generation,md5Hash,crc32c,contentEncoding"
FILE_BYTES = 2**20  # the longest description of one file
CHUNK_BYTES = 2**25  # sent at once, a multiple of 256 KiB: what a broken connection can cost
PLAIN = "application/octet-stream"


def _hash(kind: str) -> Any:
    """Return the type of a hash, which arrives in base64 and is kept in hexadecimal."""

    def to_hex(text: str) -> str:
        digest = b64decode(text, validate=True)  # raises a ValueError if invalid
        if len(digest) != checksum.SIZES[kind]:
            raise ValueError(f"expected a hash of {checksum.SIZES[kind]} bytes")
        return digest.hex()

    return Annotated[str, AfterValidator(to_hex)]


Int64 = Annotated[str, Field(pattern="^[0-9]{1,19}$")]  # Google's JSON has 64 bits as text
Md5, Crc32c = _hash("md5"), _hash("crc32c")


class BucketFile(BaseModel):
    """Google's description of one version of a file, as far as it is used."""

    name: str
    size: Int64
    generation: Int64
    md5: Annotated[Md5 | None, Field(alias="md5Hash")] = None
    crc32c: Crc32c | None = None
    encoding: Annotated[str | None, Field(alias="contentEncoding")] = None


class _Upload(NamedTuple):
    """An upload that has begun; whoever knows its address may write to it. CRC32C is in hex."""

    url: str
    name: str
    size: int
    crc32c: str


class BucketPage(BaseModel):
    """A page of a listing."""

    items: list[BucketFile] = Field(default_factory=list)
    next_token: Annotated[str | None, Field(alias="nextPageToken")] = None


class BucketFolder:
    """A folder of a bucket.

    Args:
      bucket: name of the bucket.
      path: path of the folder; empty for the whole bucket.
      network: limits of time and attempts.
      expected: end of the error if the server refuses: "expected ...".
      pushes: whether files are written to it (`Request.pushes`).
    """

    def __init__(
        self,
        bucket: str,
        path: str,
        network: Network,
        expected: str = "a readable file",
        *,
        pushes: bool = False,
    ):
        self.name = f"gs://{bucket}/{path}".rstrip("/")
        self._bucket, self._network = bucket, network
        self._expected, self._pushes = expected, pushes
        # with its slash, or folders whose names begin alike would match
        self._prefix = f"{path.rstrip('/')}/" if path else ""

    def files(self, *, below: bool) -> dict[str, BucketFile]:
        """Return the newest versions of the files, by their names in the folder.

        `below` says whether the files of folders in it are listed too.

        Raises:
          LockstepError: the bucket cannot be read, or its listing is invalid or has no end.
        """
        query = {"prefix": self._prefix, "fields": f"nextPageToken,items({FIELDS})"}
        query |= {} if below else {"delimiter": "/"}
        pages = web.Pages(self._network)
        files: dict[str, BucketFile] = {}
        token: str | None = ""
        while token is not None:
            request = self._request("", query | ({"pageToken": token} if token else {}))
            said, where = pages.get(request)[0], f"{self.name}: invalid listing"
            page = validate(BucketPage, said, where)
            files |= {
                check_name(file.name.removeprefix(self._prefix), self.name): file
                for file in page.items
                if not file.name.endswith("/")  # a folder, as some tools leave them
            }
            token = page.next_token or None
        return files

    def find(self, name: str, generation: int | None) -> BucketFile | None:
        """Return one version of a file, by default the newest; None if there is none.

        Raises:
          LockstepError: the bucket cannot be read, or its answer is invalid.
        """
        query = {"fields": FIELDS} | ({} if generation is None else {"generation": generation})
        request = self._request(f"/{quote(self._prefix + name, safe='')}", query)
        try:
            said, _ = web.Pages(self._network, FILE_BYTES).get(request)
        except NotFoundError:
            return None
        file = validate(BucketFile, said, f"{self.name}/{name}: invalid answer")
        if generation not in (None, int(file.generation)):
            raise LockstepError(
                f"{self.name}/{name}: found generation {file.generation}, expected {generation}"
            )
        return file

    def origin(self, name: str, file: BucketFile) -> Origin:
        """Return where the bytes of a version are; `name` is the file's in the folder.

        Raises:
          LockstepError: they are stored in compressed form.
        """
        if file.encoding:
            raise LockstepError(
                f"{self.name}/{name}: stored as {brief(file.encoding)}, expected plain bytes"
            )
        said = f"crc32c:{file.crc32c}" if file.crc32c else None
        said = f"md5:{file.md5}" if file.md5 else said
        url = f"gs://{self._bucket}/{quote(self._prefix + name)}#{file.generation}"
        return Origin(url=url, size=int(file.size), tag=file.generation, checksum=said)

    def put(
        self,
        name: str,
        content: BinaryIO,
        generation: int,
        advance: Callable[[int], None],
        kind: str = PLAIN,
    ) -> int:
        """Write a file, and return its new generation; a broken upload goes on where it stopped.

        The server writes nothing if the newest generation is another than expected, or if the bytes
        that arrived have another CRC32C.

        Args:
          name: name of the file in the folder.
          content: bytes of the file, from the start of a file that can be read twice.
          generation: newest generation of the file; 0 if there is none.
          advance: takes the number of bytes, whenever some have arrived.
          kind: media type of the file.

        Raises:
          LockstepError: somebody else wrote the file, or the bucket refuses it or cannot be
            reached.
        """
        size, crc32c = _measure(content)
        about = {"name": self._prefix + name, "contentType": kind}
        about["crc32c"] = b64encode(bytes.fromhex(crc32c)).decode()
        query = {"uploadType": "resumable", "ifGenerationMatch": generation, "fields": FIELDS}
        url = retry.call(lambda: self._begin(query, about), self._network)
        upload = _Upload(url, f"{self.name}/{name}", size, crc32c)
        attempts, arrived, is_lost = Attempts(self._network), 0, False
        while True:
            content.seek(arrived)
            piece = b"" if is_lost else content.read(CHUNK_BYTES)
            try:
                found = self._send(upload, piece, arrived)
                if isinstance(found, BucketFile):
                    advance(size - arrived)
                    return int(found.generation)
                if found - arrived >= min(limits.LEAST_BYTES, size - arrived):
                    attempts.progressed()
                elif not is_lost:
                    raise TransientError(f"{upload.name}: the server takes no more bytes")
                advance(found - arrived)
                arrived, is_lost = found, False
            except TransientError as error:
                is_lost = True  # so asks next how many bytes have arrived
                expected = f"{size - arrived} more bytes to arrive"
                attempts.failed(error, f"{expected} within {self._network.attempts} attempts")

    def _begin(self, query: dict[str, Any], about: dict[str, str]) -> str:
        """Return the address of a new upload."""
        request, content = self._request("", query, "/upload"), json.dumps(about).encode()
        headers = {"Content-Type": "application/json"}
        with opened("POST", request, self._network, headers, {412}, content) as answer:
            self._check_unchanged(answer.status)
            url = answer.headers.get("Location", "")
        if urlsplit(url).scheme not in ("http", "https"):
            raise LockstepError(f"{self.name}: sends no address, expected one of an upload")
        keep_secret(url)
        return url

    def _send(self, upload: _Upload, piece: bytes, start: int) -> BucketFile | int:
        """Send bytes from `start` on, none to ask; return how many arrived, or the whole file."""
        end = start + len(piece)
        span = f"{start}-{end - 1}" if piece else "*"
        url, is_ours = upload.url, upload.url.startswith(f"{google_auth.endpoint()}/")
        headers = google_auth.headers(self.name, pushes=True) if is_ours else {}
        request = Request(url, headers, upload.name, self._expected, pushes=True)
        said = {"Content-Range": f"bytes {span}/{upload.size}"}
        with opened("PUT", request, self._network, said, {308, 412}, piece) as answer:
            self._check_unchanged(answer.status)
            if answer.status == 308:  # which is not a redirect here
                said = answer.headers.get("Range")
                range_ = re.fullmatch("bytes=0-([0-9]{1,18})", said or "bytes=0-0")
                arrived = int(range_[1]) + bool(said) if range_ else -1
                if (
                    not start <= arrived <= (end if piece else upload.size)
                    or arrived == upload.size
                ):
                    raise LockstepError(
                        f"{upload.name}: has {brief(repr(said))} of an upload of {upload.size} "
                        f"bytes, expected some from offset {start} on"
                    )
                return arrived
            limit = limits.ListingLimit(upload.name, FILE_BYTES)
            text = bytes(web.read_whole(answer, upload.name, limit, self._network))
        file = validate_json(BucketFile, text, f"{upload.name}: invalid answer")
        if (int(file.size), file.crc32c or upload.crc32c) != (upload.size, upload.crc32c):
            raise LockstepError(
                f"{upload.name}: has {file.size} bytes of crc32c:{file.crc32c}, expected "
                f"{upload.size} of crc32c:{upload.crc32c} as sent"
            )
        return file

    def _check_unchanged(self, status: int) -> None:
        if status == 412:
            raise LockstepError(
                f"{self.name}: somebody else wrote there since this push began, expected to be the "
                "only one; look at what is there, and push again"
            )

    def _request(self, path: str, query: dict[str, Any], service: str = "") -> Request:
        base = f"{google_auth.endpoint()}{service}/storage/v1/b/{quote(self._bucket, safe='')}/o"
        # each time: credentials expire
        headers = google_auth.headers(self.name, pushes=self._pushes)
        url = f"{base}{path}?{urlencode(query)}"
        return Request(url, headers, self.name, self._expected, self._pushes)


def _measure(content: BinaryIO) -> tuple[int, str]:
    """Return the size of a file, and its CRC32C in hexadecimal."""
    digest, size = checksum.hasher("crc32c", 0), 0
    while piece := content.read(checksum.READ_BYTES):
        digest.update(piece)
        size += len(piece)
    return size, digest.digest().hex()
