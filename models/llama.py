"""Llama as a Flax NNX module, its layers stacked on axis 0 and scanned or unrolled.

The same function as transformers' `LlamaForCausalLM`, to float32 rounding.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, H query heads,
K key-value heads, G = H / K query heads that share one, h head_dim, V vocab_size.
"""

import math
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from models import ModelError

STACKED = ("layers",)

# Flax path -> (Hugging Face name, transposed): PyTorch stores a Linear as [out, in], we [in, out].
NAMES = {
    "embed/embedding": ("model.embed_tokens.weight", False),
    "layers/attention_norm/scale": ("model.layers.{layer}.input_layernorm.weight", False),
    "layers/attention/query/kernel": ("model.layers.{layer}.self_attn.q_proj.weight", True),
    "layers/attention/key/kernel": ("model.layers.{layer}.self_attn.k_proj.weight", True),
    "layers/attention/value/kernel": ("model.layers.{layer}.self_attn.v_proj.weight", True),
    "layers/attention/out/kernel": ("model.layers.{layer}.self_attn.o_proj.weight", True),
    "layers/mlp_norm/scale": ("model.layers.{layer}.post_attention_layernorm.weight", False),
    "layers/mlp/gate/kernel": ("model.layers.{layer}.mlp.gate_proj.weight", True),
    "layers/mlp/up/kernel": ("model.layers.{layer}.mlp.up_proj.weight", True),
    "layers/mlp/down/kernel": ("model.layers.{layer}.mlp.down_proj.weight", True),
    "norm/scale": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # with tie_word_embeddings
IGNORED = r".*\.rotary_emb\.inv_freq"  # a buffer that old files saved; it follows from the config

# What LlamaConfig takes for a key that config.json leaves out (None: follows from other keys).
_HF_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# Keys that change what a Llama computes, and the one value of each that is computed here.
_SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}


@dataclass(frozen=True)
class Config:
    """The keys of a Llama's config.json that this model follows, under their own names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                _positive_integer(field.name, value)
            if field.type is float and not (type(value) in (int, float) and 0 < value < math.inf):
                raise ModelError(f"{field.name} is {value!r}, expected a number above 0")
            if field.type is bool and type(value) is not bool:
                raise ModelError(f"{field.name} is {value!r}, expected true or false")
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, key)
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and (type(token) is not int or token < 0):
                    raise ModelError(f"{key} is {value!r}, expected a token id")
        heads = self.num_attention_heads
        if self.hidden_size % heads:  # transformers asks for it even where head_dim is given
            raise ModelError(
                f"hidden_size is {self.hidden_size}, expected a multiple of "
                f"num_attention_heads ({heads})"
            )
        if heads % self.num_key_value_heads:
            raise ModelError(
                f"num_key_value_heads is {self.num_key_value_heads}, expected a divisor of "
                f"num_attention_heads ({heads})"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}, expected an even number")

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> "Config":
        """Reads a config.json as transformers 4 or 5 writes it.

        Raises:
          ModelError: a key is missing or wrong, or asks for something that is not computed here.
        """
        values = _HF_DEFAULTS | hf_config
        values["rope_theta"] = _read_rope(values)
        for key, supported in _SUPPORTED.items():
            if key in values and values[key] != supported:
                raise ModelError(f"{key} is {values[key]!r}, but only {supported!r} is supported")
        for field in fields(cls):
            if field.name not in values:
                raise ModelError(f"{field.name} is missing")
        heads = _positive_integer("num_attention_heads", values["num_attention_heads"])
        width = _positive_integer("hidden_size", values["hidden_size"])
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = heads
        if values["head_dim"] is None:
            values["head_dim"] = width // heads
        if isinstance(values["eos_token_id"], list):
            values["eos_token_id"] = tuple(values["eos_token_id"])
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Returns a config.json that transformers 4 and 5 read alike.

        Version 4 knows only `rope_theta` and `torch_dtype`, and reads a config without them as
        theta = 10000, without a word; version 5 writes only `rope_parameters` and `dtype`.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": dtype,
            "eos_token_id": list(self.eos_token_id)
            if isinstance(self.eos_token_id, tuple)
            else self.eos_token_id,
            "hidden_act": "silu",
            "mlp_bias": False,
            "model_type": "llama",
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rope_scaling": None,
            "torch_dtype": dtype,
            "use_cache": True,
        }


def _positive_integer(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{key} is {value!r}, expected an integer above 0")
    return value


def _read_rope(values: dict[str, Any]) -> float:
    """Returns theta; version 4 calls the table `rope_scaling` and has `rope_theta` beside it."""
    theta = values["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelError(f"{key} is {rope!r}, expected a table")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelError(f"{key}.rope_type is {kind!r}, but only 'default' is supported")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{key}.partial_rotary_factor is set, but only 1.0 is supported")
        theta = rope.get("rope_theta", theta)
    return theta


# --- The module ---------------------------------------------------------------------------------


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
    """x @ kernel, with the float32 kernel [in, out] cast to the dtype of x."""

    def __init__(self, width_in: int, width_out: int, *, std: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), (width_in, width_out)))

    def __call__(self, x: jax.Array, out: jax.typing.DTypeLike | None = None) -> jax.Array:
        return jnp.dot(x, self.kernel[...].astype(x.dtype), preferred_element_type=out)


class RMSNorm(nnx.Module):
    """Normalises in float32, casts back, then scales: the order matters in bfloat16."""

    def __init__(self, width: int, *, eps: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.scale[...].astype(x.dtype) * normal.astype(x.dtype)


class Attention(nnx.Module):
    """Causal attention with grouped queries: query head n reads key-value head n // G."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        kv_width = self.kv_heads * self.head_dim
        self.query = linear(config.hidden_size, self.groups * kv_width)
        self.key = linear(config.hidden_size, kv_width)
        self.value = linear(config.hidden_size, kv_width)
        self.out = linear(self.groups * kv_width, config.hidden_size)

    def __call__(self, x_ND: jax.Array, rope: "Rope", batch: int, kernel: str) -> jax.Array:
        B, K, G, h = batch, self.kv_heads, self.groups, self.head_dim
        T = x_ND.shape[0] // B
        q_BTKGh = rope.rotate(self.query(x_ND).reshape(B, T, K, G, h)) * h**-0.5
        k_BTKGh = rope.rotate(self.key(x_ND).reshape(B, T, K, 1, h))
        if kernel != "matmul":
            y_BTNh = jax.nn.dot_product_attention(
                q_BTKGh.reshape(B, T, K * G, h),
                k_BTKGh[:, :, :, 0],
                self.value(x_ND).reshape(B, T, K, h),
                scale=1.0,
                is_causal=True,
                implementation=kernel,
            )
            return self.out(y_BTNh.reshape(B * T, K * G * h))
        q_BKGTh = q_BTKGh.transpose(0, 2, 3, 1, 4)
        k_BKTh = k_BTKGh[:, :, :, 0].transpose(0, 2, 1, 3)
        v_BKTh = self.value(x_ND).reshape(B, T, K, h).transpose(0, 2, 1, 3)

        # No query sees a key after itself, so each quarter of the queries needs only the keys up
        # to its own end: 3/8 of the work is never done.
        edges = sorted({T * quarter // 4 for quarter in range(5)})
        blocks = []
        for start, end in zip(edges, edges[1:], strict=False):
            q_BKQh = q_BKGTh[:, :, :, start:end].reshape(B, K, G * (end - start), h)
            places_Q = jnp.tile(jnp.arange(start, end), G)
            sees_QS = places_Q[:, None] >= jnp.arange(end)  # compared here: no table of T x T
            y_BKQh = _softmax_average(q_BKQh, k_BKTh[:, :, :end], v_BKTh[:, :, :end], sees_QS)
            blocks.append(y_BKQh.reshape(B, K, G, end - start, h))
        y_BKGTh = jnp.concatenate(blocks, axis=3)
        return self.out(y_BKGTh.transpose(0, 3, 1, 2, 4).reshape(B * T, K * G * h))


def _softmax_average(q: jax.Array, k: jax.Array, v: jax.Array, sees: jax.Array) -> jax.Array:
    """Returns softmax(q k^T) v with a float32 softmax, dividing by its sum last: fewer passes."""
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=jnp.float32)
    scores = jnp.where(sees, scores, jnp.finfo(jnp.float32).min)
    top = lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - top)
    y = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return (y / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)


class MLP(nnx.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        self.gate = linear(config.hidden_size, config.intermediate_size)
        self.up = linear(config.hidden_size, config.intermediate_size)
        self.down = linear(config.intermediate_size, config.hidden_size)

    def __call__(self, x_ND: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x_ND)) * self.up(x_ND))


class Layer(nnx.Module):
    """Attention, then the MLP, each normalised before and added to what came in."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_ND: jax.Array, rope: "Rope", batch: int, kernel: str) -> jax.Array:
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), rope, batch, kernel)
        return x_ND + self.mlp(self.mlp_norm(x_ND))


class Model(nnx.Module):
    """A Llama; every param under `layers` has a leading axis, one entry for each layer."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        std, width = config.initializer_range, config.hidden_size
        self.config = config
        self.embed = Embedding(config.vocab_size, width, std=std, rngs=rngs)
        split = nnx.split_rngs(splits=config.num_hidden_layers)
        self.layers = split(nnx.vmap(lambda rngs: Layer(config, rngs=rngs)))(rngs)
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(width, config.vocab_size, std=std, rngs=rngs)

    def __call__(
        self, tokens_BT: jax.Array, *, scan: bool, dtype: jax.typing.DTypeLike, attention: str
    ) -> jax.Array:
        B, T = tokens_BT.shape
        rope = Rope(self.config, T, dtype)
        # One row for each token, not [B, T, D]: XLA's CPU matmuls of three axes, and above all
        # their gradients, took 1.4 times as long for the whole step.
        x_ND = self.embed(tokens_BT.reshape(B * T), dtype)
        graph, stacked = nnx.split(self.layers)

        def layer(x_ND, params):
            return nnx.merge(graph, params)(x_ND, rope, B, attention), None

        if scan:
            x_ND, _ = lax.scan(layer, x_ND, stacked)
        else:
            for params in _unstack(stacked, self.config.num_hidden_layers):
                x_ND, _ = layer(x_ND, params)
        x_ND = self.norm(x_ND)
        if self.config.tie_word_embeddings:
            logits_NV = self.embed.attend(x_ND)
        else:
            logits_NV = self.lm_head(x_ND, jnp.float32)
        return logits_NV.reshape(B, T, self.config.vocab_size)


def _unstack(stacked: Any, count: int) -> list[Any]:
    """Splits axis 0 of every leaf: the gradient of a split is one concatenate, that of `count`
    separate indexings would be `count` sums over the whole stack."""
    leaves, treedef = jax.tree.flatten(stacked)
    pieces = [[piece[0] for piece in lax.split(leaf, [1] * count)] for leaf in leaves]
    return [jax.tree.unflatten(treedef, layer) for layer in zip(*pieces, strict=True)]


class Rope:
    """Rotary position embedding in the half-rotation layout.

    The angles are computed in NumPy the way PyTorch rounds them: a float32 power is one ulp off
    for some frequencies, which at position 131071 is an error of 5e-3 in the cosine. Sine and
    cosine are taken in float64, so that no instruction set changes their float32 bits.
    """

    def __init__(self, config: Config, length: int, dtype: jax.typing.DTypeLike):
        frequencies = inverse_frequencies(config.rope_theta, config.head_dim)
        positions = np.arange(length, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)[:, None, None, :]
        self.cos_T11r = np.cos(angles).astype(np.float32).astype(dtype)  # r = head_dim / 2
        self.sin_T11r = np.sin(angles).astype(np.float32).astype(dtype)

    def rotate(self, x_BTKGh: jax.Array) -> jax.Array:
        a, b = jnp.split(x_BTKGh, 2, axis=-1)
        cos, sin = self.cos_T11r, self.sin_T11r
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def inverse_frequencies(theta: float, head_dim: int) -> np.ndarray:
    """Returns theta^(-2i / head_dim), [head_dim / 2] float32, with the bits of PyTorch."""
    exponents = np.arange(0, head_dim, 2).astype(np.float32) / np.float32(head_dim)
    powers = np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)
    return np.float32(1) / powers


# --- Params as a plain nested dict --------------------------------------------------------------


def init(config: Config, seed: int) -> dict[str, Any]:
    """Returns fresh float32 params as Hugging Face draws them: N(0, initializer_range), norms 1."""
    return nnx.to_pure_dict(nnx.state(Model(config, rngs=nnx.Rngs(seed)), nnx.Param))


def apply(
    config: Config,
    params: dict[str, Any],
    tokens_BT: jax.Array,
    *,
    scan: bool,
    dtype: jax.typing.DTypeLike,
    attention: str = "matmul",
) -> jax.Array:
    """Returns the float32 logits of each next token.

    Args:
      params: nested dict of float32 arrays, cast to `dtype` where they are used.
      tokens_BT: int32, each below vocab_size.
      scan: `lax.scan` over the layers (compile time does not grow with depth), or unrolled
        (faster on a CPU). Their bits may differ.
      dtype: what matmuls and activations are computed in; softmax and norms stay float32.
      attention: "matmul", plain products, the fastest on a CPU; or an implementation of
        `jax.nn.dot_product_attention`: "cudnn", fused, for an NVIDIA GPU in bfloat16; or "xla".
        Never another than the one asked for: where it cannot be, JAX raises.
    """
    model = nnx.merge(_graph(config), params)
    return model(tokens_BT, scan=scan, dtype=dtype, attention=attention)


@cache
def _graph(config: Config) -> nnx.GraphDef:
    return nnx.graphdef(nnx.eval_shape(lambda: Model(config, rngs=nnx.Rngs(0))))
