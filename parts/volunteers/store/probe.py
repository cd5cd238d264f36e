"""Whether a store keeps what a run rests on: that one of many writers wins, and what addresses say.

It sees one endpoint, for a second: a store may keep it there and break it between two.
"""

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import NamedTuple

from lockstep.errors import LockstepError
from parts.volunteers.store.s3 import SOON, S3Endpoint
from parts.volunteers.store.verbs import Store
from parts.volunteers.store.web_store import IF_FREE, TAKEN, StoreRequest, WebStore
from pipeline.net import limits, web

NAMES, WRITERS = 20, 8
FORBIDDEN = 403
CONTENT = b"probe"
ANY = set(range(200, 600)) - web.BUSY  # statuses that are an answer


class Trial(NamedTuple):
    """A request that probes a store by an address that was signed for another one."""

    what: str
    verb: str
    url: str
    headers: dict[str, str]
    content: bytes | None
    expected: int  #: Status.


def probe(store: Store) -> None:
    """Probe a store with the rights of its owner; what is put for it is removed again.

    Raises:
      LockstepError: two writers won one name; or the store signs addresses, and does not hold
        their users to what they say.
    """
    folder = f"probe/{secrets.token_hex(8)}"
    try:
        _race(store, folder)
        if isinstance(store, WebStore) and isinstance(store.endpoint, S3Endpoint):
            _try_addresses(store, store.endpoint, folder)
    finally:
        for name in store.names(f"{folder}/"):
            store.remove(name)


def _race(store: Store, folder: str) -> None:
    """Have writers race for names in the probed store, each with bytes of its own."""
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(NAMES):
            name, start = f"{folder}/{number}", Barrier(WRITERS)

            def put(writer: int, name: str = name, start: Barrier = start) -> bool:
                start.wait()
                return store.create(name, b"by %d" % writer)

            winners = [writer for writer, won in enumerate(pool.map(put, range(WRITERS))) if won]
            if len(winners) != 1:
                raise LockstepError(
                    f"{store.address}: {len(winners)} of {WRITERS} writers of one name succeeded, "
                    "expected 1: the store must accept an object only under a free name"
                )
            stored = store.look(name, len(CONTENT))
            if stored is None or stored.content != b"by %d" % winners[0]:
                raise LockstepError(
                    f"{store.address}: has the bytes of a writer that lost, expected those of the "
                    "one that won"
                )


# ---- Addresses ----


def _try_addresses(store: WebStore, endpoint: S3Endpoint, folder: str) -> None:
    """Probe addresses for what they were not signed for."""
    for trial in _trials(endpoint, folder):
        status = _status(store, trial)
        if status != trial.expected:
            raise LockstepError(
                f"{store.address}: answers {status} to {trial.what}, expected {trial.expected}: "
                "the store must accept an address only for what its owner signed"
            )


def _trials(endpoint: S3Endpoint, folder: str) -> Iterator[Trial]:
    size = len(CONTENT)
    asks = [StoreRequest("PUT", f"{folder}/signed", size), StoreRequest("LIST", f"{folder}/")]
    put, listing = endpoint.sign(asks, SOON)
    renamed, condition = put.replace("/signed?", "/another?"), IF_FREE
    others = listing.replace(folder.replace("/", "%2F"), "probe%2Fother")
    address = "a signed address"
    yield Trial(f"{address} with another name", "PUT", renamed, condition, CONTENT, FORBIDDEN)
    yield Trial(f"{address} without its condition", "PUT", put, {}, CONTENT, FORBIDDEN)
    yield Trial(f"{address} with another length", "PUT", put, condition, CONTENT * 2, FORBIDDEN)
    yield Trial(f"{address} with another verb", "DELETE", put, condition, None, FORBIDDEN)
    yield Trial(address, "PUT", put, condition, CONTENT, 200)
    yield Trial(f"{address} a second time", "PUT", put, condition, CONTENT, TAKEN)
    yield Trial("a signed listing", "GET", listing, {}, None, 200)
    yield Trial("a signed listing of other names", "GET", others, {}, None, FORBIDDEN)


def _status(store: WebStore, trial: Trial) -> int:
    """Return the status of a probed store's answer; of a lost answer, that of another attempt."""
    request = web.Request(trial.url, {}, store.address, "an answer", pushes=True)

    def ask() -> int:
        arguments = trial.verb, request, store.network, trial.headers, ANY, trial.content
        with web.opened(*arguments) as answer:
            return answer.status

    return limits.call(ask, store.network)
