"""The parts that decoders are made of, as Flax NNX modules and functions.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, K key-value heads, G query
heads that share one, h the size of a query and a key, w that of a value.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

Window = int | jax.Array | None  # how many keys a query sees, its own included; None: all before it


# What the backward pass is given, by the names of `jax.checkpoint_policies`: all that it needs; the
# results of matrix products; those but for attention's; or a layer's input alone.
REMAT = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


class Embedding(nnx.Module):
    """A table of vectors; `attend` uses it as a tied head."""

    def __init__(self, size: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), (size, width)))

    def __call__(self, tokens_N: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return self.embedding[...][tokens_N].astype(dtype)

    def attend(self, x_ND: jax.Array) -> jax.Array:
        table_DV = self.embedding[...].astype(x_ND.dtype).T
        return jnp.dot(x_ND, table_DV, preferred_element_type=jnp.float32)


class Linear(nnx.Module):
    """x @ kernel + bias, with the float32 kernel [in, out] cast to the dtype of x."""

    def __init__(
        self, width_in: int, width_out: int, *, std: float, bias: bool = False, rngs: nnx.Rngs
    ):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (width_in, width_out)))
        if bias:
            self.bias = nnx.Param(jnp.zeros(width_out))
        self.has_bias = bias

    def __call__(self, x: jax.Array, out: jax.typing.DTypeLike | None = None) -> jax.Array:
        y = jnp.dot(x, self.kernel[...].astype(x.dtype), preferred_element_type=out)
        return y + self.bias[...].astype(y.dtype) if self.has_bias else y


class RMSNorm(nnx.Module):
    """Normalises in float32, casts back, then scales: the order matters in bfloat16."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...].astype(x.dtype) * normal.astype(x.dtype)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, inner: int, *, std: float, bias: bool = False, rngs: nnx.Rngs):
        self.gate = Linear(width, inner, std=std, bias=bias, rngs=rngs)
        self.up = Linear(width, inner, std=std, bias=bias, rngs=rngs)
        self.down = Linear(inner, width, std=std, bias=bias, rngs=rngs)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_ND)) * self.up(x_ND))


def attend(
    q_BTKGh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKw: jax.Array,
    *,
    window: Window = None,
    sequences_BT: jax.Array | None = None,
    kernel: str = "matmul",
) -> jax.Array:
    """Causal attention with grouped queries: softmax(q k^T) v, the softmax in float32.

    Args:
      q_BTKGh: queries, scaled already.
      k_BTKh, v_BTKw: keys and values.
      window: a query at i sees the keys j with i - window < j <= i.
      sequences_BT: a query sees the keys of the same number; None: all are of one sequence.
      kernel: "matmul", plain products; or an implementation of `jax.nn.dot_product_attention`,
        which takes a window that is known when it is traced.

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

    # No query sees a key after itself, so each quarter of the queries needs only the keys up to its
    # own end: 3/8 of the work is never done. Nor one before its window, where that is known.
    edges = sorted({T * quarter // 4 for quarter in range(5)})
    blocks = []
    for start, end in zip(edges, edges[1:], strict=False):
        first = max(0, start - window + 1) if isinstance(window, int) else 0
        q_BKQh = q_BKGTh[:, :, :, start:end].reshape(B, K, G * (end - start), h)
        places_Q = jnp.tile(jnp.arange(start, end), G)
        places_S = jnp.arange(first, end)
        sees = places_Q[:, None] >= places_S  # [Q, S], compared here: no table of T x T
        if window is not None:
            sees &= places_Q[:, None] - places_S < window
        if sequences_BT is not None:
            of_queries_BQ = jnp.tile(sequences_BT[:, start:end], G)
            sees &= _same(of_queries_BQ, sequences_BT[:, first:end])
        y_BKQw = _softmax_average(q_BKQh, k_BKTh[:, :, first:end], v_BKTw[:, :, first:end], sees)
        blocks.append(y_BKQw.reshape(B, K, G, end - start, w))
    y_BKGTw = jnp.concatenate(blocks, axis=3)
    return y_BKGTw.transpose(0, 3, 1, 2, 4).reshape(B * T, K * G * w)


def _same(sequences_BQ: jax.Array, sequences_BS: jax.Array) -> jax.Array:
    """Which keys are of a query's own sequence, [B, 1, Q, S]: alike for all heads."""
    return sequences_BQ[:, None, :, None] == sequences_BS[:, None, None, :]


def _softmax_average(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array) -> jax.Array:
    """Returns softmax(q k^T) v with a float32 softmax, dividing by its sum last: fewer passes."""
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=jnp.float32)
    scores = jnp.where(sees, scores, jnp.finfo(jnp.float32).min)
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (y / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)


def stack(count: int, make: Any, rngs: nnx.Rngs) -> nnx.Module:
    """`count` modules as one whose params lead with an axis for them; make(rngs) is one of them."""
    split = nnx.split_rngs(splits=count)
    return split(nnx.vmap(lambda rngs: make(rngs=rngs)))(rngs)


def through(
    layers: nnx.Module,
    x_ND: jax.Array,
    call: Any,
    each: Any,
    *,
    scan: bool,
    remat: str = "everything_saveable",
) -> jax.Array:
    """Passes x through stacked layers, scanned or one after the other.

    Args:
      layers: as `stack` makes them.
      call: call(layer, x_ND, of_layer) -> x_ND.
      each: what differs from layer to layer, a tree of arrays with a leading axis; or None.
      scan: `lax.scan`, whose compile time does not grow with depth; or unrolled.
      remat: what of a layer is kept for the backward pass, as one of REMAT; the rest is computed
        again there, from the layer's input.
    """
    graph, stacked = nnx.split(layers)

    def layer(x_ND: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        params, rest = of_layer
        return call(nnx.merge(graph, params), x_ND, rest), None

    if remat != "everything_saveable":
        policy = getattr(jax.checkpoint_policies, remat)
        # XLA may not undo it by finding the same subexpressions twice; in a scan it cannot anyway
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    if scan:
        return lax.scan(layer, x_ND, (stacked, each))[0]
    count = jax.tree.leaves(stacked)[0].shape[0]
    for number, params in enumerate(_unstack(stacked, count)):
        x_ND, _ = layer(x_ND, (params, jax.tree.map(lambda leaf, n=number: leaf[n], each)))
    return x_ND


def _unstack(stacked: Any, count: int) -> list[Any]:
    """Splits axis 0 of every leaf: the gradient of a split is one concatenate, that of `count`
    separate indexings would be `count` sums over the whole stack."""
    leaves, treedef = jax.tree.flatten(stacked)
    pieces = [[piece[0] for piece in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*pieces, strict=True)]
