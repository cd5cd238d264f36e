"""A bucket of Google Cloud Storage, listed: for the `Gcp` location of `data_location.Http`.

A bucket that everybody may read is read without credentials; others with those of the environment,
for which the extra gcs is needed. Each file is held to the generation that the listing names.
"""

from base64 import b64decode
from typing import Annotated
from urllib.parse import quote, urlencode

from pydantic import AfterValidator, BaseModel, Field

from pipeline.errors import LockstepError
from pipeline.net import addresses, google_auth, web
from pipeline.net.remote import Origin
from pipeline.runfile.network import Network
from pipeline.sources import listed

FIELDS = "nextPageToken,items(name,size,generation,md5Hash,crc32c,contentEncoding)"


def _number(text: str) -> str:
    if not text.isascii() or not text.isdigit():
        raise ValueError("expected a number")
    return text


def _hash(text: str) -> str:
    digest = b64decode(text, validate=True)  # what is none is a ValueError
    if not digest:
        raise ValueError("expected a hash")
    return digest.hex()


Number = Annotated[str, AfterValidator(_number)]  # JSON of Google's: 64 bits, as text
Hash = Annotated[str, AfterValidator(_hash)]  # there in base64, here in hexadecimal


class Item(BaseModel):
    """What is used of Google's description of a file."""

    name: str
    size: Number
    generation: Number
    md5Hash: Hash | None = None
    crc32c: Hash | None = None
    contentEncoding: str | None = None


class Page(BaseModel):
    """A page of a listing."""

    items: list[Item] = Field(default_factory=list)
    nextPageToken: str | None = None


def list_bucket(bucket: str, folder: str, network: Network) -> tuple[listed.Listed, ...]:
    """All files whose names begin with a folder's, by name.

    Raises:
      LockstepError: the bucket cannot be read, or lists what cannot be.
    """
    where = f"gs://{bucket}/{folder}".rstrip("/")
    # a folder, and not another whose name begins alike
    prefix = f"{folder.rstrip('/')}/" if folder else ""
    found: list[Item] = []
    more: str | None = None
    seen: set[str] = set()
    while more != "":
        query = {"prefix": prefix, "fields": FIELDS} | ({"pageToken": more} if more else {})
        url = f"{google_auth.endpoint()}/storage/v1/b/{quote(bucket, safe='')}/o?{urlencode(query)}"
        request = web.Request(url, google_auth.headers(where), where)
        page = listed.read_answer(Page, web.get_json(request, network), where)
        found += page.items
        if page.nextPageToken in seen:
            raise LockstepError(f"{where}: a page that links to itself, expected another page")
        seen.add(more := page.nextPageToken or "")
    if not found:
        raise LockstepError(f"{where}: found no files, expected some in this folder of the bucket")
    files = [
        listed.Listed(
            name=listed.check_name(item.name.removeprefix(prefix), where),
            origin=_origin(bucket, item, where),
        )
        for item in found
        if not item.name.endswith("/")  # a folder, as some tools leave them
    ]
    return tuple(sorted(files, key=lambda file: file.name))


def _origin(bucket: str, item: Item, where: str) -> Origin:
    if item.contentEncoding:
        raise LockstepError(
            f"{where}/{item.name}: stored as {item.contentEncoding}, expected plain bytes"
        )
    checksum = None
    for kind, said in (("crc32c", item.crc32c), ("md5", item.md5Hash)):
        if said:
            checksum = f"{kind}:{said}"
    url = addresses.google_file(bucket, item.name, item.generation)
    return Origin(url=url, size=int(item.size), tag=item.generation, checksum=checksum)
