"""Requests to a worker and its answers: 8 bytes of length in big-endian order, then JSON.

Nothing is believed: a frame has a bound, JSON no constant that JSON does not have, an answer the id
of its request, and a hello the version and the types of burn_p2p's worker protocol.
"""

import json
import math
from typing import Annotated, Any, NoReturn

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError

from lockstep.errors import RequestError, StepError, brief
from lockstep.files import once
from lockstep.tables.table import AsTuple, Table

SHOWN = 400  # characters of what a worker says
MOST = 1000  # capabilities of a worker, and lines of its environment


class WorkerError(StepError):
    """A worker, or a command in its place, did not do its work."""


class WorkerDiedError(WorkerError):
    """A worker's process ended while it computed an answer: out of memory, say."""


class NoWorkerError(WorkerError, RequestError):
    """A worker did not start, so nothing is known about what it would compute."""


class MessageError(Exception):
    """The worker's answer is malformed or not the one expected; says what came and what was due."""


class RefusedError(Exception):
    """The worker answered with its own error. The text is its whole message, in many lines."""


def _as_text(value: Any) -> Any:
    """Return a table of plain values as one of texts."""
    if not isinstance(value, dict):
        return value
    plain = {key: part for key, part in value.items() if isinstance(part, str | int | float)}
    plain |= {key: "none" for key, part in value.items() if part is None}
    return {key: str(plain[key]) if key in plain else value[key] for key in value}


SaidText = Annotated[str, Field(max_length=SHOWN)]


class WorkerHello(Table):
    """A worker's answer to `hello`."""

    model_config = ConfigDict(extra="ignore")  # later workers say more

    protocol_version: Annotated[int, Field(ge=1, le=2)]
    """Version of the protocol."""
    workload_name: SaidText
    """The user's name of the workload."""
    capabilities: Annotated[
        frozenset[SaidText],
        Field(max_length=MOST),
        BeforeValidator(lambda found: frozenset(found) if _are_texts(found) else found),
    ]
    """What it can do beside the least."""
    environment: Annotated[
        dict[SaidText, SaidText], Field(max_length=MOST), BeforeValidator(_as_text)
    ] = {}
    """What decides bits: versions of packages, machine, device, threads."""
    files: Annotated[tuple[str, ...], Field(max_length=100 * MOST), AsTuple] = ()
    """Files of Python that it has imported from the folders of PYTHONPATH; ours alone says so."""


def _are_texts(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(part, str) for part in found)


def hello_of(result: dict) -> WorkerHello:
    """Return a checked hello.

    Raises:
      MessageError: it has another form or version.
    """
    try:
        return WorkerHello.model_validate(result)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        found = brief(repr(first["input"]), 80)
        raise MessageError(
            f"{brief(where)} is {found}, expected a hello of protocol 1 or 2: {first['msg']}"
        ) from None


def result_of(body: bytes, number: int) -> dict:
    """Return the result in the answer to request `number`.

    Raises:
      MessageError: it is no answer, or to another request.
      RefusedError: the worker says that it failed.
    """
    answer = plain_json(body)
    found = answer.get("id") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or "id" not in answer:
        raise MessageError(f"answered {_start(body)}, expected an object with id {number}")
    if type(found) is not int or found != number:
        raise MessageError(f"answered with id {brief(repr(found))}, expected {number}")
    if not isinstance(answer.get("ok"), bool):
        raise MessageError(f"ok is {brief(repr(answer.get('ok')))}, expected true or false")
    if not answer["ok"]:
        raise RefusedError(str(answer.get("error")))
    if not isinstance(answer.get("result"), dict):
        raise MessageError(f"result is {brief(repr(answer.get('result')))}, expected an object")
    return answer["result"]


def plain_json(text: bytes) -> Any:
    """Return the value of a JSON text of a stranger.

    Raises:
      MessageError: it is no JSON, or has a number that is not finite.
    """
    try:
        return json.loads(
            text.decode(),
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=once,
        )
    except (ValueError, RecursionError):  # bytes that are no UTF-8 too
        raise MessageError(f"answered {_start(text)}, expected JSON") from None


def _no_constant(name: str) -> NoReturn:
    raise MessageError(f'a bare {name}, expected JSON: a text such as "nan" in its place')


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise MessageError(f"the number {brief(text)}, expected one that a float64 can hold")
    return value


def _start(body: bytes) -> str:
    return brief(repr(body[:80].decode(errors="replace")))


def first_line(text: str) -> str:
    """Return the first line of an error that has words, harmless and bounded."""
    lines = (line.strip() for line in text.splitlines())
    return brief(next((line for line in lines if line), "no words"), SHOWN)
