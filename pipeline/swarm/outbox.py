"""Messages on their way out: each becomes bytes, and what these decode to, while others train."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pipeline.optim.optimizer import Tree
from pipeline.protocol.round import Round
from pipeline.wire import exchange, spool
from pipeline.wire import message as wire
from pipeline.wire.exchange import Sent


class Packed(NamedTuple):
    """A message as it leaves its peer: what its bytes decode to, and these with the commitment."""

    message: Tree
    sent: Sent


@dataclass(frozen=True)
class Outbox:
    """The thread that packs the messages of a training, one after the other.

    Attributes:
      form: The form of the run's messages.
      folder: Where large ones lie meanwhile; None is the system's folder of temporary files.
    """

    form: wire.Form
    folder: Path | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "outbox"))

    def put(self, message: Tree, peer: int, round_: Round) -> "Future[Packed | None]":
        """Pack a peer's message, which the caller lets go of; None if it is not finite."""
        if self.form.large:
            return self._thread.submit(self._spool, jax.tree.leaves(message), peer, round_)
        return self._thread.submit(self._pack, [message], peer, round_)

    def _pack(self, only: list[Tree], peer: int, round_: Round) -> Packed | None:
        return self._received(exchange.send(only.pop(), peer, round_, self.form), peer, round_)

    def _spool(self, arrays: list[np.ndarray], peer: int, round_: Round) -> Packed | None:
        sent = exchange.send_spooled(arrays, peer, round_, self.form, self.folder)
        packed = self._received(sent, peer, round_)
        spool.drop_pages(jax.tree.leaves(packed and packed.message))
        return packed

    def _received(self, sent: Sent, peer: int, round_: Round) -> Packed | None:
        try:
            return Packed(exchange.receive(sent, peer, round_, self.form), sent)
        except wire.NotFiniteValueError:
            return None
