"""What a round needs to know of a message that nobody reads: it stays on the device of its peer."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.wire import bound
from lockstep.wire import message as wire


class MessageFacts(NamedTuple):
    """The facts of a message, which stand in place of its bytes.

    Attributes:
      largest: Its largest magnitude, see `bound`; infinite or NaN if a value is not finite.
      saved: By how many bytes it is shorter than `Form.bytes_most`.
    """

    largest: jax.Array
    saved: jax.Array

    @property
    def finite(self) -> bool:
        """Whether all values of the message are finite; asked of facts on the host."""
        return bool(np.isfinite(self.largest))


class UnreadMessage:
    """A message that never leaves the program that made it; only its facts are on the host."""

    def __init__(self, facts: MessageFacts):
        self.facts = facts


def facts_of(message: Tree, form: wire.Form) -> MessageFacts:
    """Return the facts of a message; to be jitted."""
    return MessageFacts(bound.largest_in_program(message), jnp.int32(wire.saved(message, form)))
