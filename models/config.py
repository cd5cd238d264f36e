"""The config of a model: read from config.json, checked, written again."""

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from models import ModelError, wrong
from models.rope import Rope, check_number, check_spellings


@dataclass(frozen=True)
class HfConfig:
    """The keys of a config.json that every decoder here has, under their own names.

    A subclass adds its fields, and sets:

      MODEL_TYPE: `model_type` in config.json.
      HF_CLASS: Class of transformers, the one entry of `architectures`.
      DEFAULTS: Values that transformers uses for keys that config.json leaves out; None where they
        follow from other keys. Keys that are not fields are ignored.
      SUPPORTED: Keys that change what is computed, each with the only value supported here.
      HEADS_DIVIDE: Whether transformers wants hidden_size to be a multiple of num_attention_heads,
        even where head_dim is given.
      OTHER_NAMES: Names that transformers also knows a key by, each with ours; both must agree.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    initializer_range: float
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None

    MODEL_TYPE: ClassVar[str]
    HF_CLASS: ClassVar[str]
    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    SUPPORTED: ClassVar[dict[str, Any]] = {
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "partial_rotary_factor": 1.0,
        "is_causal": True,
        "quantization_config": None,
    }
    HEADS_DIVIDE: ClassVar[bool] = False
    OTHER_NAMES: ClassVar[dict[str, str]] = {}

    mlp_bias = False  # without annotation: a constant, unless a subclass makes it a field

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The config's number of keys that a query sees in each layer, with its own; None: all."""
        return (None,) * self.num_hidden_layers

    @property
    def kept_sizes(self) -> tuple[int, int, int]:
        """Heads of keys and values that a cache keeps by this config, and their sizes."""
        return self.num_key_value_heads, self.head_dim, self.head_dim

    @property
    def first_layers(self) -> dict[str, int]:
        """The config's first layer of each stacked group of params that is not layer 0."""
        return {}

    @property
    def caveat(self) -> str | None:
        """A config's sentence on versions of transformers that compute otherwise; None: none."""
        return None

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            optional = field.type in (int | None, float | None) and value is None
            if field.type in (int, int | None) and not optional and field.name not in TOKENS:
                positive_integer(field.name, value)
            if field.type in (float, float | None) and not optional:
                check_number(field.name, value)
                if type(value) is int and value > MOST_INT:  # an array takes it as an int32
                    raise wrong(field.name, value, f"at most {MOST_INT}")
            if field.type is bool and type(value) is not bool:
                raise wrong(field.name, value, "true or false")
        for key in TOKENS:
            value = getattr(self, key)
            for token in value if isinstance(value, tuple) else (value,):
                if token is not None and (type(token) is not int or token < 0):
                    raise wrong(key, value, "a token id")
        heads = self.num_attention_heads
        if self.HEADS_DIVIDE and self.hidden_size % heads:
            expected = f"a multiple of num_attention_heads ({heads})"
            raise wrong("hidden_size", self.hidden_size, expected)
        if heads % self.num_key_value_heads:
            expected = f"a divisor of num_attention_heads ({heads})"
            raise wrong("num_key_value_heads", self.num_key_value_heads, expected)
        if self.head_dim % 2:
            raise wrong("head_dim", self.head_dim, "an even number")

    @classmethod
    def from_hf(cls, hf_config: dict[str, Any]) -> Self:
        """Read a config.json as transformers 4 or 5 writes it.

        Raises:
          ModelError: A key is missing or invalid, or asks for something that is not supported.
        """
        values = cls.DEFAULTS | hf_config
        if values["pad_token_id"] == -1:  # as in early Llamas: none
            values["pad_token_id"] = None
        values["rope"] = Rope.from_hf(values)
        for key, supported in cls.SUPPORTED.items():
            if key in values and values[key] != supported:
                raise ModelError(f"{key} is {values[key]!r}, but only {supported!r} is supported")
        for field in fields(cls):
            if field.name not in values:
                raise ModelError(f"{field.name} is missing")
        for other, key in cls.OTHER_NAMES.items():
            check_spellings(other, values.get(other), key, values[key])
        heads = positive_integer("num_attention_heads", values["num_attention_heads"])
        width = positive_integer("hidden_size", values["hidden_size"])
        if values["num_key_value_heads"] is None:
            values["num_key_value_heads"] = heads
        if values["head_dim"] is None:
            values["head_dim"] = width // heads
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        return cls(**{field.name: values[field.name] for field in fields(cls)})

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return a config.json that transformers 4 and 5 read alike, but for `caveat`.

        Version 4 knows only `rope_theta`, `rope_scaling` and `torch_dtype`, and silently reads a
        config without them as theta = 10000; version 5 writes only `rope_parameters` and `dtype`.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        rope = own.pop("rope")
        for key, value in own.items():
            if isinstance(value, tuple):
                own[key] = list(value)
        return (
            own
            | rope.to_hf()
            | {
                "architectures": [self.HF_CLASS],
                "attention_dropout": 0.0,
                "dtype": dtype,
                "hidden_act": "silu",
                "model_type": self.MODEL_TYPE,
                "torch_dtype": dtype,
                "use_cache": True,
            }
        )

    def shortened(self, layers: int) -> Self:
        """Return the config of a model with only its first `layers` layers."""
        return replace(self, num_hidden_layers=layers)


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # ids start at 0
MOST_INT = 2**31 - 1
MOST_LAYERS = 10**5  # which configs list one by one


def positive_integer(key: str, value: Any) -> int:
    """Return a config key's value, an integer above 0 that an axis of an array can have.

    Raises:
      ModelError: It is not.
    """
    most = MOST_LAYERS if key == "num_hidden_layers" else MOST_INT
    if type(value) is not int or value < 1:
        raise wrong(key, value, "an integer above 0")
    if value > most:
        raise wrong(key, value, f"an integer up to {most}")
    return value
