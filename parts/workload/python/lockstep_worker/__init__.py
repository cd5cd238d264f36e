"""What runs in the environment of a user's model: the worker, and base classes for models.

    from lockstep_worker import TorchWorkload

A base class is imported with its framework when it is first named. Nothing here imports `pipeline`
or, unless a base class is made for it, JAX.
"""

import importlib
from typing import Any

_HOMES = {"TorchWorkload": "torch_workload"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
