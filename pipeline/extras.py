"""Packages that only some runs need, and the command that installs missing ones."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from lockstep.errors import LockstepError

PROJECT = Path(__file__).resolve().parents[1]
PACKAGE = "lockstep-train"  # as pip knows it
# A module -> the extra of pyproject.toml that installs it.
EXTRAS = {
    "google.auth": "gcs",
    "lm_eval": "eval",
    "py_ecc": "beacon",
    "pyarrow": "parquet",
    "s3fs": "s3",
    "sentencepiece": "hf",
    "tensorboardX": "sinks",
    "transformers": "hf",
    "wandb": "sinks",
}


def is_installed(module: str) -> bool:
    """Return whether an extra's module can be imported, without importing it."""
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # of its parent; None in its place
        return False


def lacking(where: str, module: str) -> LockstepError:
    """Return the error for an extra's package that is not installed; `where` says what needs it."""
    return LockstepError(
        f"{where}: {module} is not installed, expected it: {install(EXTRAS[module])}"
    )


def required(where: str, module: str) -> ModuleType:
    """Import a module of an extra; `where` says what needs it.

    Raises:
      LockstepError: it is not installed; the line says how to install it.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise lacking(where, module) from error


def install(extra: str) -> str:
    """Return the command that installs an extra in the versions that Lockstep is tested with."""
    of_checkout = (PROJECT / "pyproject.toml").is_file()
    what = f".[{extra}]" if of_checkout else f"{PACKAGE}[{extra}]"
    pins = "constraints.txt" if of_checkout else PROJECT / "constraints.txt"
    return f"pip install -c {pins} {'-e ' if of_checkout else ''}'{what}'"
