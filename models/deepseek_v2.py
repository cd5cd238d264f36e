"""DeepSeek V2: a DeepSeek V3 whose router takes the largest of a softmax, uncorrected.

The same function as transformers' `DeepseekV2ForCausalLM`, to float32 rounding.
"""

from dataclasses import dataclass

from models import ModelError
from models.config import HfConfig
from models.deepseek_v3 import (
    FLOAT32,
    NAMES,
    STACKED,
    TIED,
    DeepseekConfig,
    Model,
    apply,
    features,
    first_layers,
    head,
    init,
)
from models.experts import Routing
from models.llama import IGNORED  # nothing predicts further than the next token

__all__ = [
    "FLOAT32",
    "IGNORED",
    "NAMES",
    "STACKED",
    "TIED",
    "Config",
    "Model",
    "apply",
    "features",
    "first_layers",
    "head",
    "init",
]

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


@dataclass(frozen=True)
class Config(DeepseekConfig):
    """The keys of a DeepSeek V2's config.json."""

    topk_method: str
    mlp_bias: bool

    MODEL_TYPE = "deepseek_v2"
    ARCHITECTURE = "DeepseekV2ForCausalLM"
    DEFAULTS = DeepseekConfig.DEFAULTS | {
        "first_k_dense_replace": 0,
        "mlp_bias": False,
        "moe_intermediate_size": 1407,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": GREEDY,
    }
    # transformers does not look at these three, and computes this one of what others compute
    SUPPORTED = HfConfig.SUPPORTED | {
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }

    corrected = False

    def __post_init__(self):
        if self.topk_method not in (GREEDY, GROUP_LIMITED):
            raise ModelError(
                f"topk_method is {self.topk_method!r}, expected {GREEDY} or {GROUP_LIMITED}"
            )
        super().__post_init__()

    @property
    def routing(self) -> Routing:
        groups, limit = self.n_group, self.topk_group
        if self.topk_method == GREEDY:
            groups, limit = 1, 1
        return Routing(groups, limit, best=1, scores="softmax", normalised=False)
