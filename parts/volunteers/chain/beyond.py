"""What a store shows where the chain of links ends: that nothing came yet, or that none can.

An honest peer signs an object of a round only once it has followed the links before it. So if a
link does not follow and others have built on it, or if there is no link and enough peers went on,
the store is not the one that they saw: what is missing then was changed or removed.
"""

from collections.abc import Iterator

from parts.volunteers import slots
from parts.volunteers.bodies import MessageRecord
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.chain.place import CaughtUp, ChainEnd, LinkInSlot, RunInStore
from parts.volunteers.chain.slate import Slate

MOST = 1024  # names of later rounds that are looked at
FORMS = "record", "closed", "asked"


def catch_up(slate: Slate) -> None:
    """Called where the next link is not there, or does not follow.

    Raises:
      CaughtUp: Who looks on does not wait for it, or it can never come.
    """
    watch = slate.place.watch
    if watch is None:
        return
    end = _end(slate)
    if end.wrong or not watch.waits:
        watch.end = end
        raise CaughtUp


def _end(slate: Slate) -> ChainEnd:
    place, step = slate.place, slate.step
    later = [*signed_later(place, step, slate.what)]
    signers = {entry.link.peer for _, entry in later}
    open_, wrong = [], []
    early = dict.fromkeys(slate.signed(()), "before its turn, by the messages that are there")
    for peer, reason in (early | slate.refused).items():
        name = slots.of_peer(step, peer, slate.what)
        builders = {e.link.peer for _, e in later if _builds(e, slate.entry(peer))} - {peer}
        text = f"{name}: {reason}"
        if builders:
            wrong.append(f"{text}; peers {sorted(builders)} went on from it")
        else:
            open_.append(f"{text}; nobody else went on from it")
    if not wrong and len(signers) >= place.document.run["config"]["min_clients"]:
        wrong.append(
            f"{slots.round_folder(step)}: no link follows, expected one, since peers "
            f"{sorted(signers)} went on: {later[0][0]}"
        )
    return ChainEnd(step, wrong, open_, [name for name, _ in later])


def _builds(entry: LinkInSlot, on: LinkInSlot) -> bool:
    """Return whether a record or a link follows from a link."""
    if isinstance(entry.link, MessageRecord):
        return isinstance(on.link, RoundLink) and entry.link.base == on.link.params
    return entry.link.previous == on.sha256


def signed_later(place: RunInStore, step: int, what: str) -> Iterator[tuple[str, LinkInSlot]]:
    """Yield what peers signed that comes after a round's link, "closed" or "asked"."""
    found = {name: slots.slot(name) for name in place.later_names(step + (what == "closed"))}
    names = [n for n, s in found.items() if s and s.what in FORMS and s[:2] != (step, what)]
    for name in sorted(names)[:MOST]:
        entry = place.signed_in(name)
        if entry is not None and entry.link is not None:
            yield name, entry
