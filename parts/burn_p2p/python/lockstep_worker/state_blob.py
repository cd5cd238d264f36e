"""The state of an optimizer as bytes: a header of JSON, then the tensors. No pickle.

The same state gives the same bytes. Dicts, lists, tuples, numbers, texts, None, dtypes and tensors
come back as they were, keys of dicts in their order, and whatever else is in a state is refused.
"""

import json
import math
from typing import Any

import torch

MAGIC = b"lockstep-state-v1\n"
ENCODING = "lockstep-state-v1"


def encoded(state: Any) -> bytes:
    """The bytes of an optimizer's state.

    Raises:
        TypeError: something in it is of a type that cannot be written.
    """
    tensors: list[torch.Tensor] = []
    tree = _packed(state, tensors)
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in tensors]
    facts = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = json.dumps({"tree": tree, "tensors": facts}).encode()
    data = [part.view(torch.uint8).numpy().tobytes() for part in flat]
    return b"".join([MAGIC, len(header).to_bytes(8, "little"), header, *data])


def decoded(data: bytes) -> Any:
    """The optimizer's state of these bytes, its tensors on the CPU.

    Raises:
        ValueError: they are no state, or some are missing or left over.
    """
    start = len(MAGIC) + 8
    length = int.from_bytes(data[len(MAGIC) : start], "little")
    if not data.startswith(MAGIC) or len(data) < start + length:
        raise ValueError(
            f"state of an optimizer: {data[:18]!r}...; {MAGIC!r} and all of it expected"
        )
    header = json.loads(data[start : start + length])
    tensors, offset = [], start + length
    for name, shape in header["tensors"]:
        dtype = _dtype(name)
        end = offset + math.prod(shape) * dtype.itemsize
        if not offset <= end <= len(data):
            raise ValueError(f"state of an optimizer: {len(data)} bytes; {end} or more expected")
        tensor = torch.empty(shape, dtype=dtype)
        if end > offset:
            tensor = torch.frombuffer(bytearray(data[offset:end]), dtype=dtype).reshape(shape)
        tensors.append(tensor)
        offset = end
    if offset != len(data):
        raise ValueError(f"state of an optimizer: {len(data)} bytes; {offset} expected")
    return _unpacked(header["tree"], tensors)


def _dtype(name: str) -> torch.dtype:
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise ValueError(f"state of an optimizer: dtype {name!r}; one of torch's expected")
    return dtype


def _packed(value: Any, tensors: list) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        return {"dict": [[_packed(k, tensors), _packed(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(part, tensors) for part in value]}
    kind = type(value).__name__
    raise TypeError(
        f"state of an optimizer: {kind}; numbers, texts, tensors, lists, dicts expected"
    )


def _unpacked(tree: Any, tensors: list) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dtype":
        return _dtype(value)
    if kind == "dict":
        return {_unpacked(k, tensors): _unpacked(v, tensors) for k, v in value}
    parts = [_unpacked(part, tensors) for part in value]
    return parts if kind == "list" else tuple(parts)
