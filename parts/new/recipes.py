"""The optimizers of `lockstep new` by their names, with values and learning rates that are stated.

Values are those of the ready runs in `params/`, and of `benchmarks/RESULTS.md` where there is no
ready run. Nothing here was tuned for the model of a new run.
"""

import math
from collections.abc import Collection
from typing import Any, NamedTuple

from lockstep.errors import LockstepError

_ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}
_LOCAL = {"inner_steps": 10, "inner": {"AdamW": _ADAMW}}
_EVERY_STEP = _LOCAL | {"inner_steps": 1}
_OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.5, "nesterov": True}
_BLOCKS = {"compression_chunk": 64, "compression_topk": 32, "quantize_1bit": True}
_STEP_SCALE = {"layers": 0.075, "lm_head": 2.0}
_MEASURED = "benchmarks/RESULTS.md"
_DEFAULT_SIZE, _LARGER_SIZE = 1_850_000, 5_000_000  # params of the models in RESULTS.md


FINE_TUNING = 2e-5  # of AdamW, between 1e-5 of LLaMA-Factory and 5e-5 of transformers' Trainer


def short(rate: float) -> float:
    """Return a learning rate without the digits that binary fractions add."""
    return float(f"{rate:.6g}")


class StatedRate(NamedTuple):
    """A learning rate, the params of the model that it is stated for, and the file that says so."""

    params: int
    rate: float
    file: str


class Recipe(NamedTuple):
    """An optimizer of `lockstep new`.

    Attributes:
      tag: Its name in a run file.
      table: Its table there.
      file: Where the table's values are from.
      rates: Learning rates that are stated for it, by size of the model.
    """

    tag: str
    table: dict[str, Any]
    file: str
    rates: tuple[StatedRate, ...]

    @property
    def local_steps(self) -> int:
        """Local steps of a round."""
        return self.table.get("inner_steps", 1) // self.table.get("fragments", 1)

    def rate_for(self, params: int) -> StatedRate:
        """Return the rate stated for the size that is nearest, by ratio."""
        return min(self.rates, key=lambda rate: abs(math.log(rate.params / params)))

    def rate_of_trained(self) -> float:
        """Return a rate for weights that are trained already: AdamW's, times this one's over it."""
        first, of_adamw = self.rates[0], RECIPES["adamw"].rates[0]
        return short(FINE_TUNING * first.rate / of_adamw.rate)

    def for_groups(self, groups: Collection[str]) -> "Recipe":
        """Return it without what names a group that the model lacks, as a head of its own."""
        if "step_scale" not in self.table:
            return self
        scale = {name: by for name, by in self.table["step_scale"].items() if name in groups}
        return self._replace(table=self.table | {"step_scale": scale})


def _by_size(file: str, rate: float, *more: StatedRate) -> tuple[StatedRate, ...]:
    return StatedRate(_DEFAULT_SIZE, rate, file), *more


_ADAMW_20M = StatedRate(20_000_000, 4e-4, "params/fineweb-10bt.toml")
_LARGER_STEPS = StatedRate(_LARGER_SIZE, 1.6e-2, _MEASURED)


def _local(tag: str, file: str, rate: float, table: dict[str, Any]) -> Recipe:
    """A recipe of AdamW inside, whose own rate is stated for larger models."""
    return Recipe(tag, table, file, _by_size(file, rate, _ADAMW_20M))


RECIPES = {
    "adamw": _local("AdamW", "params/adamw.toml", 1.5e-3, _ADAMW),
    "muon": Recipe(
        "Muon",
        _ADAMW | {"momentum": 0.95, "step_scale": _STEP_SCALE},
        _MEASURED,
        _by_size(_MEASURED, 3.2e-2, _LARGER_STEPS),
    ),
    "sgd": Recipe(
        "SGD",
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
        _MEASURED,
        _by_size(_MEASURED, 0.2),
    ),
    "diloco": _local("DiLoCo", "params/diloco.toml", 1.5e-3, _LOCAL | _OUTER),
    "streaming-diloco": Recipe(
        "StreamingDiLoCo",
        _LOCAL | _OUTER | {"fragments": 2, "delay": 1, "mixing": 0.5},
        "params/streaming-diloco.toml",
        _by_size(
            "params/streaming-diloco.toml",
            3e-3,
            StatedRate(35_000_000, 1e-3, "params/paper/streaming-diloco-35m.toml"),
        ),
    ),
    "decoupled-diloco": _local(
        "DecoupledDiLoCo",
        "params/decoupled-diloco.toml",
        3e-3,
        _LOCAL
        | {
            "fragments": 2,
            "delay": 1,
            "adopt": "overwrite",
            "quorum": 1,
            "grace_seconds": 1.0,
            "max_age": 2,
            "outer": {"Nesterov": {"learning_rate": 0.35, "momentum": 0.5}},
        },
    ),
    "sparta-diloco": _local(
        "SPARTADiLoCo",
        "params/sparta-diloco.toml",
        1.5e-3,
        _EVERY_STEP | _OUTER | {"share": 0.05, "seed": 0, "outer_every": 20},
    ),
    "sparseloco": _local(
        "SparseLoCo",
        "params/sparseloco.toml",
        3e-3,
        _LOCAL
        | {
            "outer_learning_rate": 1.0,
            "error_feedback": 0.95,
            "compression_topk": 128,
            "compression_chunk": 64,
        },
    ),
    "fedavg": _local("FedAvg", _MEASURED, 3e-3, _LOCAL),
    "sparta": _local(
        "SPARTA", "params/sparta.toml", 1.5e-3, _EVERY_STEP | {"share": 0.1, "seed": 0}
    ),
    "distro": Recipe(
        "Distro",
        _BLOCKS | {"clip_grad_norm": 1.0, "compression_decay": 0.999},
        "params/run.toml",
        _by_size(
            "params/run.toml",
            2e-3,
            StatedRate(20_000_000, 4e-4, "params/fineweb-edu.toml"),
            StatedRate(1_200_000_000, 4e-4, "params/paper/distro-1.2b.toml"),
        ),
    ),
    "ada-distro": Recipe(
        "AdaDistro",
        _BLOCKS
        | {
            "compression_decay": 0.95,
            "second_moment_decay": 0.95,
            "update": "orthogonal",
            "step_scale": _STEP_SCALE,
        },
        "params/ada-distro.toml",
        _by_size("params/ada-distro.toml", 3.2e-2, _LARGER_STEPS),
    ),
}


def recipe_of(name: str) -> Recipe:
    """Return the recipe of an optimizer's name, in lower case with hyphens.

    Raises:
      LockstepError: There is none.
    """
    if name not in RECIPES:
        raise LockstepError(f"--optimizer {name}: expected one of {', '.join(RECIPES)}")
    return RECIPES[name]
