"""A store that speaks S3, by its owner's credentials or by addresses that its owner signed.

The status of an answer decides, and no library's class. 412 is taken. After every other answer but
success, and where no answer comes, the object is read, and whose bytes stand there won; where
nothing stands, the put is tried again. Requests, their limits and their errors are those of
pipeline.net.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import NamedTuple, Protocol
from urllib.parse import unquote
from xml.etree import ElementTree

from lockstep.errors import LockstepError, brief
from parts.volunteers.store.verbs import MOST_NAMES, StoredObject, too_many
from pipeline.net import limits, web
from pipeline.net.limits import NetSettings, TransientError

DONE = {201, 204}  # beside 200
BUSY, TAKEN = 409, 412  # two puts at once; there is one
ATTEMPT = "its bytes there"
IF_FREE = {"If-None-Match": "*"}  # a put writes nothing over an object


class StoreRequest(NamedTuple):
    """A request to a store on a server."""

    verb: str  #: "PUT", "GET", "DELETE", or "LIST".
    name: str  #: Of the object; of LIST, the prefix of the names.
    size: int = 0  #: Bytes that are put.
    after: str = ""  #: The name after which a listing begins.


class Endpoint(Protocol):
    """The addresses of a store on a server, to which its requests go."""

    folder: str  #: Prefix in the store of the run's names, such as "run/".
    hides: bool  #: Whether it answers 403 where there is no object.

    def find(self, ask: StoreRequest) -> str:
        """Return a server's address for a request to the store.

        Raises:
          LockstepError: there is no such address.
        """


@dataclass(frozen=True)
class WebStore:
    """A run's folder in a store on a server."""

    address: str
    endpoint: Endpoint
    network: NetSettings = field(default_factory=NetSettings)

    def create(self, name: str, content: bytes) -> bool:
        """Put an object with a condition that the store's server keeps."""
        attempts = limits.Attempts(self.network)
        while True:
            failure = self._put(name, content)
            if failure is None:
                return True
            stored = self.look(name, len(content))
            if stored is not None:
                return stored.content == content
            attempts.failed(failure, f"{ATTEMPT} after {self.network.attempts} attempts")

    def _put(self, name: str, content: bytes) -> TransientError | None:
        """Put an object once on the server; return None if it says that it did."""
        request = self._request(StoreRequest("PUT", name, len(content)))
        statuses = DONE | {BUSY, TAKEN}
        try:
            with web.opened("PUT", request, self.network, IF_FREE, statuses, content) as answer:
                if answer.status in (BUSY, TAKEN):
                    message = f"{request.name}: answered {answer.status}, and nothing is there"
                    return TransientError(message, answer.headers.get("Retry-After"))
        except TransientError as error:
            return error
        return None

    def look(self, name: str, most: int) -> StoredObject | None:
        """Read an object, whatever length the store's server gives."""
        return limits.call(partial(self._look, name, most), self.network)

    def _look(self, name: str, most: int) -> StoredObject | None:
        request = self._request(StoreRequest("GET", name))
        limit = limits.ListingLimit(request.name, most)
        hidden = {403} if self.endpoint.hides else set()
        try:
            with web.opened("GET", request, self.network, {}, hidden) as answer:
                if answer.status in hidden:
                    return None
                seconds = _of_header(answer.headers.get("Last-Modified", ""), request.name)
                if (answer.length_remaining or 0) > most:
                    return StoredObject(None, seconds)
                content = web.read_whole(answer, request.name, limit, self.network)
        except web.NotFoundError:
            return None
        return StoredObject(None if len(content) > most else content, seconds)

    def names(self, prefix: str, most: int = MOST_NAMES) -> dict[str, int]:
        """List page after page of the store's server, each from the last name before it."""
        pages, times, after = web.Pages(self.network), dict[str, int](), ""
        where, folder = f"{self.address}/{prefix}", self.endpoint.folder
        while True:
            request = self._request(StoreRequest("LIST", prefix, after=after))
            page, more = _read_page(pages.content(request), where)
            inside = [(key.removeprefix(folder), at) for key, at in page if key.startswith(folder)]
            times |= {name: at for name, at in inside if name.startswith(prefix)}
            if len(times) > most:
                raise LockstepError(too_many(where, most))
            last = max((name for name, _ in inside), default="")
            if not more:
                return times
            if last <= after:
                raise LockstepError(
                    f"{where}: a page of the listing ends no later than the page before it, "
                    "expected more names"
                )
            after = last

    def remove(self, name: str) -> None:
        """Remove an object on the store's server."""

        def ask() -> None:
            request = self._request(StoreRequest("DELETE", name))
            with web.opened("DELETE", request, self.network, {}, DONE | {404}):
                pass

        limits.call(ask, self.network)

    def _request(self, ask: StoreRequest) -> web.Request:
        url = self.endpoint.find(ask)  # each time: signatures expire
        name = f"{self.address}/{ask.name}"
        return web.Request(url, {}, name, "an answer of the store", pushes=True)


# ---- What a store says ----


def _of_header(text: str, where: str) -> int:
    """Return the seconds since 1970 that the store's Last-Modified header names."""
    try:
        return _seconds(parsedate_to_datetime(text))
    except (ValueError, TypeError, IndexError, OverflowError):
        raise LockstepError(
            f"{where}: Last-Modified is {brief(repr(text))}, expected a date"
        ) from None


def _read_page(content: bytes, where: str) -> tuple[list[tuple[str, int]], bool]:
    """Return the keys of a page of the store's listing, with times, and whether there are more."""
    try:
        text = content.decode()
        if "<!DOCTYPE" in text:  # which could define names for much longer texts
            raise LockstepError(f"{where}: a listing with a DOCTYPE, expected none")
        root = ElementTree.fromstring(text)
        is_coded = root.findtext("{*}EncodingType") == "url"
        page = [(unquote(key) if is_coded else key, at) for key, at in _entries(root)]
    except (ElementTree.ParseError, ValueError, TypeError, OverflowError) as error:
        raise LockstepError(f"{where}: {brief(str(error))}, expected a listing of S3") from None
    return page, root.findtext("{*}IsTruncated") == "true"


def _entries(root: ElementTree.Element) -> Iterator[tuple[str, int]]:
    for entry in root.iterfind("{*}Contents"):
        at = datetime.fromisoformat(entry.findtext("{*}LastModified"))
        yield entry.findtext("{*}Key", ""), _seconds(at)


def _seconds(at: datetime) -> int:
    """Return the seconds since 1970 of a server's time; one without a zone is of UTC."""
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())
