"""A store for people without its credentials: anybody reads, and its owner gave addresses ahead."""

from collections.abc import Mapping
from urllib.parse import quote

from lockstep.errors import LockstepError
from parts.volunteers.store.web_store import StoreRequest


class GivenEndpoint:
    """Public addresses to read from, and those that were given to put and to list."""

    condition = {"If-None-Match": "*"}
    hides = True  # AWS answers 403 for a missing object to a client that may not list

    def __init__(self, address: str):
        self.folder = ""  # of the names in given listings
        self._address, self._puts = address, dict[StoreRequest, str]()
        self._lists = dict[str, dict[str, str]]()  # prefix -> after -> address

    def give(self, folder: str, urls: Mapping[StoreRequest, str]) -> None:
        """Take addresses, in place of others for the same."""
        self.folder = folder
        for ask, url in urls.items():
            if ask.verb == "LIST":
                self._lists.setdefault(ask.name, {})[ask.after] = url
            else:
                self._puts[ask] = url

    def has(self, ask: StoreRequest) -> bool:
        """Return whether there is an address for this."""
        return self._given_for(ask) is not None

    def find(self, ask: StoreRequest) -> tuple[str, dict[str, str]]:
        """Return the address for this; that of a listing is of the page in which `after` is."""
        if ask.verb == "GET":
            return f"{self._address}/{quote(ask.name)}", {}
        url = self._given_for(ask)
        if url is None:
            raise LockstepError(self.lacks(ask))
        return url, {}

    def lacks(self, ask: StoreRequest) -> str:
        """Say that there is no address for this."""
        what = f"{ask.size} bytes" if ask.verb == "PUT" else ask.verb
        where = f"{self._address}/{ask.name}"
        return f"{where}: found no address for {what}, expected one that the lab signed"

    def _given_for(self, ask: StoreRequest) -> str | None:
        if ask.verb != "LIST":
            return self._puts.get(ask)
        pages = self._lists.get(ask.name, {})
        starts = [after for after in pages if after <= ask.after]
        return pages[max(starts)] if starts else None
