"""Ask the peers that are present, and check what they answer before anything is done with it.

A peer whose answer is not what its operation gives is lost, and one line says why. Where peers
should have the same tree, the hash that most of them give counts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.wire.commitment import tree_hash
from parts.carrier.carrier import Answered, Carrier
from parts.carrier.frames import FrameError, checked
from parts.carrier.operation_tables import OPERATIONS, Asked, Hashed
from parts.carrier.operations import trees_of

log = logging.getLogger(__name__)
CaseResult = TypeVar("CaseResult")


@dataclass(frozen=True)
class Patience:
    """Limits on the time that a peer takes, in seconds.

    Attributes:
      start: Time until its process has started.
      answer: Time until it answers a request.
      step: Time until it answers the request for a step.
    """

    start: float
    answer: float
    step: float


class Given(NamedTuple):
    """A peer's answer as its operation gives it.

    values: The table that the operation gives. trees: Its arrays, by the names that were asked for.
      seconds: How long it took, since the request was sent.
    """

    values: Any
    trees: dict[str, Tree]
    seconds: float


class Asking:
    """The peers of a run behind a carrier: who is present, and what they answer.

    Args:
      carrier: The way to the processes.
      count: How many peers there are; all are absent at first.
      seconds: How long an answer may take.
    """

    def __init__(self, carrier: Carrier, count: int, seconds: float):
        self.carrier, self.count, self.seconds = carrier, count, seconds
        self.absent = frozenset(range(count))

    @property
    def here(self) -> frozenset[int]:
        """The present peers."""
        return frozenset(range(self.count)) - self.absent

    def ask(
        self,
        asked: Mapping[int, Asked],
        like: Mapping[str, Tree] | None = None,
        seconds: float | None = None,
    ) -> dict[int, Given]:
        """Send each peer its request at once, and return the answers that are what was asked for.

        The requests are of one operation. The arrays of each answer are the leaves of the trees in
        `like`, one tree after the other. By default, answers may take `self.seconds`.
        """
        answers = self.carrier.ask(asked, self.seconds if seconds is None else seconds)
        self.take_losses()
        given = {}
        for peer, answer in answers.items():
            if peer in self.absent:
                continue
            try:
                given[peer] = _read(asked[peer], answer, like or {})
            except FrameError as error:
                self.distrust(peer, f"nonsense: {error}")
        return given

    def ask_for_all(
        self, count: int, ask: Callable[[list[int]], Mapping[int, CaseResult]]
    ) -> list[CaseResult]:
        """Ask the present peers until each of `count` cases has a result, and return the results.

        `ask` takes the cases without a result, asks peers about some, and returns results by case.

        Raises:
          LockstepError: No peer is left.
        """
        results: dict[int, CaseResult] = {}
        while missing := [n for n in range(count) if n not in results]:
            self.expect_any()
            results |= ask(missing)
        return [results[n] for n in range(count)]

    def take_losses(self) -> None:
        """Count peers that the carrier lost as absent; it may know peers that the run has not."""
        for peer, why in self.carrier.lost().items():
            if peer in self.here:
                self.lose(peer, why)

    def lose(self, peer: int, why: str) -> None:
        """Count a peer as absent."""
        log.info(f"train: peer {peer} is lost: {why}")
        self.absent |= {peer}

    def distrust(self, peer: int, why: str) -> None:
        """Lose a peer for what it answered; its process may join again."""
        self.carrier.lose(peer, why)
        self.take_losses()

    def agreed(self, found: Mapping[int, str], name: str) -> str:
        """Return the hash that most peers give, in a tie the first one's, and lose the others."""
        (most, _), *_ = Counter(found[peer] for peer in sorted(found)).most_common(1)
        for peer, one in found.items():
            if one != most:
                self.distrust(peer, f"its {name} are {one[:12]}, the others' {most[:12]}")
        return most

    def is_true(self, peer: int, tree: Tree, expected: str | None, name: str) -> bool:
        """Return whether a tree has the hash that is expected, if one is; lose the peer if not."""
        if expected is None or (found := tree_hash(tree)) == expected:
            return True
        self.distrust(peer, f"it gave {name} {found[:12]}, expected {expected[:12]}")
        return False

    def expect_any(self) -> None:
        """Check that a peer is present.

        Raises:
          LockstepError: All peers are absent.
        """
        if not self.here:
            raise LockstepError(
                "train: no peer's process is left, expected at least one to go on with; their "
                "logs are beside the checkpoints, and the same command goes on"
            )


def _read(one: Asked, answer: Answered, like: Mapping[str, Tree]) -> Given:
    gives = OPERATIONS[one.operation].gives
    values = checked(gives, answer.header.values, f"what {one.operation} gives")
    wanted = getattr(one.values, "hash", True)
    if isinstance(values, Hashed) and (values.hash is not None) != wanted:
        raise FrameError(f"hash: {values.hash}, expected {'one' if wanted else 'none'}")
    return Given(values, trees_of(answer.arrays, like), answer.seconds)
