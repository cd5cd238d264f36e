"""Requests to a peer's process and its answers, as lists of buffers: docs/reference/sidecar.md.

The first buffer is a header in JSON; each of the others is an array, raw. Nothing is unpickled,
and nothing is believed: a header has bounds, and an array the length that its shape says. No JAX
here: a process reads its first request before it knows how many threads JAX may have.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
from pydantic import AfterValidator, Field, ValidationError

from lockstep.errors import brief
from lockstep.tables.table import AsTuple, Table, wrong
from lockstep.wire.spool import Buffer

PROTOCOL_VERSION = 2
REQUEST_HEADER_BYTES = 2**22  # the largest header of a request, which has the run file
ANSWER_HEADER_BYTES = 2**20  # ... of an answer
ARRAYS = 4096  # the most in an answer: a tree has some tens of leaves
ELEMENTS = 2**48  # the most in an array, zeros in its shape not counted

ProcessName = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class FrameError(Exception):
    """Buffers that are no request or answer, or not the one that was expected."""


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(max(1, size) for size in shape) > ELEMENTS:  # NumPy refuses it, even if empty
        raise wrong((), f"at most {ELEMENTS} elements")
    return shape


class Described(Table):
    """Dtype and shape of an array."""

    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8",
        "uint64", "uint32", "uint16", "uint8", "bool",
    ]  # fmt: skip
    shape: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...],
        Field(max_length=16),
        AfterValidator(_bounded),
        AsTuple,
    ]


class RequestHeader(Table):
    """The header of a request."""

    version: Literal[2] = PROTOCOL_VERSION
    """Version of the protocol."""
    trainer: ProcessName
    """Random name of the trainer's process."""
    number: Annotated[int, Field(ge=0)]
    """Counts the trainer's requests; the answer repeats it."""
    operation: str
    """Name of the operation to do."""
    gang: Annotated[str, Field(max_length=300)] = ""
    """Where the first of a peer's several processes coordinates them, host:port."""
    values: dict[str, Any] = {}
    """Arguments that are no arrays."""
    arrays: Annotated[tuple[Described, ...], AsTuple] = ()
    """The arrays that follow."""


class AnswerHeader(Table):
    """The header of an answer, or of what a process says unasked: `hello` and `leave`."""

    version: Literal[2] = PROTOCOL_VERSION
    """Version of the protocol."""
    number: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Number of the request that it answers; null unasked."""
    process: ProcessName
    """Random name of the process: one that was started again has another."""
    says: Literal["done", "hello", "leave"] = "done"
    """That a request is done, or what the process says unasked."""
    error: Annotated[str, Field(max_length=2000)] | None = None
    """Why the request failed, in one line."""
    values: dict[str, Any] = {}
    """Results that are no arrays."""
    arrays: Annotated[tuple[Described, ...], Field(max_length=ARRAYS), AsTuple] = ()
    """The arrays that follow."""


AnyHeader = TypeVar("AnyHeader", RequestHeader, AnswerHeader)


def encode(header: RequestHeader | AnswerHeader, arrays: Sequence[np.ndarray] = ()) -> list[Buffer]:
    """Return a header and arrays as buffers; arrays are not copied."""
    described = tuple(Described(dtype=x.dtype.name, shape=x.shape) for x in arrays)
    text = header.model_copy(update={"arrays": described}).model_dump_json()
    return [text.encode(), *(_raw(x) for x in arrays)]


def decode(kind: type[AnyHeader], buffers: Sequence[Buffer]) -> tuple[AnyHeader, list[np.ndarray]]:
    """Return the header and arrays of some buffers; the arrays are views of them, read-only.

    Raises:
      FrameError: The buffers are not a header of this kind and its arrays.
    """
    most = REQUEST_HEADER_BYTES if kind is RequestHeader else ANSWER_HEADER_BYTES
    if not buffers or len(buffers[0]) > most:
        raise FrameError(f"{len(buffers)} buffers, expected a header of at most {most} bytes")
    try:
        header = kind.model_validate_json(bytes(buffers[0]))
    except ValidationError as error:
        raise FrameError(f"{_first(error)}, expected a header") from None
    if len(buffers) - 1 != len(header.arrays):
        raise FrameError(f"{len(buffers) - 1} arrays, expected {len(header.arrays)}")
    return header, [_array(x, b) for x, b in zip(header.arrays, buffers[1:], strict=True)]


AnyValues = TypeVar("AnyValues", bound=Table)


def checked(kind: type[AnyValues], values: dict[str, Any], name: str) -> AnyValues:
    """Return the values of a header as a table.

    Raises:
      FrameError: They are not those of the table; `name` completes "expected ...".
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise FrameError(f"{_first(error)}, expected {name}") from None


def _first(error: ValidationError) -> str:
    """The first thing that is wrong: where, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = brief(".".join(map(str, first["loc"])))
    return f"{where}: {brief(first['msg'])}" if where else brief(first["msg"])


def _raw(x: np.ndarray) -> Buffer:
    x = np.ascontiguousarray(x)
    return memoryview(x.reshape(-1).view(np.uint8)) if x.size else b""


def _array(described: Described, buffer: Buffer) -> np.ndarray:
    dtype = np.dtype(described.dtype)
    expected = dtype.itemsize * int(np.prod(described.shape, dtype=object))
    if len(buffer) != expected:
        raise FrameError(
            f"{len(buffer)} bytes, expected {expected} of {described.dtype}{[*described.shape]}"
        )
    return np.frombuffer(buffer, dtype).reshape(described.shape)
