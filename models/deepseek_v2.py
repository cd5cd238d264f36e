"""DeepSeek V2: a DeepSeek V3 whose router takes the largest of a softmax, without correction.

The same function as transformers' `DeepseekV2ForCausalLM`, to float32 rounding.
"""

from dataclasses import dataclass, replace

from models import wrong
from models.config import HfConfig
from models.deepseek_v3 import DeepseekConfig, deepseek_v3
from models.experts import Routing
from models.llama import llama

GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


@dataclass(frozen=True)
class Config(DeepseekConfig):
    """The keys of a DeepSeek V2's config.json."""

    topk_method: str
    mlp_bias: bool

    MODEL_TYPE = "deepseek_v2"
    HF_CLASS = "DeepseekV2ForCausalLM"
    HEADS_DIVIDE = True
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
    OTHER_NAMES = {"num_experts": "n_routed_experts"}
    # keys that transformers ignores, with the value that it computes
    SUPPORTED = HfConfig.SUPPORTED | {
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
    }

    corrected = False

    def __post_init__(self):
        if self.topk_method not in (GREEDY, GROUP_LIMITED):
            raise wrong("topk_method", self.topk_method, f"{GREEDY} or {GROUP_LIMITED}")
        super().__post_init__()

    @property
    def caveat(self) -> str | None:
        """What DeepSeek V2 has and older versions of transformers lack: a scale of the scores."""
        if self.rope.mscale_all_dim is None:
            return None
        return (
            "Versions of `transformers` that ignore `mscale_all_dim` in this architecture, 4.57 "
            "and 5.0 among them, compute another function of these weights; 5.23 does not."
        )

    @property
    def routing(self) -> Routing:
        """How the router of DeepSeek V2 chooses."""
        groups, limit = self.n_group, self.topk_group
        if self.topk_method == GREEDY:
            groups, limit = 1, 1
        return Routing(groups, limit, best=1, scores="softmax", normalised=False)


# Nothing here predicts beyond the next token.
deepseek_v2 = replace(deepseek_v3, Config=Config, ignored=llama.ignored)
