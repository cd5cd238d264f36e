"""Qwen3: a Llama that normalises each head's queries and keys before they are turned."""

from dataclasses import dataclass

from models.llama import IGNORED, NAMES, STACKED, TIED, Model, apply, features, head, init
from models.qwen2 import WindowedConfig

__all__ = [
    "IGNORED",
    "NAMES",
    "STACKED",
    "TIED",
    "Config",
    "Model",
    "apply",
    "features",
    "head",
    "init",
]


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of a Qwen3's config.json."""

    attention_bias: bool

    MODEL_TYPE = "qwen3"
    ARCHITECTURE = "Qwen3ForCausalLM"
    DEFAULTS = WindowedConfig.DEFAULTS | {"attention_bias": False, "head_dim": 128}

    qk_norm = True

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def out_bias(self) -> bool:
        return self.attention_bias
