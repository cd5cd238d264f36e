"""Files in a folder of a bucket of Google Cloud Storage, read and written by generation.

The server is asked directly: its client has a patience of its own, of minutes. Credentials come
from the environment, as Google's own tools find them, for which google-auth is needed; without any,
requests are anonymous and read public buckets.
"""

import json
import os
import re
from base64 import b64decode, b64encode
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, NamedTuple
from urllib.parse import quote, urlencode, urlsplit

from pydantic import AfterValidator, BaseModel, Field

from . import limits, web
from .errors import NetError, brief, check_name, keep_secret, lacking, message
from .limits import Attempts, NetSettings, TransientError
from .origin import READ_BYTES, SIZES, Origin, hasher, parse, validate
from .web import NotFoundError, Request, opened

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
KEY_VARIABLE = "GOOGLE_APPLICATION_CREDENTIALS"
EMULATOR = "STORAGE_EMULATOR_HOST"
ENDPOINT = "https://storage.googleapis.com"


def endpoint() -> str:
    """Return the server's address; $STORAGE_EMULATOR_HOST replaces Google's."""
    address = os.environ.get(EMULATOR, ENDPOINT).rstrip("/")
    return address if "://" in address else f"http://{address}"


@lru_cache(maxsize=4)
def _credentials(name: str, key: str | None, emulator: str | None) -> "Credentials | None":
    """Return the environment's Google credentials, if any; `name` is the bucket in errors.

    An emulator of the server only sees those that `key` ($GOOGLE_APPLICATION_CREDENTIALS) names.
    """
    import google.auth

    if emulator and not key:
        return None
    try:
        return google.auth.default(scopes=[SCOPE])[0]
    except google.auth.exceptions.DefaultCredentialsError as error:
        if key:
            raise NetError(
                f"{name}: {KEY_VARIABLE}: {message(error)}, expected a file of credentials"
            ) from None
        return None


def authorization(name: str, *, pushes: bool = False) -> dict[str, str]:
    """Return the headers of a request to Google, with a fresh token if there are credentials.

    A push needs google-auth, and counts against the quota project that the credentials name.
    """
    try:
        import google.auth.exceptions
        from google.auth.transport.requests import Request
    except ImportError:
        if pushes or os.environ.get(KEY_VARIABLE):
            reason = f": {KEY_VARIABLE} is set" if os.environ.get(KEY_VARIABLE) else ""
            raise lacking(f"{name}{reason}", "google.auth") from None
        return {}
    credentials = _credentials(name, os.environ.get(KEY_VARIABLE), os.environ.get(EMULATOR))
    if credentials is None:
        return {}
    try:
        if not credentials.valid:
            credentials.refresh(Request())
    except google.auth.exceptions.GoogleAuthError as error:
        keep_secret(credentials.token)
        raise NetError(f"{name}: {message(error)}, expected usable credentials") from None
    project = getattr(credentials, "quota_project_id", None) if pushes else None
    quota = {"x-goog-user-project": project} if project else {}
    return {"Authorization": f"Bearer {credentials.token}"} | quota


# ---- Files ----

FIELDS = "name,size,generation,md5Hash,crc32c,contentEncoding"
FILE_BYTES = 2**20  # the longest description of one file
CHUNK_BYTES = 2**25  # sent at once, a multiple of 256 KiB: what a broken connection can cost
PLAIN_BYTES = "application/octet-stream"


def _hash(kind: str) -> Any:
    """Return the type of Google's hash, which arrives in base64 and is kept in hexadecimal."""

    def to_hex(text: str) -> str:
        digest = b64decode(text, validate=True)  # raises a ValueError if invalid
        if len(digest) != SIZES[kind]:
            raise ValueError(f"expected a hash of {SIZES[kind]} bytes")
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
    """An upload to Google that has begun; whoever knows its address may write to it."""

    url: str
    name: str
    size: int
    crc32c: str


class BucketPage(BaseModel):
    """A page of Google's listing of a bucket's folder."""

    items: list[BucketFile] = Field(default_factory=list)
    next_token: Annotated[str | None, Field(alias="nextPageToken")] = None


class BucketFolder:
    """A folder of a bucket at Google.

    An empty `path` is the whole bucket. `expected` and `pushes` are those of its requests.
    """

    def __init__(
        self,
        bucket: str,
        path: str,
        network: NetSettings,
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
        """Return the newest versions of the files in the bucket's folder, by their names.

        `below` says whether the files of folders in it are listed too.
        """
        query = {"prefix": self._prefix, "fields": f"nextPageToken,items({FIELDS})"}
        query |= {} if below else {"delimiter": "/"}
        pages = web.Pages(self._network)
        files: dict[str, BucketFile] = {}
        token: str | None = ""
        while token is not None:
            request = self._request("", query | ({"pageToken": token} if token else {}))
            document, where = pages.get(request)[0], f"{self.name}: invalid listing"
            page = validate(BucketPage, document, where)
            files |= {
                check_name(file.name.removeprefix(self._prefix), self.name): file
                for file in page.items
                if not file.name.endswith("/")  # a folder, as some tools leave them
            }
            token = page.next_token or None
        return files

    def find(self, name: str, generation: int | None) -> BucketFile | None:
        """Return one version of a bucket's file, by default the newest; None if there is none."""
        query = {"fields": FIELDS} | ({} if generation is None else {"generation": generation})
        request = self._request(f"/{quote(self._prefix + name, safe='')}", query)
        try:
            document, _ = web.Pages(self._network, FILE_BYTES).get(request)
        except NotFoundError:
            return None
        file = validate(BucketFile, document, f"{self.name}/{name}: invalid answer")
        if generation not in (None, int(file.generation)):
            raise NetError(
                f"{self.name}/{name}: found generation {file.generation}, expected {generation}"
            )
        return file

    def origin(self, name: str, file: BucketFile) -> Origin:
        """Return where a bucket's bytes of a version are; `name` is the file's in the folder."""
        if file.encoding:
            raise NetError(
                f"{self.name}/{name}: stored as {brief(file.encoding)}, expected plain bytes"
            )
        checksum = f"crc32c:{file.crc32c}" if file.crc32c else None
        checksum = f"md5:{file.md5}" if file.md5 else checksum
        url = f"gs://{self._bucket}/{quote(self._prefix + name)}#{file.generation}"
        return Origin(url=url, size=int(file.size), tag=file.generation, checksum=checksum)

    def put(
        self,
        name: str,
        content: BinaryIO,
        generation: int,
        advance: Callable[[int], None],
        kind: str = PLAIN_BYTES,
    ) -> int:
        """Write a file to the bucket, and return its generation; a broken upload goes on.

        The server writes nothing if the newest generation is another than expected, or if the bytes
        that arrived have another CRC32C.

        `content` can be read twice, and is at its start; `generation` is the newest one, 0 if
        there is none. `advance` takes a number of bytes, whenever some have arrived, and `kind` is
        the media type.

        Raises:
          NetError: somebody else wrote the file, or the bucket refuses it or cannot be
            reached.
        """
        size, crc32c = _measure(content)
        metadata = {"name": self._prefix + name, "contentType": kind}
        metadata["crc32c"] = b64encode(bytes.fromhex(crc32c)).decode()
        query = {"uploadType": "resumable", "ifGenerationMatch": generation, "fields": FIELDS}
        url = limits.call(lambda: self._begin(query, metadata), self._network)
        upload = _Upload(url, f"{self.name}/{name}", size, crc32c)
        attempts, arrived, is_lost = Attempts(self._network), 0, False
        while True:
            content.seek(arrived)
            piece = b"" if is_lost else content.read(CHUNK_BYTES)
            try:
                result = self._send(upload, piece, arrived)
                if isinstance(result, BucketFile):
                    advance(size - arrived)
                    return int(result.generation)
                if result - arrived >= min(limits.LEAST_BYTES, size - arrived):
                    attempts.progressed()
                elif not is_lost:
                    raise TransientError(f"{upload.name}: the server takes no more bytes")
                advance(result - arrived)
                arrived, is_lost = result, False
            except TransientError as error:
                is_lost = True  # so asks next how many bytes have arrived
                expected = f"{size - arrived} more bytes to arrive"
                attempts.failed(error, f"{expected} within {self._network.attempts} attempts")

    def _begin(self, query: dict[str, Any], metadata: dict[str, str]) -> str:
        """Return the address of a new upload to the bucket."""
        request, content = self._request("", query, "/upload"), json.dumps(metadata).encode()
        headers = {"Content-Type": "application/json"}
        with opened("POST", request, self._network, headers, {412}, content) as answer:
            self._check_unchanged(answer.status)
            url = answer.headers.get("Location", "")
        if urlsplit(url).scheme not in ("http", "https"):
            raise NetError(f"{self.name}: sends no address, expected one of an upload")
        keep_secret(url)
        return url

    def _send(self, upload: _Upload, piece: bytes, start: int) -> BucketFile | int:
        """Upload bytes from `start` on, none to ask; return how many arrived, or the whole file."""
        end = start + len(piece)
        span = f"{start}-{end - 1}" if piece else "*"
        url, is_ours = upload.url, upload.url.startswith(f"{endpoint()}/")
        headers = authorization(self.name, pushes=True) if is_ours else {}
        request = Request(url, headers, upload.name, self._expected, pushes=True)
        range_ = {"Content-Range": f"bytes {span}/{upload.size}"}
        with opened("PUT", request, self._network, range_, {308, 412}, piece) as answer:
            self._check_unchanged(answer.status)
            if answer.status == 308:  # which is not a redirect here
                range_ = answer.headers.get("Range")
                match = re.fullmatch("bytes=0-([0-9]{1,18})", range_ or "bytes=0-0")
                arrived = int(match[1]) + bool(range_) if match else -1
                if (
                    not start <= arrived <= (end if piece else upload.size)
                    or arrived == upload.size
                ):
                    raise NetError(
                        f"{upload.name}: has {brief(repr(range_))} of an upload of {upload.size} "
                        f"bytes, expected some from offset {start} on"
                    )
                return arrived
            limit = limits.ListingLimit(upload.name, FILE_BYTES)
            text = web.read_whole(answer, upload.name, limit, self._network)
        file = validate(BucketFile, parse(text, upload.name), f"{upload.name}: invalid answer")
        if (int(file.size), file.crc32c or upload.crc32c) != (upload.size, upload.crc32c):
            raise NetError(
                f"{upload.name}: has {file.size} bytes of crc32c:{file.crc32c}, expected "
                f"{upload.size} of crc32c:{upload.crc32c} as sent"
            )
        return file

    def _check_unchanged(self, status: int) -> None:
        if status == 412:
            raise NetError(
                f"{self.name}: somebody else wrote there since this push began, expected to be the "
                "only one; look at what is there, and push again"
            )

    def _request(self, path: str, query: dict[str, Any], service: str = "") -> Request:
        base = f"{endpoint()}{service}/storage/v1/b/{quote(self._bucket, safe='')}/o"
        # each time: credentials expire
        headers = authorization(self.name, pushes=self._pushes)
        url = f"{base}{path}?{urlencode(query)}"
        return Request(url, headers, self.name, self._expected, self._pushes)


def _measure(content: BinaryIO) -> tuple[int, str]:
    """Return a file's size and its CRC32C in hexadecimal, as Google Cloud Storage has them."""
    digest, size = hasher("crc32c", 0), 0
    while piece := content.read(READ_BYTES):
        digest.update(piece)
        size += len(piece)
    return size, digest.digest().hex()
