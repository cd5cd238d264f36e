"""A round of peers, as a library: `simulate` for any JAX model, optimizers that exchange little.

`__init__.pyi` beside this lists its names. Nothing heavy is imported before one is used, so that
`import lockstep` costs nothing. Budget: 18,664 lines of Python.
"""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.3.0.dev0"

_LISTED = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_MODULES = {
    name.name: line.module
    for line in _LISTED.body
    if isinstance(line, ast.ImportFrom) and str(line.module).startswith(f"{__name__}.")
    for name in line.names
}

__all__ = ["__version__", "models", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "models":  # which lie beside this folder in a checkout, and in it once installed
        return import_module(f"{__name__}.models" if find_spec(f"{__name__}.models") else "models")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
