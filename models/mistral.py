"""Mistral: a Llama whose queries may see only the latest keys."""

from dataclasses import dataclass

from models.llama import (
    IGNORED,
    NAMES,
    STACKED,
    TIED,
    DecoderConfig,
    Model,
    apply,
    features,
    head,
    init,
)

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
class Config(DecoderConfig):
    """The keys of a Mistral's config.json; sliding_window is a number of keys, or None for all."""

    sliding_window: int | None

    MODEL_TYPE = "mistral"
    ARCHITECTURE = "MistralForCausalLM"
    DEFAULTS = DecoderConfig.DEFAULTS | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers
