"""An architecture as pure functions of its params, which are plain nested dicts outside `models/`.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, V vocab_size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import HfConfig
from models.parts import Cache

Params = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Architecture:
    """A family of models, and how their params are stored in Hugging Face files.

    Args:
      Config: Class of the configs.
      Model: Class of the Flax NNX modules, made as Model(config, rngs=...). Its params are float32,
        `embed` and, unless tied to it, `lm_head` among them; its methods `features` and `step` are
        as `Decoder` has them.
      names: Flax path -> (name of the tensor, whether it is stored transposed). {layer} and
        {expert} in a name number the param's leading axes.
      stacked: Top-level groups of params whose leaves lead with a layer axis.
      tied: Tensors that a file may hold twice: name -> name of the tensor that it must equal.
      ignored: Pattern of names of tensors that files hold and the model does not use. A match of
        its group `beyond` is a layer, which must not be one of the model's own.
      float32: Paths of params that are stored in float32, whatever the dtype of the others.
      balance: Paths of params that balance experts. No gradient moves them; in its place stands the
        number of choices that fell on each expert.
    """

    Config: type[HfConfig]
    Model: type[nnx.Module]
    names: Mapping[str, tuple[str, bool]]
    stacked: tuple[str, ...]
    tied: Mapping[str, str]
    ignored: str
    float32: tuple[str, ...] = ()
    balance: tuple[str, ...] = ()

    def init(self, config: Any, seed: int) -> Params:
        """Return an architecture's fresh float32 params as Hugging Face draws them.

        Kernels and embeddings are N(0, initializer_range), norms 1, all others 0.
        """
        return nnx.to_pure_dict(nnx.state(self.Model(config, rngs=nnx.Rngs(seed)), nnx.Param))

    def shapes(self, config: Any) -> Params:
        """Return the shapes and dtypes of the architecture's params; nothing is computed."""
        return _abstract(self.Model, config)[1]

    def features(
        self, config: Any, params: Params, tokens_BT: jax.Array, **options: Any
    ) -> jax.Array:
        """Return the architecture's final hidden states x_ND; times the head they are logits.

        `params` are nested dicts of float32 arrays, cast to a dtype where they are used; `options`
        are those of `Decoder.features` in models/decoder.py.
        """
        module = nnx.merge(_abstract(self.Model, config)[0], params)
        return module.features(tokens_BT, **options)

    def head(self, config: Any, params: Params) -> jax.Array:
        """Return the architecture's kernel [D, V], float32: features times it are the logits."""
        if config.tie_word_embeddings:
            return params["embed"]["embedding"].T
        return params["lm_head"]["kernel"]

    def apply(self, config: Any, params: Params, tokens_BT: jax.Array, **options: Any) -> jax.Array:
        """Return the architecture's logits of each next token, [B, T, V]; see `features`."""
        x_ND = self.features(config, params, tokens_BT, **options)
        kernel_DV = self.head(config, params).astype(x_ND.dtype)
        logits_NV = jnp.dot(x_ND, kernel_DV, preferred_element_type=jnp.float32)
        return logits_NV.reshape(*tokens_BT.shape, config.vocab_size)

    # --- Writing ---

    def cache(
        self, config: Any, first_B: jax.Array, length: int, dtype: jax.typing.DTypeLike
    ) -> Cache:
        """Return an empty cache for a text of the architecture.

        Args:
          config: Config of the model.
          first_B: Slot of each row's first token; the tokens given for the slots before it are
            padding, which the row does not see.
          length: Number of slots.
          dtype: Dtype of keys and values, and of the computation.
        """
        first_B = jnp.asarray(first_B, jnp.int32)
        heads, *sizes = config.kept_sizes
        layer = tuple(jnp.zeros((len(first_B), heads, length, size), dtype) for size in sizes)
        return Cache((layer,) * config.num_hidden_layers, jnp.int32(0), first_B)

    def step(
        self, config: Any, params: Params, tokens_BT: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Return the architecture's hidden states x_ND of the next T tokens, and their cache.

        They are those of `features` on each row's whole text so far, to rounding. A row's first
        token has position 0, wherever it stands. A dynamic rope is not stretched, however many
        tokens there are.

        Args:
          config: Config of the model.
          params: Params as `features` takes them, with scanned layers; or as `by_layer` returns
            them, with unrolled layers: faster, since no layer's params are cut out for each token.
          tokens_BT: Token ids, int32, for the next slots; the cache must have T left.
          cache: Cache that `cache` or an earlier step returned.
        """
        graph, shapes = _abstract(self.Model, config)
        groups = {group: params[group] for group in self.stacked if group in params}
        module = nnx.merge(graph, params | {group: shapes[group] for group in groups})
        return module.step(tokens_BT, cache, groups)

    def next_logits(
        self, config: Any, params: Params, tokens_BT: jax.Array, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        """Return the architecture's logits after each row's T tokens, [B, V] float32, and cache.

        Arguments as in `step`.
        """
        x_ND, cache = self.step(config, params, tokens_BT, cache)
        x_BD = x_ND.reshape(*tokens_BT.shape, -1)[:, -1]
        kernel_DV = self.head(config, params).astype(x_BD.dtype)
        return jnp.dot(x_BD, kernel_DV, preferred_element_type=jnp.float32), cache

    def by_layer(self, params: Params) -> Params:
        """Return the architecture's params with a list of layers for each stack, NumPy's views."""

        def unstacked(stack: Params) -> list[Params]:
            count = len(jax.tree.leaves(stack)[0])
            return [jax.tree.map(lambda leaf, n=n: leaf[n], stack) for n in range(count)]

        groups = [group for group in self.stacked if group in params]
        return params | {group: unstacked(params[group]) for group in groups}


@cache
def _abstract(model: type[nnx.Module], config: Any) -> tuple[nnx.GraphDef, Params]:
    module = nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0)))
    return nnx.graphdef(module), nnx.to_pure_dict(nnx.state(module, nnx.Param))
