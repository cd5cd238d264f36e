"""DeepSeek V3 as a Flax NNX module: latent attention and a mixture of experts.

The same function as transformers' `DeepseekV3ForCausalLM`, to float32 rounding. DeepSeek V2 is this
model with another router (models/deepseek_v2.py). The layers of multi-token prediction, which a
checkpoint may hold after the model's own, are not part of that function.

Shapes in names: B sequences, T tokens of each, N = B * T, D hidden_size, K heads, c the size of a
query and a key, w that of a value, V vocab_size.

References:
  DeepSeek-AI, DeepSeek-V2, https://arxiv.org/abs/2405.04434
  DeepSeek-AI, DeepSeek-V3, https://arxiv.org/abs/2412.19437
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from models import wrong
from models.architecture import Architecture
from models.config import HfConfig, positive_integer
from models.decoder import Context, Decoder, Layer
from models.experts import Mixture, Routing
from models.llama import MLP_NAMES, llama, mlp, within
from models.parts import CachedAttention, Linear, NewTokens, RMSNorm, attend
from models.rope import yarn_mscale

_ATTENTION = {
    "attention_norm/scale": ("input_layernorm.weight", False),
    "attention/query/kernel": ("self_attn.q_proj.weight", True),
    "attention/query_down/kernel": ("self_attn.q_a_proj.weight", True),
    "attention/query_down/bias": ("self_attn.q_a_proj.bias", False),
    "attention/query_norm/scale": ("self_attn.q_a_layernorm.weight", False),
    "attention/query_up/kernel": ("self_attn.q_b_proj.weight", True),
    "attention/kv_down/kernel": ("self_attn.kv_a_proj_with_mqa.weight", True),
    "attention/kv_down/bias": ("self_attn.kv_a_proj_with_mqa.bias", False),
    "attention/kv_norm/scale": ("self_attn.kv_a_layernorm.weight", False),
    "attention/kv_up/kernel": ("self_attn.kv_b_proj.weight", True),
    "attention/out/kernel": ("self_attn.o_proj.weight", True),
    "attention/out/bias": ("self_attn.o_proj.bias", False),
    "mlp_norm/scale": ("post_attention_layernorm.weight", False),
}
_EXPERTS = {
    "mlp/router/kernel": ("mlp.gate.weight", True),
    "mlp/router/correction": ("mlp.gate.e_score_correction_bias", False),
    "mlp/experts/gate": ("mlp.experts.{expert}.gate_proj.weight", True),
    "mlp/experts/up": ("mlp.experts.{expert}.up_proj.weight", True),
    "mlp/experts/down": ("mlp.experts.{expert}.down_proj.weight", True),
}
# Flax path -> (Hugging Face name, transposed). Experts are stacked on an axis after the layers'.
_DENSE_LAYER = _ATTENTION | within("mlp", "mlp", MLP_NAMES)
_LAYER = _ATTENTION | _EXPERTS | within("mlp/shared", "mlp.shared_experts", MLP_NAMES)
NAMES = {
    "embed/embedding": ("model.embed_tokens.weight", False),
    **within("dense_layers", "model.layers.{layer}", _DENSE_LAYER),
    **within("layers", "model.layers.{layer}", _LAYER),
    "norm/scale": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
}
# Keys about experts, which may be null where no layer has any.
EXPERT_KEYS = (
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
)


@dataclass(frozen=True)
class DeepseekConfig(HfConfig):
    """The keys that DeepSeek V2 and V3 have in common, and the settings of the modules below.

    Each of the two also has a property `routing`, a Routing.
    """

    attention_bias: bool
    first_k_dense_replace: Annotated[int, "from 0"]
    kv_lora_rank: int
    moe_intermediate_size: int
    n_group: int | None
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int | None
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    routed_scaling_factor: float
    topk_group: int | None
    v_head_dim: int

    DEFAULTS = HfConfig.DEFAULTS | {
        "attention_bias": False,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }

    # without annotation: constants of a class, not keys of config.json
    rope_interleave = True
    corrected = True  # whether a correction takes part in the router's choice

    def __post_init__(self):
        if positive_integer("qk_rope_head_dim", self.qk_rope_head_dim) % 2:
            raise wrong("qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        super().__post_init__()
        first = self.first_k_dense_replace
        if type(first) is not int or first < 0:
            raise wrong("first_k_dense_replace", first, "an integer from 0")
        if self.num_key_value_heads != self.num_attention_heads:
            expected = f"num_attention_heads ({self.num_attention_heads}): all share one latent"
            raise wrong("num_key_value_heads", self.num_key_value_heads, expected)
        if self.dense < self.num_hidden_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        per_token = positive_integer("num_experts_per_tok", self.num_experts_per_tok)
        experts, best = self.n_routed_experts, self.routing.best
        groups = positive_integer("n_group", self.routing.groups)
        limit = positive_integer("topk_group", self.routing.limit)
        if experts % groups:
            raise wrong("n_routed_experts", experts, f"a multiple of n_group ({groups})")
        if experts // groups < best:
            reason = f"{best} of the n_routed_experts ({experts}) make the score of a group"
            raise wrong("n_group", groups, f"at most {experts // best}: {reason}")
        if limit > groups:
            raise wrong("topk_group", limit, f"at most n_group ({groups})")
        if per_token > (most := experts // groups * limit):
            expected = f"at most {most}, the number of experts that a token can choose from"
            raise wrong("num_experts_per_tok", per_token, expected)

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> Self:
        """Read DeepSeek's config.json; without expert layers, null keys about them are absent."""
        values = cls.DEFAULTS | hf_config
        first, count = values.get("first_k_dense_replace"), values.get("num_hidden_layers")
        if type(first) is int and type(count) is int and first >= count:
            absent = [key for key in EXPERT_KEYS if values.get(key) is None]
            values = cls.DEFAULTS | {k: v for k, v in values.items() if k not in absent}
        # as in transformers, which ignores head_dim
        values["head_dim"] = values["qk_rope_head_dim"]
        return super().from_hf(values)

    @property
    def dense(self) -> int:
        """Number of DeepSeek's first layers that have a plain MLP in place of experts."""
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def first_layers(self) -> dict[str, int]:
        """DeepSeek's first layer of each stacked group of params that is not layer 0."""
        return {"layers": self.dense}

    @property
    def kept_sizes(self) -> tuple[int, int, int]:
        """DeepSeek's heads that a cache keeps, and the sizes of a key and of a value of each."""
        key = self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.num_attention_heads, key, self.v_head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of DeepSeek's attention scores before the softmax."""
        scale = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if self.rope.mscale_all_dim is None:
            return scale
        return scale * yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2


@dataclass(frozen=True)
class Config(DeepseekConfig):
    """The keys of a DeepSeek V3's config.json."""

    norm_topk_prob: bool
    rope_interleave: bool

    MODEL_TYPE = "deepseek_v3"
    HF_CLASS = "DeepseekV3ForCausalLM"
    DEFAULTS = DeepseekConfig.DEFAULTS | {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 4096,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 128,
        "rope_interleave": True,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    }
    OTHER_NAMES = {"num_local_experts": "n_routed_experts"}
    # keys that transformers ignores, with the value that it computes
    SUPPORTED = HfConfig.SUPPORTED | {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }

    @property
    def routing(self) -> Routing:
        """How the router of DeepSeek V3 chooses."""
        return Routing(self.n_group, self.topk_group, 2, "sigmoid", self.norm_topk_prob)

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return DeepSeek's config.json without the layers of multi-token prediction."""
        return super().to_hf(dtype) | {"num_nextn_predict_layers": 0}


# --- The module ---------------------------------------------------------------------------------


class Attention(CachedAttention):
    """DeepSeek's attention, whose keys and values are made of one narrow latent for each token.

    Queries and keys have a plain part without position, and a part that is rotated; all heads share
    the rotated part of the key.
    """

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        self.count = config.num_attention_heads
        self.plain, self.rotated = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scale = config.attention_scale
        self.neighbours = config.rope_interleave
        width, bias = config.hidden_size, config.attention_bias
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        query_width = self.count * (self.plain + self.rotated)
        self.query_rank = config.q_lora_rank
        # The epsilon of these two norms is not in config.json.
        if config.q_lora_rank is None:
            self.query = linear(width, query_width)
        else:
            self.query_down = linear(width, config.q_lora_rank, bias=bias)
            self.query_norm = RMSNorm(config.q_lora_rank, eps=1e-6)
            self.query_up = linear(config.q_lora_rank, query_width)
        self.kv_down = linear(width, self.rank + self.rotated, bias=bias)
        self.kv_norm = RMSNorm(self.rank, eps=1e-6)
        self.kv_up = linear(self.rank, self.count * (self.plain + self.value_dim))
        self.out = linear(self.count * self.value_dim, width, bias=bias)

    def __call__(self, x_ND: jax.Array, context: Context) -> jax.Array:
        """Return the values of DeepSeek's heads, averaged and projected, [N, D]."""
        q_BTK1c, k_BTKc, v_BTKw = self.heads(x_ND, context)
        options = {"sequences_BT": context.sequences_BT, "kernel": context.kernel}
        if context.kernel == "matmul":
            return self.out(attend(q_BTK1c, k_BTKc, v_BTKw, **options))
        # Other kernels need values as wide as queries and keys; zeros change no product.
        B, T, K = v_BTKw.shape[:3]
        wide = max(q_BTK1c.shape[-1], self.value_dim)
        q_BTK1c, k_BTKc, v_BTKw = (_widened(x, wide) for x in (q_BTK1c, k_BTKc, v_BTKw))
        y_NKw = attend(q_BTK1c, k_BTKc, v_BTKw, **options).reshape(B * T, K, wide)
        return self.out(y_NKw[:, :, : self.value_dim].reshape(B * T, K * self.value_dim))

    def heads(self, x_ND: jax.Array, context: Context | NewTokens) -> tuple[jax.Array, ...]:
        """Return latent queries [B, T, K, 1, c], scaled, keys [B, T, K, c], values [B, T, K, w]."""
        rope, B, K = context.rope, context.batch, self.count
        T = x_ND.shape[0] // B
        rotate = rope.rotate_neighbours if self.neighbours else rope.rotate
        if self.query_rank is None:
            q = self.query(x_ND)
        else:
            q = self.query_up(self.query_norm(self.query_down(x_ND)))
        q_BTK1c = q.reshape(B, T, K, 1, self.plain + self.rotated)
        rotated = rotate(q_BTK1c[..., self.plain :])
        q_BTK1c = jnp.concatenate([q_BTK1c[..., : self.plain], rotated], axis=-1) * self.scale

        latent, rotated = jnp.split(self.kv_down(x_ND), [self.rank], axis=-1)
        kv = self.kv_up(self.kv_norm(latent)).reshape(B, T, K, self.plain + self.value_dim)
        plain_BTKp, v_BTKw = jnp.split(kv, [self.plain], axis=-1)
        rotated_BT1r = rotate(rotated.reshape(B, T, 1, 1, self.rotated))[:, :, :, 0]
        rotated_BTKr = jnp.broadcast_to(rotated_BT1r, (B, T, K, self.rotated))
        return q_BTK1c, jnp.concatenate([plain_BTKp, rotated_BTKr], axis=-1), v_BTKw


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Pad the last axis of DeepSeek's heads with zeros to a width."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


class Model(Decoder):
    """A DeepSeek decoder: first layers are dense, others have experts; it may lack either."""

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        mixtures = config.num_hidden_layers - config.dense
        groups = {
            "dense_layers": (config.dense, partial(Layer, config, Attention, mlp)),
            "layers": (mixtures, partial(Layer, config, Attention, Mixture)),
        }
        super().__init__(config, groups, rngs=rngs)


CORRECTION = ("layers/mlp/router/correction",)
deepseek_v3 = Architecture(
    Config,
    Model,
    names=NAMES,
    stacked=("dense_layers", "layers"),
    tied=llama.tied,
    # layers that predict beyond the next token
    ignored=rf"{llama.ignored}|model\.layers\.(?P<beyond>\d{{1,9}})\..*",
    float32=CORRECTION,  # rounded, it would choose other experts
    balance=CORRECTION,
)
