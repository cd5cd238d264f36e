"""Sampling: the next token of each row is drawn from its logits.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

EVERY_TOKEN = 2**31 - 1  # as top_k: all tokens
COLD = 1e-30  # below it logits / temperature may overflow, and the likeliest token is certain


class Sampling(NamedTuple):
    """How the next token of a text is drawn: temperature, top_k and top_p."""

    temperature: float = 0.0  # divides the logits; 0 takes the likeliest token each time
    top_k: int | None = None  # only the likeliest `top_k` tokens are drawn; None or 0: all
    top_p: float = 1.0  # only the likeliest that together have this probability, at least one


GREEDY = Sampling()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Draws:
    """A sampling as arrays, so that other numbers need no other program, and keys of the rows."""

    keys_B: jax.Array
    temperature: np.float32
    top_k: np.int32
    top_p: np.float32
    greedy: bool = field(metadata={"static": True})  # the likeliest token is taken
    only_some: bool = field(metadata={"static": True})  # of the tokens are drawn

    @classmethod
    def seeded(cls, sampling: Sampling, seeds: Sequence[int]) -> Self:
        """Return the draws of sampled rows with these seeds, each from 0 to 2^32 - 1."""
        top_k = sampling.top_k or EVERY_TOKEN
        return cls(
            jax.vmap(jax.random.key)(np.array(seeds, np.uint32)),
            np.float32(sampling.temperature),
            np.int32(top_k),
            np.float32(sampling.top_p),
            greedy=sampling.temperature < COLD,
            only_some=top_k < EVERY_TOKEN or sampling.top_p < 1,
        )

    def draw(self, logits_BV: jax.Array, position_B: jax.Array) -> jax.Array:
        """Return a sampled token of each row, int32.

        token ~ softmax(logits / temperature) over the tokens that stay, drawn with the key
        fold_in(key(seed), position): a pure function of the row's logits, seed and position, which
        is the token's in the row's whole text.
        """
        if self.greedy:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        logits_BV = logits_BV / self.temperature
        if self.only_some:
            logits_BV = keep_likeliest(logits_BV, self.top_k, self.top_p)
        keys_B = jax.vmap(jax.random.fold_in)(self.keys_B, position_B)
        return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def keep_likeliest(logits_BV: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Put all but the likeliest top_k tokens, and of these all beyond top_p, at minus infinity.

    Tokens as likely as the last one that stays do stay.
    """
    falling_BV = -jnp.sort(-logits_BV, axis=-1)
    falling_BV = jnp.where(jnp.arange(falling_BV.shape[-1]) < top_k, falling_BV, -jnp.inf)
    share_BV = jax.nn.softmax(falling_BV)
    before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
    stays_BV = (before_BV < top_p) & (share_BV > 0)
    least_B = jnp.where(stays_BV, falling_BV, jnp.inf).min(axis=-1)
    return jnp.where(logits_BV >= least_B[:, None], logits_BV, -jnp.inf)
