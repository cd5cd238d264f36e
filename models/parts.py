"""The parts that decoders are made of, as Flax NNX modules and functions; the cache of a text.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, K key-value heads, G query
heads that share one, h the size of a query and a key, w that of a value, Q queries, S keys or slots
of the cache.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.rope import RotaryTable
from models.rows_of_table import rows_of_table

# number of keys that a query sees, with its own; None: all before
KeyCount = int | jax.Array | None


class Embedding(nnx.Module):
    """A decoder's embedding: a table of vectors."""

    def __init__(self, size: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (size, width)))

    def __call__(
        self, tokens_N: jax.Array, dtype: jax.typing.DTypeLike, *, in_order: bool = False
    ) -> jax.Array:
        """Return the vectors of tokens, [N, D]; in_order: with the gradient of `rows_of_table`."""
        if in_order:
            return rows_of_table(self.embedding[...], tokens_N, dtype)
        return self.embedding[...][tokens_N].astype(dtype)


class Linear(nnx.Module):
    """A linear part: x @ kernel + bias, the float32 kernel [in, out] cast to the dtype of x."""

    def __init__(
        self, width_in: int, width_out: int, *, std: float, bias: bool = False, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (width_in, width_out)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(width_out))
        self.has_bias = bias

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the linear product over the last axis of x, in the dtype of x."""
        y = jnp.dot(x, self.kernel[...].astype(x.dtype))
        return y + self.bias[...].astype(y.dtype) if self.has_bias else y


class RMSNorm(nnx.Module):
    """Root-mean-square norm in float32, cast back, then scaled: the order matters in bfloat16."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x, normalised over its last axis by its root mean square."""
        wide = x.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...].astype(x.dtype) * normal.astype(x.dtype)


class MLP(nnx.Module):
    """A gated MLP, a part of decoders: down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int, *, std: float, bias: bool = False, rngs: nnx.Rngs):
        self.gate = Linear(width, inner, std=std, bias=bias, rngs=rngs)
        self.up = Linear(width, inner, std=std, bias=bias, rngs=rngs)
        self.down = Linear(inner, width, std=std, bias=bias, rngs=rngs)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        """Return the MLP's output, [N, D]."""
        return self.down(jax.nn.silu(self.gate(x_ND)) * self.up(x_ND))


def attend(
    q_BTKGh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKw: jax.Array,
    *,
    window: KeyCount = None,
    sequences_BT: jax.Array | None = None,
    kernel: str = "matmul",
) -> jax.Array:
    """Attention, a part of decoders: softmax(q k^T) v with grouped queries, float32 softmax.

    Args:
      q_BTKGh: Queries, already scaled.
      k_BTKh: Keys.
      v_BTKw: Values.
      window: Number of keys that a query sees: at i, the keys j with i - window < j <= i.
      sequences_BT: Number of each token's sequence; a query sees keys of its own. None: all are of
        one sequence.
      kernel: "matmul", plain products; or an implementation of `jax.nn.dot_product_attention`,
        which takes a window that is a constant when it is traced.

    Returns:
      [B * T, K * G * w]: the heads of a token side by side.
    """
    B, T, K, G, h = q_BTKGh.shape
    w = v_BTKw.shape[-1]
    if kernel != "matmul":
        y_BTNw = jax.nn.dot_product_attention(
            q_BTKGh.reshape(B, T, K * G, h),
            k_BTKh,
            v_BTKw,
            mask=None if sequences_BT is None else _same(sequences_BT, sequences_BT),
            scale=1.0,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation=kernel,
        )
        return y_BTNw.reshape(B * T, K * G * w)
    q_BKGTh = q_BTKGh.transpose(0, 2, 3, 1, 4)
    k_BKTh = k_BTKh.transpose(0, 2, 1, 3)
    v_BKTw = v_BTKw.transpose(0, 2, 1, 3)

    # No query sees a later key, so each quarter of the queries needs only the keys up to its own
    # end: 3/8 of the work is never done. Nor does one see keys before its window, where known.
    edges = sorted({T * quarter // 4 for quarter in range(5)})
    blocks = []
    for start, end in zip(edges, edges[1:], strict=False):
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        q_BKQh = q_BKGTh[:, :, :, start:end].reshape(B, K, G * (end - start), h)
        positions_Q = jnp.tile(jnp.arange(start, end), G)
        positions_S = jnp.arange(first, end)
        sees = positions_Q[:, None] >= positions_S  # [Q, S], compared here: no table of T x T
        if window is not None:
            sees &= positions_Q[:, None] - positions_S < window
        if sequences_BT is not None:
            query_sequences_BQ = jnp.tile(sequences_BT[:, start:end], G)
            sees &= _same(query_sequences_BQ, sequences_BT[:, first:end])
        y_BKQw = softmax_average(q_BKQh, k_BKTh[:, :, first:end], v_BKTw[:, :, first:end], sees)
        blocks.append(y_BKQw.reshape(B, K, G, end - start, w))
    y_BKGTw = jnp.concatenate(blocks, axis=3)
    return y_BKGTw.transpose(0, 3, 1, 2, 4).reshape(B * T, K * G * w)


def _same(sequences_BQ: jax.Array, sequences_BS: jax.Array) -> jax.Array:
    """Return which keys attention finds in a query's own sequence, [B, 1, Q, S]: heads alike."""
    return sequences_BQ[:, None, :, None] == sequences_BS[:, None, None, :]


def softmax_average(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array) -> jax.Array:
    """Return softmax(q k^T) v with a float32 softmax, dividing by its sum last: fewer passes."""
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=jnp.float32)
    scores = jnp.where(sees, scores, jnp.finfo(jnp.float32).min)
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (y / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)


# ---- A text that grows ----

# keys [B, K, S, h], already rotated, and values [B, K, S, w]
KeysAndValues = tuple[jax.Array, jax.Array]


class Cache(NamedTuple):
    """The keys and values of the tokens so far: a text grows without computing them again.

    All rows of a batch share their slots, and a row's tokens end where the others' do: a shorter
    prompt begins in a later slot, its slots before that are padding that no query sees.

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
    """What cached attention needs to know of new tokens besides its input and the cache."""

    rope: RotaryTable
    """Cosines and sines of the new tokens' positions."""
    batch: int
    """Number of rows, B."""
    window: KeyCount
    """Number of keys that a query sees."""
    used: jax.Array
    """Slot of the first new token."""
    first_B: jax.Array
    """Slot of each row's first token."""


class CachedAttention(nnx.Module):
    """An attention with methods `heads`, which makes queries, keys and values, and `out`."""

    def step(
        self, x_ND: jax.Array, tokens: NewTokens, cache: KeysAndValues
    ) -> tuple[jax.Array, KeysAndValues]:
        """Return attention's output, [N, D], of new tokens, normalised, and what is kept."""
        q_BTKGh, k_BTKh, v_BTKw = self.heads(x_ND, tokens)
        keys, values = (
            lax.dynamic_update_slice(old, new.transpose(0, 2, 1, 3), (0, 0, tokens.used, 0))
            for old, new in zip(cache, (k_BTKh, v_BTKw), strict=True)
        )
        return self.out(_attend(q_BTKGh, keys, values, tokens)), (keys, values)


def _attend(
    q_BTKGh: jax.Array, k_BKSh: jax.Array, v_BKSw: jax.Array, tokens: NewTokens
) -> jax.Array:
    """Return what new tokens' attention sees of all, [B * T, K * G * w], as `attend` has it."""
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
