"""A run that waits for members: they ask, and a link says who takes part."""

import time
from collections.abc import Mapping
from functools import partial

from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from parts.volunteers import slots
from parts.volunteers.bodies import JoinRequest
from parts.volunteers.chain import links, turns
from parts.volunteers.chain.beyond import catch_up
from parts.volunteers.chain.links import AskedLink, Head
from parts.volunteers.chain.place import RunInStore, Volunteer, Waits
from parts.volunteers.chain.slate import Slate
from parts.volunteers.chain.turns import Turns
from parts.volunteers.signed import sign


class Waiting:
    """A process of a run that waits; `volunteer` is None where nobody trains."""

    def __init__(self, place: RunInStore, volunteer: Volunteer | None):
        self.place, self.volunteer = place, volunteer
        self._due: float | None = None  # since when a link can be put

    def until_enough(self, progress: RunProgress) -> tuple[RunProgress, tuple[int, ...]]:
        """Wait until enough have asked; return the run with them, and who they are."""
        progress, _ = driver.next_round(progress)
        place, step, waits = self.place, progress.state.step, Waits()
        slate = Slate(place, "asked", step)
        while progress.waiting:
            joins = place.notices(step, "join", slate.list())
            order = turns.turns_to_begin(
                progress, joins, place.head, place.terms, place.document.slots
            )
            if order is not None:
                after = partial(self._after, progress, joins, order.since)
                chosen = slate.choose(order, progress.state.ejected, after)
                if chosen is not None:
                    entry, progress = chosen
                    owed = tuple(sorted({*place.head.owed, *slate.refused}))
                    place.head = Head(entry.sha256, entry.stored.seconds, owed=owed)
                    return progress, entry.link.asked
                if self._say_who_asked(progress, slate, order):
                    continue
            if order is None or slate.first(order, progress.state.ejected) is None:
                catch_up(slate)
            self.ask(progress)
            waits.sleep()
        return progress, ()

    def _after(
        self, progress: RunProgress, joins: Mapping[int, int], since: int, link: AskedLink, at: int
    ) -> RunProgress:
        before, must = (turns.put_before(seconds, joins) for seconds in (at, since))
        return links.check_asked(link, self.place.head, progress, before, must)

    def ask(self, progress: RunProgress) -> None:
        """Ask to take part, if the volunteer may and has not."""
        me, step = self.volunteer, progress.state.step
        if me is None or not driver.may_ask(progress, [me.peer]):
            return
        request = JoinRequest(
            run=self.place.run,
            round=step,
            peer=me.peer,
            environment=me.environment,
            self_test=self.place.document.self_test,  # which was taken
        )
        name = slots.of_peer(step, me.peer, "join")
        if self.place.look(name, slots.JOIN_BYTES) is None:
            self.place.put(name, sign(request, me.key, slots.JOIN_BYTES))

    def _say_who_asked(self, progress: RunProgress, slate: Slate, order: Turns) -> bool:
        """Put the link that says who asked, if it is the volunteer's turn; return whether it is."""
        me, place, now = self.volunteer, self.place, time.monotonic()
        ejected = progress.state.ejected
        if me is None or me.peer in ejected or slate.has(me.peer):
            return False
        self._due = self._due or now
        # more time has passed since enough had asked, and since the link before
        if now - self._due < max(1.0, place.terms.extra) + 1 + order.delay(me.peer):
            return False
        joins = place.notices(progress.state.step, "join", slate.list())
        if slate.first(order, ejected) is not None:
            return False
        begins = order.since + int(order.delay(me.peer))  # so the link is put later
        link = AskedLink(
            run=place.run,
            round=progress.state.step,
            peer=me.peer,
            previous=place.head.sha256,
            asked=driver.may_ask(progress, turns.put_before(begins, joins)),
        )
        name = slots.of_peer(progress.state.step, me.peer, "asked")
        place.put(name, sign(link, me.key, place.link_bytes))
        return True
