"""Requests to a peer's process and its answers: what each operation takes and gives, and the bytes.

A message is a list of buffers: a header in JSON, then an array in each, raw. Nothing is unpickled,
and nothing is believed: a header has bounds, and an array the length that its shape says. A tree
travels as arrays, its leaves in JAX's order, and so does a number that may be NaN, since JSON has
none. Both ends use `OPERATIONS`; docs/reference/sidecar.md is generated from it.

No JAX here: a process reads its first request before it knows how many threads JAX may have.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401  (NumPy learns bfloat16)
import numpy as np
from pydantic import Field, ValidationError

from lockstep.errors import brief
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import U64, AsTuple, Table
from lockstep.tables.untrusted_values import Shape
from lockstep.wire.spool import Buffer

PROTOCOL_VERSION = 2
REQUEST_HEADER_BYTES = 2**22  # the largest header of a request, which has the run file
ANSWER_HEADER_BYTES = 2**20  # ... of an answer
MOST_ARRAYS = 4096  # the most in an answer: a tree has some tens of leaves

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
NaturalInt = Annotated[int, Field(ge=0, lt=2**31)]
NaturalInts = Annotated[tuple[NaturalInt, ...], AsTuple]
ShortName = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=1000)]

ProcessName = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class FrameError(Exception):
    """Buffers that are no request or answer, or not the expected one."""


class ArraySpec(Table):
    """Dtype and shape of an array in a request or answer."""

    dtype: Literal[
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8",
        "uint64", "uint32", "uint16", "uint8", "bool",
    ]  # fmt: skip
    shape: Shape


class RequestHeader(Table):
    """The header of a request to a peer's process."""

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
    arrays: Annotated[tuple[ArraySpec, ...], AsTuple] = ()
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
    arrays: Annotated[tuple[ArraySpec, ...], Field(max_length=MOST_ARRAYS), AsTuple] = ()
    """The arrays that follow."""


AnyHeader = TypeVar("AnyHeader", RequestHeader, AnswerHeader)


def encode(header: RequestHeader | AnswerHeader, arrays: Sequence[np.ndarray] = ()) -> list[Buffer]:
    """Return a request's header and arrays as buffers; arrays are not copied."""
    specs = tuple(ArraySpec(dtype=x.dtype.name, shape=x.shape) for x in arrays)
    text = header.model_copy(update={"arrays": specs}).model_dump_json()
    return [text.encode(), *(_raw(x) for x in arrays)]


def decode(kind: type[AnyHeader], buffers: Sequence[Buffer]) -> tuple[AnyHeader, list[np.ndarray]]:
    """Return the request's header and arrays of some buffers; arrays are views, read-only."""
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
    """Return the values of a request's header as a table."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise FrameError(f"{_first(error)}, expected {name}") from None


def _first(error: ValidationError) -> str:
    """The first thing in a request or answer that is wrong: where, and what."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = brief(".".join(map(str, first["loc"])))
    return f"{where}: {brief(first['msg'])}" if where else brief(first["msg"])


def _raw(x: np.ndarray) -> Buffer:
    x = np.ascontiguousarray(x)
    return memoryview(x.reshape(-1).view(np.uint8)) if x.size else b""


def _array(spec: ArraySpec, buffer: Buffer) -> np.ndarray:
    dtype = np.dtype(spec.dtype)
    expected = dtype.itemsize * math.prod(spec.shape)
    if len(buffer) != expected:
        raise FrameError(f"{len(buffer)} bytes, expected {expected} of {spec.dtype}{[*spec.shape]}")
    return np.frombuffer(buffer, dtype).reshape(spec.shape)


# ---- Operations ----


class Create(Table):
    """Prepare the process for a run, and begin with the state that all peers have alike."""

    run: dict[str, Any]
    """Tables of the run file by which the process computes; no seed that draws whom peers check."""
    model: dict[str, Any]
    """The model's `config.json`."""
    first_step: NaturalInt
    """Rounds trained by the run that this one extends."""
    columns: Annotated[tuple[str, ...], AsTuple]
    """Columns of the data's rows."""


class Created(Table):
    """The result of `create`."""

    environment: Annotated[dict[ShortName, ShortText], Field(max_length=64)]
    """Everything about the machine that can change bits."""


class Compile(Table):
    """Compile the peer's step for rows of this shape; no state changes."""

    broken: NaturalInt | None
    """As of the step that `train` takes."""


class Align(Table):
    """Take up what the round before agreed on, as a peer without work in the round."""

    step: PositiveInt
    """The round, from 1."""
    hash: bool
    """Whether to give the hash of its state."""


class Train(Table):
    """Take the peer's step, a micro-batch after the other, so that gradients accumulate."""

    step: PositiveInt
    """The round, from 1."""
    count: NaturalInt
    """Number of real rows; the others are padding."""
    broken: NaturalInt | None
    """For a fault: 0 computes in another precision, n with a bit flipped in the n-th product."""
    keep: bool
    """Whether to give the peer's own state after the step."""
    hash: bool
    """Whether to give the hash of that state, and to hold the one before the step for `extract`."""


class Optimize(Table):
    """Apply the messages that the round decided on."""

    step: PositiveInt
    """The round, from 1."""
    peers: NaturalInts
    """Whose messages these are, in this order; plus 10,000 for each version that one is old."""
    sequences: NaturalInts
    """Number of sequences that each of them was assigned, its weight."""


class Optimized(Table):
    """The result of `optimize`."""

    params: Hash
    """Hash of the params after it."""


class Extract(Table):
    """Give a copy of a tree, or its hash."""

    what: Literal["params", "shared", "own", "before", "new"]
    """Params, the optimizer's shared state, the peer's own, that before its step, or a new one."""
    hash: bool
    """Whether to give its hash instead."""


class Restore(Table):
    """Take over a state of the peer's own, or a new one."""


class Recompute(Table):
    """Recompute any peer's step, as a verifier; the process's own state stays as it is."""

    step: PositiveInt
    """The round, from 1."""
    count: NaturalInt
    """Number of real rows; the others are padding."""


class Forward(Table):
    """Measure rows at the params that all peers have alike."""


class Exit(Table):
    """End the process, which gives no answer."""


class Hashed(Table):
    """The result of operations that change or copy a tree."""

    hash: Hash | None
    """Hash of that tree; null where it was not asked for."""


class NoValues(Table):
    """No values."""


class Hello(Table):
    """The content of `hello`, which a process sends first."""

    peer: U64 = 0
    """Number of its peer; the trainer trusts the key of the connection instead."""
    pid: U64 = 0
    """Process id on its host."""
    gang: Annotated[str, Field(max_length=300)] = ""
    """Where it can coordinate the processes of its peer, host:port."""


class Operation(NamedTuple):
    """What an operation takes and gives; arrays in their order."""

    takes: type[Table]
    arrays: tuple[str, ...] = ()  # of a request
    gives: type[Table] = NoValues
    answered: tuple[str, ...] = ()  # arrays of an answer


OPERATIONS = {
    "create": Operation(
        Create, ("params", "shared state", "rows to count, where losses need some"), Created
    ),
    "compile": Operation(Compile, ("rows [M, B, W]",)),
    "align": Operation(Align, (), Hashed),
    "train": Operation(
        Train, ("rows [M, B, W]",), Hashed, ("loss", "message", "own state with `keep`")
    ),
    "optimize": Operation(Optimize, ("a message of each of `peers`",), Optimized),
    "extract": Operation(Extract, (), Hashed, ("the tree without `hash`",)),
    "restore": Operation(Restore, ("own state, or nothing for a new one",)),
    "recompute": Operation(Recompute, ("own state", "rows [M, B, W]"), Hashed, ("message",)),
    "forward": Operation(Forward, ("rows [B, W]",), NoValues, ("losses [B]",)),
    "exit": Operation(Exit),
}
NAME_OF = {operation.takes: name for name, operation in OPERATIONS.items()}


class PeerRequest(NamedTuple):
    """A request to a peer."""

    values: Table  # as the operation takes it
    arrays: Sequence[np.ndarray] = ()

    @property
    def operation(self) -> str:
        """The name of the requested operation."""
        return NAME_OF[type(self.values)]

    @classmethod
    def read(cls, header: RequestHeader, arrays: Sequence[np.ndarray]) -> "PeerRequest":
        """Return the request that has such a header.

        Raises:
          FrameError: The operation is unknown, or an argument is wrong.
        """
        name = header.operation
        if name not in OPERATIONS:
            raise FrameError(f"operation {brief(repr(name))}, expected one of {[*OPERATIONS]}")
        return cls(checked(OPERATIONS[name].takes, header.values, f"what {name} takes"), arrays)

    def buffers(self, trainer: str, number: int, gang: str = "") -> list[Buffer]:
        """Return the request as buffers; the arguments are fields of `RequestHeader`."""
        header = RequestHeader(
            trainer=trainer,
            number=number,
            operation=self.operation,
            gang=gang,
            values=self.values.model_dump(mode="json"),
        )
        return encode(header, self.arrays)


class Outcome(NamedTuple):
    """The result of a requested operation."""

    values: Table = NoValues()  # as the operation gives it
    arrays: Sequence[np.ndarray] = ()
