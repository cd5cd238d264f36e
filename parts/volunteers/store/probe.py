"""Whether a store keeps what a run rests on: that one of many writers wins, and what addresses say.

It sees one endpoint, for a second: a store may keep it there and break it between two.
"""

import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier
from typing import Any

from lockstep.errors import LockstepError
from parts.volunteers.store.s3 import SOON, S3Endpoint
from parts.volunteers.store.verbs import Store
from parts.volunteers.store.web_store import IF_FREE, TAKEN, StoreRequest, WebStore
from pipeline.net import limits, web

NAMES, WRITERS = 20, 8
FORBIDDEN = 403
CONTENT = b"probe"
ANY = set(range(200, 600)) - web.BUSY  # statuses that are an answer


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
    """Probe addresses for what they were signed for, and for what they were not."""
    asks = StoreRequest("PUT", f"{folder}/signed", len(CONTENT)), StoreRequest("LIST", f"{folder}/")
    put, listing = endpoint.sign(asks, SOON).values()
    renamed = put.replace("/signed?", "/another?")
    others = listing.replace(folder.replace("/", "%2F"), "probe%2Fother")
    for what, verb, url, headers, content, expected in (
        ("a signed address with another name", "PUT", renamed, IF_FREE, CONTENT, FORBIDDEN),
        ("a signed address without its condition", "PUT", put, {}, CONTENT, FORBIDDEN),
        ("a signed address with another length", "PUT", put, IF_FREE, CONTENT * 2, FORBIDDEN),
        ("a signed address with another verb", "DELETE", put, IF_FREE, None, FORBIDDEN),
        ("a signed address", "PUT", put, IF_FREE, CONTENT, 200),
        ("a signed address a second time", "PUT", put, IF_FREE, CONTENT, TAKEN),
        ("a signed listing", "GET", listing, {}, None, 200),
        ("a signed listing of other names", "GET", others, {}, None, FORBIDDEN),
    ):
        request = web.Request(url, {}, store.address, "an answer", pushes=True)
        arguments = verb, request, store.network, headers, ANY, content
        status = limits.call(partial(_status, *arguments), store.network)
        if status != expected:
            raise LockstepError(
                f"{store.address}: answers {status} to {what}, expected {expected}: the store must "
                "accept an address only for what its owner signed"
            )


def _status(*arguments: Any) -> int:
    """Return the status of a probed store's answer to a request, see `web.opened`."""
    with web.opened(*arguments) as answer:
        return answer.status
