"""Mistral: a Llama whose queries see only the latest keys."""

from dataclasses import dataclass, replace

from models.llama import DecoderConfig, llama


@dataclass(frozen=True)
class Config(DecoderConfig):
    """The keys of a Mistral's config.json."""

    sliding_window: int | None
    """Number of keys that a query sees; None: all."""

    MODEL_TYPE = "mistral"
    HF_CLASS = "MistralForCausalLM"
    DEFAULTS = DecoderConfig.DEFAULTS | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    SUPPORTED = DecoderConfig.SUPPORTED | {"layer_types": None}  # with it, it is a Ministral

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Mistral's window, the same in each layer."""
        return (self.sliding_window,) * self.num_hidden_layers


mistral = replace(llama, Config=Config)
