"""Who of the peers is there, and what they answer: nothing is believed that can be checked.

An answer that is not what its operation gives loses its peer, with one line, before anything is
done with it. A hash that peers give of what they have alike is that of most of them.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from pipeline.carrier.answers import ANSWERS, Hashed
from pipeline.carrier.carrier import Answered, Asked, Carrier
from pipeline.carrier.frames import FrameError, checked
from pipeline.carrier.operations import trees_of
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.runfile.table import Table
from pipeline.wire.commitment import tree_hash

log = logging.getLogger(__name__)


class Given(NamedTuple):
    """A peer's answer as its operation gives it.

    values: One of `ANSWERS`. trees: Its arrays, by the names that were asked for. seconds: Since
      the request was sent.
    """

    values: Table
    trees: dict[str, Tree]
    seconds: float


class Asking:
    """The peers of a run behind a carrier, as far as they answer.

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
        """The peers that are not absent."""
        return frozenset(range(self.count)) - self.absent

    def ask(
        self,
        asked: Mapping[int, Asked],
        like: Mapping[str, Tree] | None = None,
        seconds: float | None = None,
    ) -> dict[int, Given]:
        """Send each peer its request at once, and return the answers that are what was asked for.

        Args:
          asked: The requests, of one operation.
          like: The trees that the arrays of each answer are the leaves of, by name.
          seconds: How long they may take; `self.seconds` by default.
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

    def take_losses(self) -> None:
        """Take note of the peers that the carrier has lost; the run has no others."""
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
        """Return the hash that most peers give, of equally many the first; lose the others."""
        (most, _), *_ = Counter(found[peer] for peer in sorted(found)).most_common(1)
        for peer, one in found.items():
            if one != most:
                self.distrust(peer, f"its {name} are {one[:12]}, the others' {most[:12]}")
        return most

    def is_true(self, peer: int, tree: Tree, expected: str | None, name: str) -> bool:
        """Return whether a peer's tree has the hash, where it is known; else lose the peer."""
        if expected is None or (found := tree_hash(tree)) == expected:
            return True
        self.distrust(peer, f"it gave {name} {found[:12]}, expected {expected[:12]}")
        return False

    def expect_any(self) -> None:
        """Check that a peer is there.

        Raises:
          LockstepError: None is.
        """
        if not self.here:
            raise LockstepError(
                "train: no peer's process is left, expected at least one to go on with; their "
                "logs are beside the checkpoints, and the same command goes on"
            )


def _read(one: Asked, answer: Answered, like: Mapping[str, Tree]) -> Given:
    values = checked(ANSWERS[one.operation], answer.header.values, f"what {one.operation} gives")
    if isinstance(values, Hashed) and (values.hash is not None) != one.values.get("hash", True):
        raise FrameError(f"hash: {values.hash}, expected {'none' if values.hash else 'one'}")
    return Given(values, trees_of(answer.arrays, like), answer.seconds)
