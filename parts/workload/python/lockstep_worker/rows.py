"""Turns rows of 4-byte words into what the user's code gets: tokens, arrays, or paths."""

import math
import os
from typing import Any

import numpy as np


def decoded(rows: np.ndarray, spec: dict) -> Any:
    """Return what the user's code gets for rows of words.

    Args:
        rows: int32 [N, W].
        spec: the kind `tokens`, `arrays` or `files`, and what belongs to it.

    Returns:
        int64 tokens [N, T], or several such by column's name; arrays [N, ...] by name; N paths.
    """
    words = np.ascontiguousarray(rows, np.int32)
    width = row_width(spec)
    if words.ndim != 2 or words.shape[1] != width:
        raise ValueError(f"rows of {words.shape[1:]} words; {width} expected by their kind")
    if spec["kind"] == "tokens":
        columns, length = spec["columns"], spec["length"]
        parts = {
            name: words[:, i * length : (i + 1) * length].astype(np.int64)
            for i, name in enumerate(columns)
        }
        return parts["inputs"] if columns == ["inputs"] else parts
    if spec["kind"] == "files":
        return [os.path.join(spec["folder"], row.astype("<i4").tobytes().hex()) for row in words]
    data, offset, arrays = words.view(np.uint8), 0, {}
    for array in spec["arrays"]:
        size = _bytes_of(array)
        piece = np.ascontiguousarray(data[:, offset : offset + size]).view(array["dtype"])
        arrays[array["name"]] = piece.reshape(len(words), *array["shape"])
        offset += -(-size // 4) * 4
    return arrays


def row_width(spec: dict) -> int:
    """Return the number of 4-byte words in a row."""
    if spec["kind"] == "tokens":
        return len(spec["columns"]) * spec["length"]
    if spec["kind"] == "arrays":
        return sum(-(-_bytes_of(array) // 4) for array in spec["arrays"])
    if spec["kind"] == "files":
        return 8
    raise ValueError(f"rows of kind {spec['kind']!r}; tokens, arrays or files expected")


def _bytes_of(array: dict) -> int:
    return np.dtype(array["dtype"]).itemsize * math.prod(array["shape"])


def cut(rows: Any, start: int, stop: int) -> Any:
    """Return some of the decoded rows for the user's code."""
    if isinstance(rows, dict):
        return {name: values[start:stop] for name, values in rows.items()}
    return rows[start:stop]
