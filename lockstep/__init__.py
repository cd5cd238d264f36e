"""Lockstep as a library: `simulate` for any JAX model, optimizers that exchange little, models.

Nothing heavy is imported before a name is used, so that `import lockstep` costs nothing.
"""

from importlib import import_module
from typing import Any

import models
import pipeline
from pipeline import __version__

# What each file of pipeline/ has for everyone.
_NAMES = {
    "errors": ("LockstepError",),
    "optim.ada_distro": ("ada_distro",),
    "optim.adamw": ("adamw",),
    "optim.compressor": ("Compressor",),
    "optim.demo": ("demo",),
    "optim.dense": ("dense",),
    "optim.distro": ("CompressedMomentum", "distro"),
    "optim.local.diloco": ("diloco",),
    "optim.local.fedavg": ("fedavg",),
    "optim.local.local_steps": ("local_steps",),
    "optim.local.sparseloco": ("sparseloco",),
    "optim.local.sparta": ("sparta",),
    "optim.local.sparta_diloco": ("sparta_diloco",),
    "optim.local.streaming": ("streaming_diloco",),
    "optim.muon": ("muon",),
    "optim.optimizer": ("Optimizer",),
    "optim.quantize.half": ("Half",),
    "optim.quantize.integers": ("Integers",),
    "optim.quantize.levels": ("Levels",),
    "optim.quantize.qsgd": ("QSGD",),
    "optim.quantize.quantized": ("quantized",),
    "optim.sgd": ("sgd",),
    "optim.step_direction": ("StepDirection",),
    "optim.transform": (
        "OptimizerState",
        "all_gather",
        "alone",
        "as_transform",
        "lookahead_params",
    ),
    "simulation.result": ("Result",),
    "simulation.simulate": ("simulate",),
}
_FILES = {name: file for file, names in _NAMES.items() for name in names}

__all__ = ["__version__", "models", *_FILES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{pipeline.__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
