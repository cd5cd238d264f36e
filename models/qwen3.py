"""Qwen3: a Llama that normalises each head's queries and keys before they are rotated."""

from dataclasses import dataclass, replace

from models.llama import llama
from models.qwen2 import WindowedConfig


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of a Qwen3's config.json."""

    attention_bias: bool

    MODEL_TYPE = "qwen3"
    HF_CLASS = "Qwen3ForCausalLM"
    DEFAULTS = WindowedConfig.DEFAULTS | {"attention_bias": False, "head_dim": 128}

    qk_norm = True


qwen3 = replace(llama, Config=Config)
