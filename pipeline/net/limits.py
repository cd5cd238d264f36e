"""What a server may cost, whoever speaks to it: seconds, pages and bytes.

web.py and connection.py hold web servers, the hub and Google's storage to these, fsspec_files.py
every other store. What a folder or a name may be, stage/given_files.py says.
"""

import time

from lockstep.errors import LockstepError, brief

CONNECT_SECONDS = 10.0
LEAST_BYTES = 2**10  # in `stall_seconds`: a server that sends less has stalled
HTTP_HEADER_BYTES = 2**18  # the most that all headers of an answer may have, interim ones included
REDIRECTS = 10  # the most that are followed
# The most that all pages of a listing may take, which are read into memory.
LISTING_BYTES, LISTING_PAGES, LISTING_SECONDS = 2**26, 10_000, 600.0


class ListingLimit:
    """What one listing, `name` in errors, has cost: all its pages have `most_bytes` at most."""

    def __init__(self, name: str, most_bytes: int = LISTING_BYTES):
        self._name, self._pages, self._bytes = name, 0, 0
        self._most_bytes = most_bytes
        self._until = time.monotonic() + LISTING_SECONDS
        self._asked: set[str] = set()

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self._most_bytes - self._bytes

    def next_page(self, which: str) -> None:
        """Count a page; `which` is its address or token.

        Raises:
          LockstepError: it was asked for before, or is one too many.
        """
        self._pages += 1
        if which in self._asked:
            raise self._endless("a page that links to itself", "another page")
        if self._pages > LISTING_PAGES:
            raise self._endless(f"a listing of over {LISTING_PAGES} pages", "fewer")
        self._asked.add(which)
        self.received(0)

    def received(self, count: int) -> None:
        """Count bytes.

        Raises:
          LockstepError: they are too many, or come too late.
        """
        self._bytes += count
        if self._bytes > self._most_bytes:
            raise self._endless(f"a listing of over {self._most_bytes} bytes", "less")
        if time.monotonic() > self._until:
            raise self._endless(f"a listing of over {LISTING_SECONDS:.0f} s", "less")

    def _endless(self, found: str, expected: str) -> LockstepError:
        return LockstepError(f"{brief(self._name, 200)}: {found}, expected {expected}")
