"""The operations of a peer's process: a table of what each takes and of what it gives.

Both ends use `OPERATIONS`: the trainer builds a request from its table, and the process reads the
request's header by the same one before it does anything; answers go the other way. The page
docs/reference/sidecar.md is generated from it. A tree travels as arrays, its leaves in JAX's order,
and so does a number that may be NaN, since JSON has none. No JAX here, nor anything that computes:
a process that computes with another library needs this file, frames.py and peer_process.py.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from lockstep.errors import brief
from lockstep.protocol.dispute import Hash
from lockstep.tables.table import U64, AsTuple, Table
from parts.carrier.frames import Buffer, FrameError, RequestHeader, checked, encode

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
NaturalInt = Annotated[int, Field(ge=0, lt=2**31)]
NaturalInts = Annotated[tuple[NaturalInt, ...], AsTuple]
ShortName = Annotated[str, Field(max_length=64)]
ShortText = Annotated[str, Field(max_length=1000)]
KeysOfTable = Annotated[dict[ShortName, Any], Field(max_length=64)]  # of a run file


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
    """Values that `create` gives."""

    environment: Annotated[dict[ShortName, ShortText], Field(max_length=64)]
    """Everything about the machine that can change bits."""


class GetHyperparameters(Table):
    """Give the hyperparameters that the process has read from the run file."""


class Hyperparameters(Table):
    """Values that `hyperparameters` gives."""

    optimizer: KeysOfTable
    """`[model.LLM] optimizer`."""
    lr_schedule: KeysOfTable
    """`[model.LLM] lr_schedule`."""
    inner_steps: PositiveInt
    """Local steps of a round."""
    wire: Literal["lockstep", "psyche"]
    """Layout of messages."""


class Compile(Table):
    """Compile the peer's step for rows of this shape; no state changes."""

    imprecise: bool
    """Whether to compile the step that `train` takes with `imprecise`."""


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
    imprecise: bool
    """Whether to compute in another precision than the run's, for a fault."""
    keep: bool
    """Whether to give the peer's own state after the step."""
    hash: bool
    """Whether to give the hash of that state, and to hold the one before the step for `extract`."""


class Optimize(Table):
    """Apply the messages that the round decided on."""

    step: PositiveInt
    """The round, from 1."""
    peers: NaturalInts
    """The peers whose messages these are, in this order."""
    sequences: NaturalInts
    """Number of sequences that each of them was assigned, its weight."""
    ages: NaturalInts
    """Age of each message, in versions of its fragment; 0 is of this round."""


class Optimized(Table):
    """Values that `optimize` gives."""

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
    """Values that operations give which change or copy a tree."""

    hash: Hash | None
    """Hash of that tree; null where it was not asked for."""


class Nothing(Table):
    """No values."""


class Hello(Table):
    """Values of `hello`, which a process says unasked."""

    peer: U64 = 0
    """Number of its peer; the trainer trusts the key of the connection instead."""
    pid: U64 = 0
    """Process id on its host."""
    gang: Annotated[str, Field(max_length=300)] = ""
    """Where it can coordinate the processes of its peer, host:port."""


class Operation(NamedTuple):
    """Contract of an operation.

    Attributes:
      takes: Table of its arguments.
      arrays: The arrays of a request, in their order.
      gives: Table of the answer's values.
      answered: The arrays of an answer, in their order.
    """

    takes: type[Table]
    arrays: tuple[str, ...] = ()
    gives: type[Table] = Nothing
    answered: tuple[str, ...] = ()


OPERATIONS = {
    "create": Operation(Create, ("params", "shared state"), Created),
    "hyperparameters": Operation(GetHyperparameters, (), Hyperparameters),
    "compile": Operation(Compile, ("rows [M, B, W]",)),
    "align": Operation(Align, (), Hashed),
    "train": Operation(
        Train, ("rows [M, B, W]",), Hashed, ("loss", "message", "own state with `keep`")
    ),
    "optimize": Operation(Optimize, ("a message of each of `peers`",), Optimized),
    "extract": Operation(Extract, (), Hashed, ("the tree without `hash`",)),
    "restore": Operation(Restore, ("own state, or nothing for a new one",)),
    "recompute": Operation(
        Recompute, ("own state of any peer", "rows [M, B, W]"), Hashed, ("message",)
    ),
    "forward": Operation(Forward, ("rows [B, W]",), Nothing, ("losses [B]",)),
    "exit": Operation(Exit),
}
NAME_OF = {operation.takes: name for name, operation in OPERATIONS.items()}


class Asked(NamedTuple):
    """A request to a peer.

    values: Arguments, as the table that the operation takes. arrays: Its arrays.
    """

    values: Table
    arrays: Sequence[np.ndarray] = ()

    @property
    def operation(self) -> str:
        """The operation's name."""
        return NAME_OF[type(self.values)]

    @classmethod
    def read(cls, header: RequestHeader, arrays: Sequence[np.ndarray]) -> "Asked":
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
    """Result of an operation.

    values: Values of the answer, as the table that the operation gives. arrays: Its arrays.
    """

    values: Table = Nothing()
    arrays: Sequence[np.ndarray] = ()
