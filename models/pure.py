"""A Flax NNX model as pure functions of its params, which are plain nested dicts out here.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, V vocab_size.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]


class Functions(NamedTuple):
    """What an architecture's file gives of its Model."""

    init: Callable[[Any, int], Params]
    features: Callable[..., jax.Array]
    head: Callable[[Any, Params], jax.Array]
    apply: Callable[..., jax.Array]


def functions_of(model: type[nnx.Module]) -> Functions:
    """The functions of a class of models.

    Args:
      model: made as model(config, rngs=...); its params are float32, `embed` and, unless tied to
        it, `lm_head` among them, and its method `features` takes what `features` below takes.
    """

    def init(config: Any, seed: int) -> Params:
        """Returns fresh float32 params as Hugging Face draws them: N(0, initializer_range), norms
        1, the rest 0."""
        return nnx.to_pure_dict(nnx.state(model(config, rngs=nnx.Rngs(seed)), nnx.Param))

    def features(
        config: Any,
        params: Params,
        tokens_BT: jax.Array,
        *,
        scan: bool,
        dtype: jax.typing.DTypeLike,
        attention: str = "matmul",
        remat: str = "everything_saveable",
        positions_BT: jax.Array | None = None,
        sequences_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Returns x_ND, what the head multiplies, in `dtype`.

        Args:
          params: nested dict of float32 arrays, cast to `dtype` where they are used.
          tokens_BT: int32, each below vocab_size.
          scan: `lax.scan` over the layers (compile time does not grow with depth), or unrolled
            (faster on a CPU). Their bits may differ.
          dtype: what matmuls and activations are computed in; softmax, norms and routers stay
            float32.
          attention: "matmul", plain products, the fastest on a CPU; or an implementation of
            `jax.nn.dot_product_attention`: "cudnn", fused, for an NVIDIA GPU in bfloat16; or "xla".
            Never another than the one asked for: where it cannot be, JAX raises.
          remat: what a layer keeps for the backward pass, a name of `parts.REMAT`; less of it costs
            time, and saves memory where layers are scanned (on a CPU only there).
          positions_BT: int32, each token's position, from 0 and below T; None: its place.
          sequences_BT: int32; of rows that several sequences are packed into, each token's: it
            attends to tokens of the same number alone. None: a row is one sequence.
        """
        merged = nnx.merge(graph(config), params)
        return merged.features(
            tokens_BT,
            scan=scan,
            dtype=dtype,
            attention=attention,
            remat=remat,
            positions_BT=positions_BT,
            sequences_BT=sequences_BT,
        )

    def head(config: Any, params: Params) -> jax.Array:
        """Returns the kernel [D, V], float32, whose product with features is the logits."""
        if config.tie_word_embeddings:
            return params["embed"]["embedding"].T
        return params["lm_head"]["kernel"]

    def apply(config: Any, params: Params, tokens_BT: jax.Array, **how: Any) -> jax.Array:
        """Returns the float32 logits of each next token, [B, T, V]; `how` as in `features`."""
        x_ND = features(config, params, tokens_BT, **how)
        kernel_DV = head(config, params).astype(x_ND.dtype)
        logits_NV = jnp.dot(x_ND, kernel_DV, preferred_element_type=jnp.float32)
        return logits_NV.reshape(*tokens_BT.shape, config.vocab_size)

    @cache
    def graph(config: Any) -> nnx.GraphDef:
        return nnx.graphdef(nnx.eval_shape(lambda: model(config, rngs=nnx.Rngs(0))))

    return Functions(init, features, head, apply)
