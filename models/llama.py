"""Llama as a Flax NNX module, its layers stacked on axis 0 and scanned or unrolled.

The same function as transformers' `LlamaForCausalLM`, to float32 rounding. Mistral, Qwen2 and Qwen3
are this model with other settings: their files say which.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, H query heads,
K key-value heads, G = H / K query heads that share one, h head_dim, V vocab_size.
"""

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx

from models.architecture import Architecture
from models.config import HfConfig
from models.decoder import Context, Decoder, Layer
from models.parts import MLP, CachedAttention, Linear, NewTokens, RMSNorm, attend

# Flax path -> (Hugging Face name, transposed): PyTorch stores a Linear as [out, in], we [in, out].
MLP_NAMES = {
    "gate/kernel": ("gate_proj.weight", True),
    "gate/bias": ("gate_proj.bias", False),
    "up/kernel": ("up_proj.weight", True),
    "up/bias": ("up_proj.bias", False),
    "down/kernel": ("down_proj.weight", True),
    "down/bias": ("down_proj.bias", False),
}


def within(path: str, name: str, names: dict[str, tuple[str, bool]]) -> dict:
    """Return the names of a module that is a part of another: at a path of ours, by their name."""
    return {f"{path}/{ours}": (f"{name}.{theirs}", t) for ours, (theirs, t) in names.items()}


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
    **within("layers/mlp", "model.layers.{layer}.mlp", MLP_NAMES),
    "norm/scale": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
}


@dataclass(frozen=True)
class DecoderConfig(HfConfig):
    """The settings of Llama's modules below, with the values of a plain decoder."""

    # without annotation: constants of a class, not keys of config.json
    attention_bias = False
    qk_norm = False  # whether each head's queries and keys are normalised before they are rotated

    @property
    def qkv_bias(self) -> bool:
        """Whether Llama's projections of queries, keys and values have biases."""
        return self.attention_bias


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of a Llama's config.json."""

    attention_bias: bool
    mlp_bias: bool

    MODEL_TYPE = "llama"
    HF_CLASS = "LlamaForCausalLM"
    HEADS_DIVIDE = True
    DEFAULTS = DecoderConfig.DEFAULTS | {"attention_bias": False, "mlp_bias": False}


# --- The module ---------------------------------------------------------------------------------


class Attention(CachedAttention):
    """Llama's attention with grouped queries: query head n reads key-value head n // G."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.kv_heads = config.num_key_value_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = config.head_dim
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        kv_width = self.kv_heads * self.head_dim
        self.query = linear(config.hidden_size, self.groups * kv_width, bias=config.qkv_bias)
        self.key = linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.value = linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.out = linear(self.groups * kv_width, config.hidden_size, bias=config.attention_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.key_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        """Return the values of Llama's heads, averaged and projected, [N, D]."""
        q_BTKGh, k_BTKh, v_BTKh = self.heads(x_ND, context)
        y_ND = attend(
            q_BTKGh,
            k_BTKh,
            v_BTKh,
            window=context.window,
            sequences_BT=context.sequences_BT,
            kernel=context.kernel,
        )
        return self.out(y_ND)

    def heads(self, x_ND: jax.Array, context: Context | NewTokens) -> tuple[jax.Array, ...]:
        """Return Llama's queries [B, T, K, G, h], scaled, keys and values [B, T, K, h]; rotated."""
        rope = context.rope
        B, K, G, h = context.batch, self.kv_heads, self.groups, self.head_dim
        T = x_ND.shape[0] // B
        q_BTKGh = self.query(x_ND).reshape(B, T, K, G, h)
        k_BTKGh = self.key(x_ND).reshape(B, T, K, 1, h)
        if self.qk_norm:
            q_BTKGh, k_BTKGh = self.query_norm(q_BTKGh), self.key_norm(k_BTKGh)
        q_BTKGh = rope.rotate(q_BTKGh) * h**-0.5
        k_BTKh = rope.rotate(k_BTKGh)[:, :, :, 0]
        return q_BTKGh, k_BTKh, self.value(x_ND).reshape(B, T, K, h)


def mlp(config: HfConfig, *, rngs: nnx.Rngs) -> MLP:
    """Return Llama's plain MLP of the config's sizes."""
    width, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
    return MLP(width, inner, std=std, bias=config.mlp_bias, rngs=rngs)


class Model(Decoder):
    """Llama: a decoder of like layers."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        layer = partial(Layer, config, Attention, mlp)
        super().__init__(config, {"layers": (config.num_hidden_layers, layer)}, rngs=rngs)


llama = Architecture(
    Config,
    Model,
    names=NAMES,
    stacked=("layers",),
    tied={"lm_head.weight": "model.embed_tokens.weight"},  # with tie_word_embeddings
    # a buffer that old files saved; it follows from the config
    ignored=r".*\.rotary_emb\.inv_freq",
)
