"""Qwen2: a Llama with biases of queries, keys and values, and optional windows in some layers."""

from dataclasses import dataclass, replace
from typing import Any, Self

from models import ModelError, wrong
from models.config import positive_integer
from models.llama import DecoderConfig, llama

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class WindowedConfig(DecoderConfig):
    """The keys of windows in a Qwen2's or Qwen3's config.json.

    A query sees `sliding_window` keys in the layers that `layer_types` calls sliding, and all in
    the others. With `use_sliding_window` false, `sliding_window` is ignored.
    """

    sliding_window: int | None
    use_sliding_window: bool
    layer_types: tuple[str, ...]

    DEFAULTS = DecoderConfig.DEFAULTS | {
        "bos_token_id": None,
        "eos_token_id": None,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": None,
        "max_window_layers": 28,
    }

    def __post_init__(self):
        super().__post_init__()
        if len(self.layer_types) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types has {len(self.layer_types)} entries, expected num_hidden_layers "
                f"({self.num_hidden_layers})"
            )
        for kind in self.layer_types:
            if kind not in (SLIDING, FULL):
                raise ModelError(f"layer_types has {kind!r}, expected {SLIDING} or {FULL}")
        if SLIDING in self.layer_types and self.sliding_window is None:
            raise ModelError(f"layer_types has {SLIDING}, expected sliding_window to be set")

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> Self:
        """Read a Qwen's config.json, and derive `layer_types` where it is absent."""
        values = cls.DEFAULTS | hf_config
        if values["use_sliding_window"] is False:
            values["sliding_window"] = None
        if values["layer_types"] is None:
            count = positive_integer("num_hidden_layers", values.get("num_hidden_layers"))
            full = count if values["sliding_window"] is None else values["max_window_layers"]
            if type(full) is not int or full < 0:
                raise wrong("max_window_layers", full, "an integer from 0")
            values["layer_types"] = [FULL if layer < full else SLIDING for layer in range(count)]
        elif not isinstance(values["layer_types"], list):
            raise wrong("layer_types", values["layer_types"], "a list")
        return super().from_hf(values)

    def shortened(self, layers: int) -> Self:
        """Return a Qwen's config with only the first `layers` layers."""
        types = self.layer_types[:layers]
        return replace(self, num_hidden_layers=layers, layer_types=types)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Number of keys that a Qwen's query sees in each layer; None: all before it."""
        return tuple(self.sliding_window if t == SLIDING else None for t in self.layer_types)


@dataclass(frozen=True)
class Config(WindowedConfig):
    """The keys of a Qwen2's config.json."""

    MODEL_TYPE = "qwen2"
    HF_CLASS = "Qwen2ForCausalLM"

    qkv_bias = True


qwen2 = replace(llama, Config=Config)
