"""What a round needs to know of a message that stays where it was made: on its peer's device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim.optimizer import Tree
from lockstep.wire import bound
from lockstep.wire import message as wire


class MessageFacts(NamedTuple):
    """The facts of a message, which stand in place of its bytes.

    Attributes:
      largest: Its largest magnitude, see `bound`; infinite or NaN if a value is not finite.
      saved: By how many bytes it is shorter than `Form.bytes_most`.
      loss: Its peer's, of the step that it is of.
    """

    largest: jax.Array
    saved: jax.Array
    loss: jax.Array


def facts_of(message: Tree, loss: jax.Array, form: wire.Form) -> MessageFacts:
    """Return the facts of a message; to be jitted."""
    saved = jnp.int32(wire.saved(message, form))
    return MessageFacts(bound.largest_in_program(message), saved, loss)
