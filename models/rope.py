"""Rotary position embedding, and the ways to stretch it to longer texts.

Angles are computed in NumPy and rounded as PyTorch does: a float32 power is one ulp off for some
frequencies, which at position 131071 is an error of 5e-3 in the cosine. Sines and cosines are
computed in float64, so that no instruction set changes their float32 bits.

References:
  Su et al., RoFormer, https://arxiv.org/abs/2104.09864
  Peng et al., YaRN, https://arxiv.org/abs/2309.00071
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from models import ModelError, wrong

# The required and the optional keys of each type.
TYPES = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        (),
    ),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
TABLES = "rope_parameters", "rope_scaling"  # of version 5 and of version 4 of transformers
SMALLEST, LARGEST = np.finfo(np.float32).tiny, np.finfo(np.float32).max
THETA = 10000.0  # rope_theta where a config.json has none


@dataclass(frozen=True)
class Rope:
    """The keys of rotary position embedding in config.json, under their own names; None: absent."""

    rope_theta: float
    rope_type: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    @classmethod
    def from_hf(cls, values: dict[str, Any]) -> Self:
        """Read the rotary keys in any spelling of transformers.

        Version 5 has all of them in the table `rope_parameters`; version 4 calls the table
        `rope_scaling`, and has `rope_theta` beside it. Where a config has several spellings of a
        key, which one counts depends on the version, so they must agree.

        Args:
          values: The keys of config.json, with defaults for those that it leaves out.

        Raises:
          ModelError: A type or key is unknown here, a value is invalid, or spellings differ.
        """
        tables = [key for key in TABLES if values.get(key) not in (None, {})]
        ropes = [cls._from_table(key, values[key], values) for key in tables]
        if not ropes:
            return cls._from_table("rope_theta", {}, values)
        if any(rope != ropes[0] for rope in ropes):
            a, b = (f"{key} is {values[key]!r}" for key in tables)
            raise ModelError(f"{a} and {b}, expected one of them or the same in both")
        return ropes[0]

    @classmethod
    def _from_table(cls, where: str, table: Any, values: dict[str, Any]) -> Self:
        """Read one table of rotary keys, with those that older versions have beside it."""
        if not isinstance(table, dict):
            raise wrong(where, table, "a table")
        rope = {k: v for k, v in table.items() if v is not None}
        kind = rope.setdefault("rope_type", rope.get("type", "default"))
        check_spellings("type", rope.pop("type", None), f"{where}.rope_type", kind)
        if not isinstance(kind, str) or kind not in TYPES:
            raise wrong(f"{where}.rope_type", kind, f"one of: {', '.join(TYPES)}")
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{where}.partial_rotary_factor is set, but only 1.0 is supported")
        needed, optional = TYPES[kind]
        # what may stand outside of the table, and its default
        beside: dict[str, Any] = {"rope_theta": THETA}
        if "original_max_position_embeddings" in needed:
            beside["original_max_position_embeddings"] = values["max_position_embeddings"]
        for key, default in beside.items():
            outside = values.get(key)
            inside = rope.setdefault(key, default if outside is None else outside)
            check_spellings(key, outside, f"{where}.{key}", inside)
        for key in needed:
            if key not in rope:
                raise ModelError(f"{where}.{key} is missing, expected for rope_type {kind!r}")
        for key, value in rope.items():
            if key not in ("rope_theta", "rope_type", *needed, *optional):
                raise ModelError(f"{where}.{key} is not known for rope_type {kind!r}")
            _check_value(key, value, where)
        return cls(**rope)

    def to_hf(self) -> dict[str, Any]:
        """Return the rotary keys of config.json, in both spellings."""
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        table = {key: value for key, value in table.items() if value is not None}
        older = {key: value for key, value in table.items() if key != "rope_theta"}
        return {
            "rope_parameters": table,
            "rope_scaling": None if self.rope_type == "default" else older,
            "rope_theta": self.rope_theta,
        }


def check_spellings(other: str, theirs: Any, key: str, value: Any) -> None:
    """Check a rotary key that may also stand under another name, None where it does not.

    Raises:
      ModelError: The two differ: versions of transformers disagree on which one counts.
    """
    if theirs is not None and theirs != value:
        raise ModelError(
            f"{other} is {theirs!r} and {key} is {value!r}, "
            "expected one of them or the same in both"
        )


def _check_value(key: str, value: Any, where: str) -> None:
    if key == "truncate":
        if type(value) is not bool:
            raise wrong(f"{where}.truncate", value, "true or false")
    elif key != "rope_type":
        check_number(key if key == "rope_theta" else f"{where}.{key}", value)


def check_number(key: str, value: Any) -> None:
    """Check that the value of a rotary key is a number above 0 that float32 holds.

    Raises:
      ModelError: It is not.
    """
    if type(value) not in (int, float) or not value > 0:
        raise wrong(key, value, "a number above 0")
    least, most = float(SMALLEST), float(LARGEST)
    if not least <= value <= most:
        raise wrong(key, value, f"one from {least:.2g} to {most:.2g}")


class RotaryTable:
    """Cosines and sines of each position, with which queries and keys are rotated.

    Args:
      rope: Settings of the embedding.
      dim: Size of the vectors to rotate.
      length: Number of tokens, T; a dynamic rope depends on it.
      most: max_position_embeddings of the config, which a dynamic rope stretches.
      dtype: Dtype of the cosines and sines.
      positions_BT: Position of each token, from 0 and below T; None: 0, 1, ..., T - 1.
    """

    def __init__(
        self,
        rope: Rope,
        dim: int,
        length: int,
        most: int,
        dtype: jax.typing.DTypeLike,
        positions_BT: jax.Array | None = None,
    ):
        frequencies, scale = scaled_frequencies(rope, dim, length, most)
        positions = np.arange(length, dtype=np.float32)
        angles = (positions[:, None] * frequencies).astype(np.float64)[:, None, None, :]
        scale = np.float32(scale)
        # [T, 1, 1, dim / 2]; with positions_BT [B, T, 1, 1, dim / 2]
        self.cos = (np.cos(angles).astype(np.float32) * scale).astype(dtype)
        self.sin = (np.sin(angles).astype(np.float32) * scale).astype(dtype)
        if positions_BT is not None:
            self.cos = jnp.asarray(self.cos)[positions_BT]
            self.sin = jnp.asarray(self.sin)[positions_BT]

    def rotate(self, x_BTKGh: jax.Array) -> jax.Array:
        """Rotate pairs of an element of the first and of the second half by position: Llama's."""
        return self._rotate(*jnp.split(x_BTKGh, 2, axis=-1))

    def rotate_neighbours(self, x_BTKGh: jax.Array) -> jax.Array:
        """Rotate by position pairs of neighbours, as DeepSeek does; return Llama's layout.

        Queries and keys are laid out alike, so their products do not depend on the layout.
        """
        return self._rotate(x_BTKGh[..., 0::2], x_BTKGh[..., 1::2])

    def _rotate(self, a: jax.Array, b: jax.Array) -> jax.Array:
        cos, sin = self.cos, self.sin
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def inverse_frequencies(theta: float, dim: int) -> np.ndarray:
    """Return theta^(-2i / dim), [dim / 2] float32, with the bits of PyTorch."""
    return np.float32(1) / _powers(theta, dim)


def _powers(theta: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def scaled_frequencies(rope: Rope, dim: int, length: int, most: int) -> tuple[np.ndarray, float]:
    """Return the scaled rotary frequencies, [dim / 2], and the factor of cosines and sines.

    Arguments as in `RotaryTable`.
    """
    match rope.rope_type:
        case "linear":
            return inverse_frequencies(rope.rope_theta, dim) / np.float32(rope.factor), 1.0
        case "dynamic":
            stretch = rope.factor * max(length, most) / most - (rope.factor - 1)
            theta = rope.rope_theta * stretch ** (dim / (dim - 2))
            return inverse_frequencies(theta, dim), 1.0
        case "llama3":
            return _llama3(rope, inverse_frequencies(rope.rope_theta, dim)), 1.0
        case "yarn":
            return _yarn(rope, dim), _yarn_scale(rope)
    return inverse_frequencies(rope.rope_theta, dim), 1.0


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Slow long rotary waves by `factor`, leave short ones as they are, and interpolate between."""
    old = rope.original_max_position_embeddings
    low, high, factor = rope.low_freq_factor, rope.high_freq_factor, np.float32(rope.factor)
    waves = np.float32(2 * math.pi) / plain
    share = (np.float32(old) / waves - np.float32(low)) / np.float32(high - low)
    between = (1 - share) * plain / factor + share * plain
    outside = np.where(waves > old / low, plain / factor, plain)
    return np.where((waves >= old / high) & (waves <= old / low), between, outside)


def _yarn(rope: Rope, dim: int) -> np.ndarray:
    """Slow the rotary frequencies that turn seldom within the original length by `factor`.

    Those that turn more than beta_fast times stay, those that turn less than beta_slow times are
    slowed, and between the two the change is linear.
    """

    def index(turns: float) -> float:
        """Return the (fractional) index of the rotary frequency that turns so often."""
        longest = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(longest) / (2 * math.log(rope.rope_theta))

    first, last = index(rope.beta_fast or 32), index(rope.beta_slow or 1)
    if rope.truncate is not False:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # as transformers, against a division by 0
    line = (np.arange(dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    unslowed = 1 - np.clip(line, 0, 1)
    powers = _powers(rope.rope_theta, dim)
    slowed = np.float32(1) / (np.float32(rope.factor) * powers)
    return slowed * (1 - unslowed) + np.float32(1) / powers * unslowed


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of the scores of a text that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
