"""Llama as a Flax NNX module, its layers stacked on axis 0 and scanned or unrolled.

The same function as transformers' `LlamaForCausalLM`, to float32 rounding. Mistral, Qwen2 and Qwen3
are this model with other settings: their files say which.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, H query heads,
K key-value heads, G = H / K query heads that share one, h head_dim, V vocab_size.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from flax import nnx

from models import ModelError
from models.config import HfConfig
from models.parts import MLP, Embedding, Linear, RMSNorm, Window, attend, stack, through
from models.pure import functions_of
from models.rope import Table

STACKED = ("layers",)

# Flax path -> (Hugging Face name, transposed): PyTorch stores a Linear as [out, in], we [in, out].
NAMES = {
    "embed/embedding": ("model.embed_tokens.weight", False),
    "layers/attention_norm/scale": ("model.layers.{layer}.input_layernorm.weight", False),
    "layers/attention/query/kernel": ("model.layers.{layer}.self_attn.q_proj.weight", True),
    "layers/attention/query/bias": ("model.layers.{layer}.self_attn.q_proj.bias", False),
    "layers/attention/key/kernel": ("model.layers.{layer}.self_attn.k_proj.weight", True),
    "layers/attention/key/bias": ("model.layers.{layer}.self_attn.k_proj.bias", False),
    "layers/attention/value/kernel": ("model.layers.{layer}.self_attn.v_proj.weight", True),
    "layers/attention/value/bias": ("model.layers.{layer}.self_attn.v_proj.bias", False),
    "layers/attention/out/kernel": ("model.layers.{layer}.self_attn.o_proj.weight", True),
    "layers/attention/out/bias": ("model.layers.{layer}.self_attn.o_proj.bias", False),
    "layers/attention/query_norm/scale": ("model.layers.{layer}.self_attn.q_norm.weight", False),
    "layers/attention/key_norm/scale": ("model.layers.{layer}.self_attn.k_norm.weight", False),
    "layers/mlp_norm/scale": ("model.layers.{layer}.post_attention_layernorm.weight", False),
    "layers/mlp/gate/kernel": ("model.layers.{layer}.mlp.gate_proj.weight", True),
    "layers/mlp/gate/bias": ("model.layers.{layer}.mlp.gate_proj.bias", False),
    "layers/mlp/up/kernel": ("model.layers.{layer}.mlp.up_proj.weight", True),
    "layers/mlp/up/bias": ("model.layers.{layer}.mlp.up_proj.bias", False),
    "layers/mlp/down/kernel": ("model.layers.{layer}.mlp.down_proj.weight", True),
    "layers/mlp/down/bias": ("model.layers.{layer}.mlp.down_proj.bias", False),
    "norm/scale": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # with tie_word_embeddings
IGNORED = r".*\.rotary_emb\.inv_freq"  # a buffer that old files saved; it follows from the config


@dataclass(frozen=True)
class DecoderConfig(HfConfig):
    """What the modules below ask of a config, with the answers of a plain decoder."""

    # no annotations: these are answers of a class, not keys of config.json
    qk_norm = False  # whether each head's queries and keys are normalised before they are turned
    mlp_bias = False

    @property
    def qkv_bias(self) -> bool:
        return False

    @property
    def out_bias(self) -> bool:
        return False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, how many keys a query sees, its own included; None for all before it."""
        return (None,) * self.num_hidden_layers


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of a Llama's config.json."""

    attention_bias: bool
    mlp_bias: bool

    MODEL_TYPE = "llama"
    ARCHITECTURE = "LlamaForCausalLM"
    DEFAULTS = DecoderConfig.DEFAULTS | {"attention_bias": False, "mlp_bias": False}

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias


# --- The module ---------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Causal attention with grouped queries: query head n reads key-value head n // G."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        kv_width = self.kv_heads * self.head_dim
        self.query = linear(config.hidden_size, self.groups * kv_width, bias=config.qkv_bias)
        self.key = linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.value = linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.out = linear(self.groups * kv_width, config.hidden_size, bias=config.out_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.key_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self,
        x_ND: jax.Array,
        rope: Table,
        batch: int,
        window: Window,
        sequences_BT: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        B, K, G, h = batch, self.kv_heads, self.groups, self.head_dim
        T = x_ND.shape[0] // B
        q_BTKGh = self.query(x_ND).reshape(B, T, K, G, h)
        k_BTKGh = self.key(x_ND).reshape(B, T, K, 1, h)
        if self.qk_norm:
            q_BTKGh, k_BTKGh = self.query_norm(q_BTKGh), self.key_norm(k_BTKGh)
        q_BTKGh = rope.rotate(q_BTKGh) * h**-0.5
        k_BTKh = rope.rotate(k_BTKGh)[:, :, :, 0]
        v_BTKh = self.value(x_ND).reshape(B, T, K, h)
        seen = {"window": window, "sequences_BT": sequences_BT}
        return self.out(attend(q_BTKGh, k_BTKh, v_BTKh, **seen, kernel=kernel))


class Layer(nnx.Module):
    """Attention, then the MLP, each normalised before and added to what came in."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        self.attention_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = MLP(width, config.intermediate_size, std=std, bias=config.mlp_bias, rngs=rngs)

    def __call__(
        self,
        x_ND: jax.Array,
        rope: Table,
        batch: int,
        window: Window,
        sequences_BT: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        normal_ND = self.attention_norm(x_ND)
        x_ND = x_ND + self.attention(normal_ND, rope, batch, window, sequences_BT, kernel)
        return x_ND + self.mlp(self.mlp_norm(x_ND))


class Model(nnx.Module):
    """A decoder; every param under `layers` has a leading axis, one entry for each layer."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        std, width = config.initializer_range, config.hidden_size
        self.config = config
        self.embed = Embedding(config.vocab_size, width, std=std, rngs=rngs)
        self.layers = stack(config.num_hidden_layers, partial(Layer, config), rngs)
        self.norm = RMSNorm(width, eps=config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(width, config.vocab_size, std=std, rngs=rngs)

    def features(
        self,
        tokens_BT: jax.Array,
        *,
        scan: bool,
        dtype: jax.typing.DTypeLike,
        attention: str,
        remat: str,
        positions_BT: jax.Array | None,
        sequences_BT: jax.Array | None,
    ) -> jax.Array:
        config, (B, T) = self.config, tokens_BT.shape
        most = config.max_position_embeddings
        rope = Table(config.rope, config.head_dim, T, most, dtype, positions_BT)
        # One row for each token, not [B, T, D]: XLA's CPU matmuls of three axes, and above all
        # their gradients, took 1.4 times as long for the whole step.
        x_ND = self.embed(tokens_BT.reshape(B * T), dtype)
        common, windows_L = _windows(config.windows, T)
        if windows_L is not None and attention != "matmul":
            raise ModelError(
                f"attention {attention!r} takes one window for all layers, and those of this model "
                "differ: expected 'matmul'"
            )

        def call(layer: Layer, x_ND: jax.Array, window: jax.Array | None) -> jax.Array:
            window = common if window is None else window
            return layer(x_ND, rope, B, window, sequences_BT, attention)

        x_ND = through(self.layers, x_ND, call, windows_L, scan=scan, remat=remat)
        return self.norm(x_ND)


def _windows(windows: tuple[int | None, ...], length: int) -> tuple[int | None, np.ndarray | None]:
    """The window of all layers, where it is the same; else None, and each layer's as an array."""
    wide = [None if window is None or window >= length else window for window in windows]
    if len(set(wide)) == 1:
        return wide[0], None
    return None, np.array([length if window is None else window for window in wide], np.int32)


init, features, head, apply = functions_of(Model)
