"""DeepSeek V3 as a Flax NNX module: latent attention, and experts that a router chooses.

The same function as transformers' `DeepseekV3ForCausalLM`, to float32 rounding. DeepSeek V2 is this
model with another router: models/deepseek_v2.py says which. The layers of a prediction of several
tokens, which a checkpoint may hold after the model's own, are not part of that function.

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

from models import ModelError, llama
from models.config import HfConfig, positive_integer
from models.experts import Mixture, Routing
from models.parts import MLP, Embedding, Linear, RMSNorm, attend, stack, through
from models.pure import functions_of
from models.rope import Table, yarn_mscale

STACKED = ("dense_layers", "layers")

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
_MLP = {
    "gate/kernel": ("gate_proj.weight", True),
    "gate/bias": ("gate_proj.bias", False),
    "up/kernel": ("up_proj.weight", True),
    "up/bias": ("up_proj.bias", False),
    "down/kernel": ("down_proj.weight", True),
    "down/bias": ("down_proj.bias", False),
}
_EXPERTS = {
    "mlp/router/kernel": ("mlp.gate.weight", True),
    "mlp/router/correction": ("mlp.gate.e_score_correction_bias", False),
    "mlp/experts/gate": ("mlp.experts.{expert}.gate_proj.weight", True),
    "mlp/experts/up": ("mlp.experts.{expert}.up_proj.weight", True),
    "mlp/experts/down": ("mlp.experts.{expert}.down_proj.weight", True),
}


def _within(path: str, name: str, names: dict[str, tuple[str, bool]]) -> dict:
    return {f"{path}/{ours}": (f"{name}.{theirs}", t) for ours, (theirs, t) in names.items()}


# Flax path -> (Hugging Face name, transposed). Experts are stacked on an axis after the layers'.
_DENSE_LAYER = _ATTENTION | _within("mlp", "mlp", _MLP)
_LAYER = _ATTENTION | _EXPERTS | _within("mlp/shared", "mlp.shared_experts", _MLP)
NAMES = {
    "embed/embedding": ("model.embed_tokens.weight", False),
    **_within("dense_layers", "model.layers.{layer}", _DENSE_LAYER),
    **_within("layers", "model.layers.{layer}", _LAYER),
    "norm/scale": ("model.norm.weight", False),
    "lm_head/kernel": ("lm_head.weight", True),
}
TIED = llama.TIED
IGNORED = rf"{llama.IGNORED}|model\.layers\.(?P<beyond>\d+)\..*"  # those that predict further
FLOAT32 = ("layers/mlp/router/correction",)  # rounded, it would choose other experts
BALANCE = FLOAT32

# What a config says of experts, and may leave null where no layer has any.
_OF_EXPERTS = (
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
    """The keys that V2 and V3 have in common, and what the modules below ask of a config; that is
    also `routing`, a Routing, which each of the two gives in its own way."""

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

    # no annotations: these are answers of a class, not keys of config.json
    mlp_bias = False
    rope_interleave = True
    corrected = True  # whether the router's choice is corrected

    def __post_init__(self):
        if positive_integer("qk_rope_head_dim", self.qk_rope_head_dim) % 2:
            raise ModelError(
                f"qk_rope_head_dim is {self.qk_rope_head_dim}, expected an even number"
            )
        super().__post_init__()
        first = self.first_k_dense_replace
        if type(first) is not int or first < 0:
            raise ModelError(f"first_k_dense_replace is {first!r}, expected an integer from 0")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ModelError(
                f"num_key_value_heads is {self.num_key_value_heads}, expected "
                f"num_attention_heads ({self.num_attention_heads}): all share one latent"
            )
        if self.dense < self.num_hidden_layers:
            self._check_experts()

    def _check_experts(self) -> None:
        each = positive_integer("num_experts_per_tok", self.num_experts_per_tok)
        experts, best = self.n_routed_experts, self.routing.best
        groups = positive_integer("n_group", self.routing.groups)
        limit = positive_integer("topk_group", self.routing.limit)
        if experts % groups:
            raise ModelError(
                f"n_routed_experts is {experts}, expected a multiple of n_group ({groups})"
            )
        if experts // groups < best:
            raise ModelError(
                f"n_group is {groups}, expected at most {experts // best}: {best} of the "
                f"n_routed_experts ({experts}) say what a group is worth"
            )
        if limit > groups:
            raise ModelError(f"topk_group is {limit}, expected at most n_group ({groups})")
        if each > experts // groups * limit:
            raise ModelError(
                f"num_experts_per_tok is {each}, expected at most {experts // groups * limit}, as "
                "many as a token can choose from"
            )

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> Self:
        values = cls.DEFAULTS | hf_config
        first, count = values.get("first_k_dense_replace"), values.get("num_hidden_layers")
        if type(first) is int and type(count) is int and first >= count:
            unsaid = [key for key in _OF_EXPERTS if values.get(key) is None]
            values = cls.DEFAULTS | {k: v for k, v in values.items() if k not in unsaid}
        values["head_dim"] = values["qk_rope_head_dim"]  # whatever head_dim says, as transformers
        return super().from_hf(values)

    @property
    def dense(self) -> int:
        """How many layers, the first, have a plain MLP in the place of experts."""
        return min(self.first_k_dense_replace, self.num_hidden_layers)

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
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
    ARCHITECTURE = "DeepseekV3ForCausalLM"
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
    # transformers does not look at these three, and computes this one of what others compute
    SUPPORTED = HfConfig.SUPPORTED | {
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }

    @property
    def routing(self) -> Routing:
        return Routing(self.n_group, self.topk_group, 2, "sigmoid", self.norm_topk_prob)

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        return super().to_hf(dtype) | {"num_nextn_predict_layers": 0}  # none is read or written


def first_layers(config: DeepseekConfig) -> dict[str, int]:
    """Which of the model's layers is the first of a stacked group, where that is not 0."""
    return {"layers": config.dense}


# --- The module ---------------------------------------------------------------------------------


class Attention(nnx.Module):
    """Causal attention whose keys and values are made of one narrow latent for each token.

    A query and a key have a part without position, and a part that is turned; all heads share the
    turned part of the key.
    """

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        self.heads = config.num_attention_heads
        self.plain, self.turned = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.rank = config.kv_lora_rank
        self.scale = config.attention_scale
        self.neighbours = config.rope_interleave
        width, bias = config.hidden_size, config.attention_bias
        linear = partial(Linear, std=config.initializer_range, rngs=rngs)
        query_width = self.heads * (self.plain + self.turned)
        self.query_rank = config.q_lora_rank
        # These two norms have the epsilon that is no key of config.json.
        if config.q_lora_rank is None:
            self.query = linear(width, query_width)
        else:
            self.query_down = linear(width, config.q_lora_rank, bias=bias)
            self.query_norm = RMSNorm(config.q_lora_rank, eps=1e-6)
            self.query_up = linear(config.q_lora_rank, query_width)
        self.kv_down = linear(width, self.rank + self.turned, bias=bias)
        self.kv_norm = RMSNorm(self.rank, eps=1e-6)
        self.kv_up = linear(self.rank, self.heads * (self.plain + self.value_dim))
        self.out = linear(self.heads * self.value_dim, width, bias=bias)

    def __call__(
        self,
        x_ND: jax.Array,
        rope: Table,
        batch: int,
        sequences_BT: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        B, K, T = batch, self.heads, x_ND.shape[0] // batch
        turn = rope.rotate_neighbours if self.neighbours else rope.rotate
        if self.query_rank is None:
            q = self.query(x_ND)
        else:
            q = self.query_up(self.query_norm(self.query_down(x_ND)))
        q_BTK1c = q.reshape(B, T, K, 1, self.plain + self.turned)
        turned = turn(q_BTK1c[..., self.plain :])
        q_BTK1c = jnp.concatenate([q_BTK1c[..., : self.plain], turned], axis=-1) * self.scale

        latent, turned = jnp.split(self.kv_down(x_ND), [self.rank], axis=-1)
        kv = self.kv_up(self.kv_norm(latent)).reshape(B, T, K, self.plain + self.value_dim)
        plain_BTKp, v_BTKw = jnp.split(kv, [self.plain], axis=-1)
        turned_BT1r = turn(turned.reshape(B, T, 1, 1, self.turned))[:, :, :, 0]
        turned_BTKr = jnp.broadcast_to(turned_BT1r, (B, T, K, self.turned))
        k_BTKc = jnp.concatenate([plain_BTKp, turned_BTKr], axis=-1)
        how = {"sequences_BT": sequences_BT, "kernel": kernel}
        if kernel == "matmul":
            return self.out(attend(q_BTK1c, k_BTKc, v_BTKw, **how))
        # The others ask for values as wide as queries and keys. Zeros change no product.
        wide = max(q_BTK1c.shape[-1], self.value_dim)
        q_BTK1c, k_BTKc, v_BTKw = (_widened(x, wide) for x in (q_BTK1c, k_BTKc, v_BTKw))
        y_NKw = attend(q_BTK1c, k_BTKc, v_BTKw, **how).reshape(B * T, K, wide)
        return self.out(y_NKw[:, :, : self.value_dim].reshape(B * T, K * self.value_dim))


def _widened(x: jax.Array, width: int) -> jax.Array:
    """Zeros after what a head has, up to a width."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


class Layer(nnx.Module):
    """Attention, then a plain MLP or experts, each normalised before and added to what came in."""

    def __init__(self, config: DeepseekConfig, *, dense: bool, rngs: nnx.Rngs):
        width, std = config.hidden_size, config.initializer_range
        self.attention_norm = RMSNorm(width, eps=config.rms_norm_eps)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(width, eps=config.rms_norm_eps)
        if dense:
            inner = config.intermediate_size
            self.mlp = MLP(width, inner, std=std, bias=config.mlp_bias, rngs=rngs)
        else:
            self.mlp = Mixture(config, rngs=rngs)

    def __call__(
        self,
        x_ND: jax.Array,
        rope: Table,
        batch: int,
        sequences_BT: jax.Array | None,
        kernel: str,
    ) -> jax.Array:
        normal_ND = self.attention_norm(x_ND)
        x_ND = x_ND + self.attention(normal_ND, rope, batch, sequences_BT, kernel)
        return x_ND + self.mlp(self.mlp_norm(x_ND))


class Model(nnx.Module):
    """A decoder; the params under `dense_layers`, the first layers, and those under `layers`, the
    ones with experts, have a leading axis for the layer. A model may lack either."""

    def __init__(self, config: DeepseekConfig, *, rngs: nnx.Rngs):
        std, width = config.initializer_range, config.hidden_size
        self.config = config
        self.embed = Embedding(config.vocab_size, width, std=std, rngs=rngs)
        rest = config.num_hidden_layers - config.dense
        if config.dense:
            self.dense_layers = stack(config.dense, partial(Layer, config, dense=True), rngs)
        if rest:
            self.layers = stack(rest, partial(Layer, config, dense=False), rngs)
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
        rope = Table(config.rope, config.qk_rope_head_dim, T, most, dtype, positions_BT)

        def call(layer: Layer, x_ND: jax.Array, _: None) -> jax.Array:
            return layer(x_ND, rope, B, sequences_BT, attention)

        x_ND = self.embed(tokens_BT.reshape(B * T), dtype)
        for group in STACKED:
            if hasattr(self, group):
                x_ND = through(getattr(self, group), x_ND, call, None, scan=scan, remat=remat)
        return self.norm(x_ND)


init, features, head, apply = functions_of(Model)
