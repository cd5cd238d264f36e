"""The keys and values of the tokens so far, so that a text grows without computing them again.

All rows of a batch share their slots, and a row's tokens end where the others' do: a shorter prompt
begins in a later slot, its slots before that are padding that no query sees.

Shapes in names: B rows, T new tokens of each, S slots, N = B * T, D hidden_size, K key-value heads,
G query heads that share one, h the size of a query and a key, w that of a value.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.parts import softmax_average
from models.rope import RotaryTable

# keys [B, K, S, h], already rotated, and values [B, K, S, w]
KeysAndValues = tuple[jax.Array, jax.Array]


class Cache(NamedTuple):
    """What a model keeps of earlier tokens.

    A mixture's experts keep nothing. Latent attention keeps the keys and values of its heads, not
    the latent that they are made of: more memory, and no product is computed again.
    """

    layers: tuple[KeysAndValues, ...]
    """Keys and values of each layer, in the order of the layers."""
    used: jax.Array
    """Slots that hold tokens or padding, from the first; int32."""
    first_B: jax.Array
    """Slot of each row's first token; those before it are padding; int32."""


class NewTokens(NamedTuple):
    """What attention needs to know of new tokens besides its input and the cache."""

    rope: RotaryTable
    """Cosines and sines of the new tokens' positions."""
    batch: int
    """Number of rows, B."""
    window: int | jax.Array | None
    """Number of keys that a query sees; None: all before it."""
    used: jax.Array
    """Slot of the first new token."""
    first_B: jax.Array
    """Slot of each row's first token."""


class CachedAttention(nnx.Module):
    """An attention with methods `heads`, which makes queries, keys and values, and `out`."""

    def step(
        self, x_ND: jax.Array, tokens: NewTokens, kept: KeysAndValues
    ) -> tuple[jax.Array, KeysAndValues]:
        """Return the output for new tokens, [N, D], and what is kept; the input is normalised."""
        q_BTKGh, k_BTKh, v_BTKw = self.heads(x_ND, tokens)
        keys, values = (
            lax.dynamic_update_slice(old, new.transpose(0, 2, 1, 3), (0, 0, tokens.used, 0))
            for old, new in zip(kept, (k_BTKh, v_BTKw), strict=True)
        )
        return self.out(_attend(q_BTKGh, keys, values, tokens)), (keys, values)


def _attend(
    q_BTKGh: jax.Array, k_BKSh: jax.Array, v_BKSw: jax.Array, tokens: NewTokens
) -> jax.Array:
    """Return what new tokens see of all, [B * T, K * G * w], as `parts.attend` lays it out."""
    B, T, K, G, h = q_BTKGh.shape
    S, w = v_BKSw.shape[2:]
    slots_T, slots_S = tokens.used + jnp.arange(T), jnp.arange(S)
    distance_TS = slots_T[:, None] - slots_S
    sees_TS = distance_TS >= 0
    if tokens.window is not None:
        sees_TS &= distance_TS < tokens.window
    sees_BTS = sees_TS & (slots_S >= tokens.first_B[:, None])[:, None]
    sees_B1QS = jnp.tile(sees_BTS, (1, G, 1))[:, None]  # the same for all heads
    q_BKQh = q_BTKGh.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, h)
    y_BKQw = softmax_average(q_BKQh, k_BKSh, v_BKSw, sees_B1QS)
    return y_BKQw.reshape(B, K, G, T, w).transpose(0, 3, 1, 2, 4).reshape(B * T, K * G * w)
