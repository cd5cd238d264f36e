"""A decoder: embedding, stacked layers that are scanned or unrolled, norm and head.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, L layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models import ModelError
from models.config import HfConfig
from models.parts import (
    Cache,
    Embedding,
    KeyCount,
    KeysAndValues,
    Linear,
    NewTokens,
    RMSNorm,
)
from models.rope import RotaryTable

# What the backward pass is given, by the names of `jax.checkpoint_policies`: all that it needs; the
# results of matrix products; those without attention's; or a layer's input only.
REMAT = (
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "nothing_saveable",
)


class Context(NamedTuple):
    """What a decoder's attention needs besides its input."""

    rope: RotaryTable
    """Cosines and sines of the positions."""
    batch: int
    """Number of sequences, B."""
    window: KeyCount
    """Number of keys that a query sees."""
    sequences_BT: jax.Array | None
    """Sequence of each token, where several are packed into a row."""
    kernel: str
    """Implementation of attention, as in `parts.attend`."""


class Layer(nnx.Module):
    """A decoder's layer: attention, then an MLP, each normalised before and added to its input.

    The two are made as attention(config, rngs=...) and mlp(config, rngs=...).
    """

    def __init__(
        self,
        config: HfConfig,
        attention: Callable[..., nnx.Module],
        mlp: Callable[..., nnx.Module],
        *,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = mlp(config, rngs=rngs)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        """Return the decoder layer's output, [N, D]."""
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), context)
        return x_ND + self.mlp(self.mlp_norm(x_ND))

    def step(
        self, x_ND: jax.Array, tokens: NewTokens, cache: KeysAndValues
    ) -> tuple[jax.Array, KeysAndValues]:
        """Return the decoder layer's output for new tokens, [N, D], and what is kept of them."""
        y_ND, cache = self.attention.step(self.attention_norm(x_ND), tokens, cache)
        x_ND = x_ND + y_ND
        return x_ND + self.mlp(self.mlp_norm(x_ND)), cache


class Decoder(nnx.Module):
    """A decoder: groups of like layers, each with params stacked on axis 0.

    `groups` maps the name of each to how many layers it has, and to what makes one, called with
    rngs. A group of 0 layers is left out.
    """

    def __init__(
        self,
        config: HfConfig,
        groups: Mapping[str, tuple[int, Callable[..., nnx.Module]]],
        *,
        rngs: nnx.Rngs,
    ):
        std, width = config.initializer_range, config.hidden_size
        self.config = config
        self.groups = tuple((name, count) for name, (count, _) in groups.items() if count)
        self.embed = Embedding(config.vocab_size, width, std=std, rngs=rngs)
        for name, _ in self.groups:
            setattr(self, name, _stack(*groups[name], rngs))
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(width, config.vocab_size, std=std, rngs=rngs)

    def features(
        self,
        tokens_BT: jax.Array,
        *,
        scan: bool,
        dtype: jax.typing.DTypeLike,
        attention: str = "matmul",
        remat: str = "everything_saveable",
        positions_BT: jax.Array | None = None,
        sequences_BT: jax.Array | None = None,
        embedding_in_order: bool = False,
    ) -> jax.Array:
        """Return the decoder's final hidden states x_ND, in `dtype`.

        Args:
          tokens_BT: Token ids, int32, each below vocab_size.
          scan: Whether to use `lax.scan` over the layers (compile time does not grow with depth),
            or to unroll them (faster on a CPU). Their bits may differ.
          dtype: Dtype of matmuls and activations; softmax, norms and routers stay float32.
          attention: Kernel: "matmul", plain products, the fastest on a CPU; or an implementation of
            `jax.nn.dot_product_attention`: "cudnn", fused, for an NVIDIA GPU in bfloat16; or "xla".
            JAX raises where the requested one is not available.
          remat: What a layer keeps for the backward pass, a name of `REMAT`. Keeping less costs
            time, and saves memory where layers are scanned (on a CPU only there).
          positions_BT: Position of each token, int32, from 0 and below T; None: 0 to T - 1.
          sequences_BT: Number of each token's sequence, int32, where several are packed into a row:
            a token attends to its own sequence only. None: each row is one sequence.
          embedding_in_order: Whether the gradient of the embedding is summed in the order of its
            rows, by rows_of_table.py: faster on a GPU, slower on a CPU. Its bits may differ.
        """
        config, (B, T) = self.config, tokens_BT.shape
        most = config.max_position_embeddings
        rope = RotaryTable(config.rope, config.head_dim, T, most, dtype, positions_BT)
        common, windows_L = _windows(config.windows, T)
        if windows_L is not None and attention != "matmul":
            raise ModelError(
                f"attention {attention!r} takes one window for all layers, and those of this model "
                "differ: expected 'matmul'"
            )
        context = Context(rope, B, common, sequences_BT, attention)

        def call(layer: Layer, x_ND: jax.Array, window: jax.Array | None) -> jax.Array:
            return layer(x_ND, context if window is None else context._replace(window=window))

        # One row for each token, not [B, T, D]: XLA's CPU matmuls of three axes, and above all
        # their gradients, took 1.4 times as long for the whole step.
        x_ND = self.embed(tokens_BT.reshape(B * T), dtype, in_order=embedding_in_order)
        start = 0
        for group, count in self.groups:
            windows = None if windows_L is None else windows_L[start : start + count]
            x_ND = _through(getattr(self, group), x_ND, call, windows, scan=scan, remat=remat)
            start += count
        return self.norm(x_ND)

    def step(
        self, tokens_BT: jax.Array, cache: Cache, layers: Mapping[str, Any]
    ) -> tuple[jax.Array, Cache]:
        """Return the decoder's hidden states x_ND of new tokens, and the cache with theirs.

        `layers` has each group's params: stacked, to be scanned, or a sequence of each layer's own.
        """
        config, (B, T), S = self.config, tokens_BT.shape, cache.layers[0][0].shape[2]
        positions_BT = jnp.maximum(cache.used + jnp.arange(T) - cache.first_B[:, None], 0)
        most = max(config.max_position_embeddings, S)  # a dynamic rope stays as it is in a text
        rope = RotaryTable(
            config.rope, config.head_dim, S, most, cache.layers[0][0].dtype, positions_BT
        )
        common, windows_L = _windows(config.windows, S)
        tokens = NewTokens(rope, B, common, cache.used, cache.first_B)
        x_ND = self.embed(tokens_BT.reshape(B * T), cache.layers[0][0].dtype)
        caches: list[KeysAndValues] = []
        for group, count in self.groups:
            graph, _ = nnx.split(getattr(self, group))
            windows = None if windows_L is None else windows_L[len(caches) : len(caches) + count]
            group_caches = cache.layers[len(caches) : len(caches) + count]
            x_ND, group_caches = _grow(graph, layers[group], x_ND, tokens, windows, group_caches)
            caches += group_caches
        return self.norm(x_ND), Cache(tuple(caches), cache.used + T, cache.first_B)


def _grow(
    graph: nnx.GraphDef,
    params: Any,
    x_ND: jax.Array,
    tokens: NewTokens,
    windows_L: np.ndarray | None,
    cache: Sequence[KeysAndValues],
) -> tuple[jax.Array, Sequence[KeysAndValues]]:
    """Pass new tokens through a group of the decoder's layers; arguments as in `Decoder.step`."""

    def layer(x_ND: jax.Array, of_layer: Any) -> tuple[jax.Array, KeysAndValues]:
        params, window, cache = of_layer
        own = tokens if window is None else tokens._replace(window=window)
        return nnx.merge(graph, params).step(x_ND, own, cache)

    if isinstance(params, Mapping):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cache)
        x_ND, stacked = lax.scan(layer, x_ND, (params, windows_L, stacked))
        return x_ND, [jax.tree.map(lambda leaf, n=n: leaf[n], stacked) for n in range(len(cache))]
    grown = []
    windows = [None] * len(cache) if windows_L is None else windows_L
    for of_layer in zip(params, windows, cache, strict=True):
        x_ND, own = layer(x_ND, of_layer)
        grown.append(own)
    return x_ND, grown


def _windows(windows: tuple[int | None, ...], length: int) -> tuple[int | None, np.ndarray | None]:
    """Return the window of all the decoder's layers if it is one; else None, and each layer's."""
    wide = [None if window is None or window >= length else window for window in windows]
    if len(set(wide)) == 1:
        return wide[0], None
    return None, np.array([length if window is None else window for window in wide], np.int32)


def _stack(count: int, make: Callable[..., nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """Return `count` of a decoder's modules as one whose params lead with an axis for them."""
    split = nnx.split_rngs(splits=count)
    return split(nnx.vmap(lambda rngs: make(rngs=rngs)))(rngs)


def _through(
    layers: nnx.Module,
    x_ND: jax.Array,
    call: Callable[[Any, jax.Array, Any], jax.Array],
    extras: Any,
    *,
    scan: bool,
    remat: str,
) -> jax.Array:
    """Pass x through layers that `_stack` stacked: call(layer, x_ND, of_layer) -> x_ND for each.

    `extras` is what differs from layer to layer, a tree of arrays with a leading axis, or None;
    `scan` and `remat` are as in `Decoder.features`.
    """
    graph, stacked = nnx.split(layers)

    def layer(x_ND: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
        params, extra = of_layer
        return call(nnx.merge(graph, params), x_ND, extra), None

    if remat != "everything_saveable":
        policy = getattr(jax.checkpoint_policies, remat)
        # XLA may not undo it by finding the same subexpressions twice; in a scan it cannot anyway
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=not scan)
    if scan:
        return lax.scan(layer, x_ND, (stacked, extras))[0]
    count = jax.tree.leaves(stacked)[0].shape[0]
    for number, params in enumerate(_unstack(stacked, count)):
        x_ND, _ = layer(x_ND, (params, jax.tree.map(lambda leaf, n=number: leaf[n], extras)))
    return x_ND


def _unstack(stacked: Any, count: int) -> list[Any]:
    """Split axis 0 of every leaf of a decoder's stack.

    The gradient of a split is one concatenate; that of `count` separate indexings would be `count`
    sums over the whole stack.
    """
    leaves, treedef = jax.tree.flatten(stacked)
    pieces = [[piece[0] for piece in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*pieces, strict=True)]
