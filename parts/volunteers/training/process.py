"""A process of a run over a store: the chain that it follows, and who trains or looks on here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.protocol import driver
from lockstep.protocol.driver import RunProgress
from parts.volunteers import layout
from parts.volunteers.bodies import JoinRequest, SlotBody
from parts.volunteers.chain.act import RoundRead
from parts.volunteers.chain.chain import Chain
from parts.volunteers.keys import PrivateKey
from parts.volunteers.signed import sign


class Volunteer(NamedTuple):
    """The volunteer who trains in this process."""

    peer: int
    key: PrivateKey
    environment: dict[str, str]


class Onlooker(NamedTuple):
    """How somebody follows a run in this process who only looks on."""

    waits: bool  #: For links to come; else it ends with those that are there.
    say: Callable[[str], object]  #: Gets a line a round.


@dataclass
class Process:
    """A process of a run over a store.

    Attributes:
      chain: The run's links.
      volunteer: Who trains here; None where nobody does.
      onlooker: Who follows the run here and may go away; None in a training.
      sits_out: Whether the volunteer's own state differs from the one others computed.
    """

    chain: Chain
    volunteer: Volunteer | None = None
    onlooker: Onlooker | None = None
    sits_out: bool = False

    @property
    def looks_once(self) -> bool:
        """Whether nobody waits in this process for links to come."""
        return self.onlooker is not None and not self.onlooker.waits

    def read(self, progress: RunProgress, what: str) -> RoundRead:
        """Return what the process knows of a round's links before anything was read of it."""
        ejected, me = progress.state.ejected, self.volunteer and self.volunteer.peer
        return RoundRead(
            step=progress.state.step,
            what=what,
            head=self.chain.head,
            settle=self.chain.terms.settle,
            me=None if me in ejected else me,
            ejected=ejected,
            min_clients=self.chain.min_clients,
            waits=not self.looks_once,
        )

    def say(self, text: str) -> None:
        """Print a line for the process's onlooker."""
        if self.onlooker is not None:
            self.onlooker.say(text)

    def put(self, body: SlotBody) -> bool:
        """Put what the process's volunteer signs in a round; return whether it stands there now."""
        assert self.volunteer is not None
        length = layout.signed_bytes(body.slot, self.chain.document.slots)
        name = layout.of_peer(body.round, body.peer, body.slot)
        return self.chain.store.put(name, sign(body, self.volunteer.key, length))

    def ask(self, progress: RunProgress) -> None:
        """Ask to take part, if the process's volunteer may and has not."""
        me, step = self.volunteer, progress.state.step
        if me is None or not driver.may_ask(progress, [me.peer]):
            return
        request = JoinRequest(
            run=self.chain.run,
            round=step,
            peer=me.peer,
            environment=me.environment,
            self_test=self.chain.document.self_test,  # which was taken
        )
        if self.chain.look(layout.of_peer(step, me.peer, "join"), layout.JOIN_BYTES) is None:
            self.put(request)
