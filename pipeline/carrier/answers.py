"""What each operation of a peer's process answers: it fills that in, and the trainer checks it.

`ANSWERS` has the values in the answer's header; the arrays after it are the leaves of trees whose
shapes the trainer knows. Numbers that may be NaN are arrays, since JSON has none.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.protocol.dispute import Hash
from pipeline.runfile.table import U64, Table

Name = Annotated[str, Field(max_length=64)]
Line = Annotated[str, Field(max_length=1000)]
Settings = Annotated[dict[Name, Any], Field(max_length=64)]  # of a run file's table


class Hello(Table):
    """What a process says of itself, unasked."""

    peer: U64 = 0
    """Its peer; the trainer goes by the name of the connection."""
    pid: U64 = 0
    """Its number on its host."""
    gang: Annotated[str, Field(max_length=300)] = ""
    """Where it can coordinate the processes of its peer, host:port."""


class Nothing(Table):
    """No values."""


class Created(Table):
    """Of `create`."""

    environment: Annotated[dict[Name, Line], Field(max_length=64)]
    """Everything about the machine that can change bits."""


class Hyperparameters(Table):
    """Of `hyperparameters`."""

    optimizer: Settings
    """`[model.LLM] optimizer`."""
    lr_schedule: Settings
    """`[model.LLM] lr_schedule`."""
    inner_steps: Annotated[int, Field(ge=1, lt=2**31)]
    """Local steps of a round."""
    wire: Literal["lockstep", "psyche"]
    """Layout of messages."""


class Hashed(Table):
    """Of `align`, `train` and `extract`, which are asked for it or not, and of `recompute`."""

    hash: Hash | None
    """Hash of the peer's own state after the step, or of the tree; null if nobody asked for it."""


class Optimized(Table):
    """Of `optimize`."""

    params: Hash
    """Hash of the params after it."""


ANSWERS: dict[str, type[Table]] = {
    "create": Created,
    "hyperparameters": Hyperparameters,
    "compile": Nothing,
    "align": Hashed,
    "train": Hashed,
    "optimize": Optimized,
    "extract": Hashed,
    "restore": Nothing,
    "recompute": Hashed,
    "forward": Nothing,
}
