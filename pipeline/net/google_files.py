"""Files in a folder of a bucket of Google Cloud Storage, listed by generation.

The server is asked directly: its client has a patience of its own, of minutes. A public bucket is
read without credentials; another with those of the environment, for which the extra gcs is needed.
"""

from base64 import b64decode
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BaseModel, Field

from pipeline.errors import LockstepError, brief
from pipeline.net import checksum, google_auth, web
from pipeline.net.connection import NotFoundError, Request
from pipeline.net.remote import Origin
from pipeline.runfile import Network
from pipeline.runfile.explain import validate
from pipeline.stage.given_files import check_name

FIELDS = "name,size,generation,md5Hash,crc32c,contentEncoding"
FILE_BYTES = 2**20  # at most, of the description of one file


def _hash(kind: str) -> Any:
    """Return the type of a hash: base64 there, hexadecimal here."""

    def to_hex(text: str) -> str:
        digest = b64decode(text, validate=True)  # raises a ValueError if invalid
        if len(digest) != checksum.SIZES[kind]:
            raise ValueError(f"expected a hash of {checksum.SIZES[kind]} bytes")
        return digest.hex()

    return Annotated[str, AfterValidator(to_hex)]


Number = Annotated[str, Field(pattern="^[0-9]{1,19}$")]  # Google's JSON has 64 bits as text
Md5, Crc32c = _hash("md5"), _hash("crc32c")


class BucketFile(BaseModel):
    """Google's description of one version of a file, as far as it is used."""

    name: str
    size: Number
    generation: Number
    md5: Annotated[Md5 | None, Field(alias="md5Hash")] = None
    crc32c: Crc32c | None = None
    encoding: Annotated[str | None, Field(alias="contentEncoding")] = None


class BucketPage(BaseModel):
    """A page of a listing."""

    items: list[BucketFile] = Field(default_factory=list)
    next_token: Annotated[str | None, Field(alias="nextPageToken")] = None


class BucketFolder:
    """A folder of a bucket.

    Args:
      bucket: name of the bucket.
      path: of the folder; empty for the whole bucket.
      network: limits of time and attempts.
      expected: what errors expected where the server refuses.
    """

    def __init__(self, bucket: str, path: str, network: Network, expected: str = "a readable file"):
        self.name = f"gs://{bucket}/{path}".rstrip("/")
        self._bucket, self._network, self._expected = bucket, network, expected
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
        """Return one version of a file, by default the newest; None where there is none.

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

    def _request(self, path: str, query: dict[str, Any]) -> Request:
        base = f"{google_auth.endpoint()}/storage/v1/b/{quote(self._bucket, safe='')}/o"
        headers = google_auth.headers(self.name)  # each time: credentials expire
        return Request(f"{base}{path}?{urlencode(query)}", headers, self.name, self._expected)
