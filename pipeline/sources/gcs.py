"""Files in a bucket of Google Cloud Storage: for the `Gcp` location of `data_location.Http`.

A public bucket is read without credentials; another with those of the environment, for which the
extra gcs is needed. Each file is held to the generation that the listing names.
"""

from base64 import b64decode
from typing import Annotated, Any
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BaseModel, Field

from pipeline.errors import LockstepError, brief
from pipeline.net import checksum, google_auth, web
from pipeline.net.connection import Request
from pipeline.net.remote import Origin
from pipeline.runfile import Network
from pipeline.runfile.explain import validate
from pipeline.sources.listing import LocationFile
from pipeline.stage.given_files import check_name

FIELDS = "nextPageToken,items(name,size,generation,md5Hash,crc32c,contentEncoding)"


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


class BucketItem(BaseModel):
    """Google's description of a file, as far as it is used."""

    name: str
    size: Number
    generation: Number
    md5: Annotated[Md5 | None, Field(alias="md5Hash")] = None
    crc32c: Crc32c | None = None
    encoding: Annotated[str | None, Field(alias="contentEncoding")] = None


class BucketPage(BaseModel):
    """A page of a listing."""

    items: list[BucketItem] = Field(default_factory=list)
    next_token: Annotated[str | None, Field(alias="nextPageToken")] = None


def list_bucket(bucket: str, folder: str, network: Network) -> tuple[LocationFile, ...]:
    """Return the files in a folder of a bucket, by name.

    Raises:
      LockstepError: the bucket cannot be read, or its listing is invalid.
    """
    where = f"gs://{bucket}/{folder}".rstrip("/")
    # with its slash, or folders whose names begin alike would match
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    url = f"{google_auth.endpoint()}/storage/v1/b/{quote(bucket, safe='')}/o"
    pages = web.Pages(network)
    items: list[BucketItem] = []
    token: str | None = ""
    while token is not None:
        query = {"prefix": prefix, "fields": FIELDS} | ({"pageToken": token} if token else {})
        request = Request(f"{url}?{urlencode(query)}", google_auth.headers(where), where)
        page = validate(BucketPage, pages.get(request)[0], f"{where}: invalid listing")
        items += page.items
        token = page.next_token or None
    if not items:
        raise LockstepError(f"{where}: found no files, expected some in this folder of the bucket")
    files = [
        LocationFile(
            name=check_name(item.name.removeprefix(prefix), where),
            origin=_origin(bucket, item, where),
        )
        for item in items
        if not item.name.endswith("/")  # a folder, as some tools leave them
    ]
    return tuple(sorted(files, key=lambda file: file.name))


def _origin(bucket: str, item: BucketItem, where: str) -> Origin:
    if item.encoding:
        raise LockstepError(
            f"{where}/{item.name}: stored as {brief(item.encoding)}, expected plain bytes"
        )
    said = f"crc32c:{item.crc32c}" if item.crc32c else None
    said = f"md5:{item.md5}" if item.md5 else said
    url = f"gs://{bucket}/{quote(item.name)}#{item.generation}"
    return Origin(url=url, size=int(item.size), tag=item.generation, checksum=said)
