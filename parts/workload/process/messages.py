"""Requests to a worker and its answers: 8 bytes of length in big-endian order, then JSON.

Nothing is believed: a frame has a bound, JSON no constant that JSON does not have, an answer the id
of its request, a hello the version and the types of burn_p2p's worker protocol, and a result what
the table of its kind says, by type and by range.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lockstep.errors import LockstepError, RequestError, StepError, UnfinishedError, brief
from lockstep.files import loads
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.untrusted_values import Metrics, SaidNumber, SaidNumbers, SaidPath
from lockstep.tables.validation import validate
from pipeline.tokens.rows import ARRAY_NAME

SHOWN = 400  # characters of what a worker says
MOST = 1000  # capabilities of a worker, and lines of its environment


class WorkerError(StepError):
    """A worker, or a command in its place, did not do its work."""


class WorkerDiedError(WorkerError, UnfinishedError):
    """A worker's process ended while it computed an answer: out of memory, say."""


class NoWorkerError(WorkerError, RequestError):
    """No worker started, so nothing is known about what it would compute."""


class RefusedError(Exception):
    """The worker answered with its own error message, whose text is whole, in many lines."""


def _as_text(value: Any) -> Any:
    """Return a worker's table of plain values as one of texts."""
    if not isinstance(value, dict):
        return value
    plain = {key: part for key, part in value.items() if isinstance(part, str | int | float)}
    plain |= {key: "none" for key, part in value.items() if part is None}
    return {key: str(plain[key]) if key in plain else value[key] for key in value}


SaidText = Annotated[str, Field(max_length=SHOWN)]


class WorkerHello(Table, extra="ignore"):  # later workers say more
    """A worker's answer to `hello`."""

    protocol_version: Annotated[int, Field(ge=1, le=2)]
    """Version of the protocol."""
    workload_name: SaidText
    """The user's name of the workload."""
    capabilities: Annotated[tuple[SaidText, ...], Field(max_length=MOST), AsTuple]
    """What it can do beside the least."""
    environment: Annotated[
        dict[SaidText, SaidText], Field(max_length=MOST), BeforeValidator(_as_text)
    ] = {}
    """What decides bits: versions of packages, machine, device, threads."""
    files: Annotated[tuple[SaidPath, ...], Field(max_length=100 * MOST), AsTuple] = ()
    """Files of Python that it has imported from the folders of PYTHONPATH; ours alone says so."""


class WorkerAnswer(Table, extra="ignore"):
    """A worker's answer to a message that asks for something."""

    id: int
    """Number of the request."""
    ok: bool
    """Whether it did what was asked."""
    result: dict[str, Any] | None = None
    error: Any = None


class NamedArray(Table, extra="ignore"):
    """One of a workload's arrays in a worker's message, which is in NAME.npy."""

    name: Annotated[str, Field(pattern=ARRAY_NAME)]


class WorkerResult(Table, extra="ignore", arbitrary_types_allowed=True):
    """What a worker's results hold, by key, whatever the method; null: not finite."""

    runtime_device: str = ""
    model_id: str = ""
    loss: SaidNumber | None = None
    losses: Annotated[tuple[SaidNumber | None, ...], AsTuple] = ()
    counts: Annotated[tuple[Annotated[SaidNumber, Field(ge=0)], ...], AsTuple] = ()
    metrics: Metrics = {}
    values: dict[SaidText, SaidNumbers] = {}
    arrays: Annotated[tuple[NamedArray, ...], AsTuple] = ()


def result_of(body: bytes, number: int) -> dict:
    """Return the result in a worker's answer to request `number`.

    Raises:
      LockstepError: It is no answer, or to another request.
      RefusedError: The worker says that it failed.
    """
    try:
        data = loads(body.decode())
    except (ValueError, RecursionError) as error:  # bytes that are no UTF-8 too
        excerpt = brief(repr(body[:80].decode(errors="replace")))
        raise LockstepError(f"answered {excerpt}, expected JSON: {brief(str(error))}") from None
    answer = validate(WorkerAnswer, data, "its answer")
    if answer.id != number:
        raise LockstepError(f"answered with id {answer.id}, expected {number}")
    if not answer.ok:
        raise RefusedError(str(answer.error))
    if answer.result is None:
        raise LockstepError("its answer has no result, expected a table")
    return answer.result


def first_line(text: str) -> str:
    """Return the first line of a worker's error that has words, harmless and bounded."""
    lines = (line.strip() for line in text.splitlines())
    return brief(next((line for line in lines if line), "no words"), SHOWN)
