"""Tensors of torch and NumPy alike: which of a model's travel, and hashes of them.

No torch is imported here unless the model has brought it.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from lockstep_torch import bits


def layout_hash(tensors: list[dict]) -> str:
    """The layout's hash: of names, shapes and dtypes of the tensors that travel, in order."""
    facts = [{**tensor, "numel": math.prod(tensor["shape"])} for tensor in tensors]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "torch-layout-" + hashlib.sha256(text.encode()).hexdigest()


def plain_filter(state_filter: dict | None) -> dict[str, list[str]]:
    """A filter of tensors with both its lists."""
    globs = state_filter or {}
    return {key: list(globs.get(key) or []) for key in ("include_globs", "exclude_globs")}


def allows(state_filter: dict | None, name: str) -> bool:
    """Return whether a filter includes a tensor's name: in `include_globs`, not excluded."""
    include, exclude = plain_filter(state_filter).values()
    if include and not any(fnmatchcase(name, glob) for glob in include):
        return False
    return not any(fnmatchcase(name, glob) for glob in exclude)


def is_float(tensor: Any) -> bool:
    """Return whether a tensor of torch or NumPy holds floats.

    Raises:
        TypeError: it holds complex numbers, which would lose their imaginary parts.
    """
    if "complex" in str(getattr(tensor, "dtype", "")):
        raise TypeError(f"a tensor of {tensor.dtype}; real numbers expected, two for each")
    if isinstance(tensor, np.ndarray):
        return tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16"
    return hasattr(tensor, "is_floating_point") and tensor.is_floating_point()


def dtype_name(tensor: Any) -> str:
    """A tensor's dtype as torch writes it."""
    return f"torch.{tensor.dtype.name}" if isinstance(tensor, np.ndarray) else str(tensor.dtype)


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 over tensors' names, dtypes, shapes and bytes, in this order."""
    sha256 = hashlib.sha256()
    for name, tensor in tensors:
        facts = [name, dtype_name(tensor), [int(size) for size in tensor.shape]]
        sha256.update(json.dumps(facts).encode() + b"\n")
        sha256.update(bits.raw(tensor))
    return sha256.hexdigest()
