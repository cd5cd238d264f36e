"""Lockstep as a library: `simulate` for any JAX model, optimizers that exchange little, models.

`__init__.pyi` beside this lists its names. Nothing heavy is imported before one is used, so that
`import lockstep` costs nothing.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import models
import pipeline
from pipeline import __version__

_LISTED = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    name.name: line.module
    for line in _LISTED.body
    if isinstance(line, ast.ImportFrom) and str(line.module).startswith(f"{pipeline.__name__}.")
    for name in line.names
}

__all__ = ["__version__", "models", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
