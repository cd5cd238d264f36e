"""What runs in the environment of a user's model: the worker, and base classes for models.

    from lockstep_worker import TorchWorkload

The base class is imported with torch when it is first named. Nothing here imports `pipeline`
or, unless a base class is made for it, JAX. Other parts of Lockstep bring modules of this package,
in folders of this name on the same path.
"""

import importlib.util
import pkgutil
from importlib import import_module
from types import ModuleType
from typing import Any

__path__ = pkgutil.extend_path(__path__, __name__)


def brought(name: str) -> ModuleType | None:
    """Import a module that another part brings; None where that part is not here."""
    full = f"{__name__}.{name}"
    return import_module(full) if importlib.util.find_spec(full) else None


def __getattr__(name: str) -> Any:
    if name != "TorchWorkload":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(".torch_workload", __name__).TorchWorkload
