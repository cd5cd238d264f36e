"""Where a training's rounds take place: between peers that this run starts, or over a store."""

from collections.abc import Sequence
from typing import Protocol

from lockstep.errors import LockstepError
from lockstep.swarm.peers import RunningPeers
from lockstep.swarm.swarm import Swarm
from lockstep.swarm.training_loop import StartingPoint, Watch
from lockstep.transcript.observer import Observer
from lockstep.transcript.transcript import Writer
from pipeline.joints import Joint
from pipeline.start.set_up import Setup


class Site:
    """The site where rounds take place: here, in this process or others, for all peers.

    start: The state before the first round, with what peers here own alone.
    swarm: What takes the rounds, of the arguments of `Swarm`.
    observers: Who follows them, besides those of every training.
    """

    def __init__(self, setup: Setup):
        self.start, self.swarm = setup.start, Swarm
        self.observers: Sequence[Observer] = [Watch(setup.settings.closing.limit)]

    def begin(self, start: StartingPoint, peers: RunningPeers, writer: Writer) -> StartingPoint:
        """Return where a training at this site goes on that has nothing newer than `start`."""
        return start


class OffersStoredRun(Protocol):
    """A site over a store, in place of peers that this run starts."""

    def stored_run(self, setup: Setup) -> Site:
        """Return the site where the rounds of a run over a store take place."""


STORED_RUNS = Joint[OffersStoredRun]("stored_run")


def site_of(setup: Setup) -> Site:
    """Return the site where the rounds of a run take place.

    Raises:
      LockstepError: In a store that the run does not name, or that no part here can follow.
    """
    run = setup.run
    if run.links.clock != "store":
        return Site(setup)
    for part in STORED_RUNS:
        return part.stored_run(setup)
    raise LockstepError(
        '[links] clock = "store", expected another, since no part that is here trains over a store'
    )
