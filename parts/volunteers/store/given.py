"""A store for who has no credentials of it: anybody reads, and its owner gave addresses ahead."""

from collections.abc import Mapping
from urllib.parse import quote

from lockstep.errors import LockstepError
from parts.volunteers.store.web_store import Ask


class GivenEndpoint:
    """Public addresses to read from, and those that were given to put and to list."""

    condition = {"If-None-Match": "*"}
    hides = True  # AWS answers 403 to who asks for what is not there and may not list

    def __init__(self, address: str):
        self.folder = ""  # of the names in given listings
        self._address, self._given = address, dict[Ask, str]()

    def give(self, folder: str, given: Mapping[Ask, str]) -> None:
        """Take addresses, in place of others for the same."""
        self.folder = folder
        self._given.update(given)

    def forget(self, before: str) -> None:
        """Drop addresses of names that come before this one."""
        self._given = {ask: url for ask, url in self._given.items() if ask.name >= before}

    def find(self, ask: Ask) -> tuple[str, dict[str, str]]:
        """Return the address for this: of a listing, of the part of it that has what follows."""
        if ask.verb == "GET":
            return f"{self._address}/{quote(ask.name)}", {}
        url = self._given.get(ask)
        if ask.verb == "LIST":
            same = [one for one in self._given if one.verb == "LIST" and one.name == ask.name]
            begun = [one for one in same if one.after <= ask.after]
            url = self._given[max(begun, key=lambda one: one.after)] if begun else None
        if url is None:
            what = f"{ask.size} bytes" if ask.verb == "PUT" else ask.verb
            raise LockstepError(
                f"{self._address}/{ask.name}: found no address for {what}, expected one that the "
                "lab signed"
            )
        return url, {}
