"""The result of one training of a comparison, in a file with its own SHA-256."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.tables.explain import validate
from lockstep.tables.table import AsTuple, Table
from pipeline.stage.artifacts import read_sealed, write_sealed

Whole = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Measure(Table):
    """A point of a training's curve: the held-out loss after so much of everything."""

    tokens: Whole
    bytes_up: Whole
    seconds: Finite
    loss: Finite


class Trained(Table):
    """A training that ended."""

    status: Literal["trained"]
    key: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    loss: Finite
    rounds: Whole
    tokens: Whole
    parameters: Whole
    bytes_up: Finite
    bytes_down: Finite
    simulated_seconds: Finite
    held_out_stderr: Finite | None
    held_out_rows: Annotated[tuple[Whole, Whole], AsTuple]
    params: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    peak_bytes: Whole
    tokens_per_second: Finite | None
    curve: Annotated[tuple[Measure, ...], Field(min_length=2), AsTuple]


class Diverged(Table):
    """A training whose loss went beyond all bounds, which is a result too."""

    status: Literal["diverged"]
    key: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    why: str
    loss: None


FORMS: dict[object, type[Trained | Diverged]] = {"trained": Trained, "diverged": Diverged}
KEPT = ("rounds", "tokens", "parameters", "bytes_up", "bytes_down", "simulated_seconds")
KEPT += ("held_out_stderr", "held_out_rows")  # of train.json


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, with its SHA-256."""
    write_sealed(path, result)


def read(path: Path) -> dict[str, Any]:
    """Return a result as it was written.

    Raises:
      LockstepError: It is missing, damaged, or not a training's.
    """
    content = read_sealed(path, path)
    form = FORMS.get(content.get("status"))
    if form is None:
        raise LockstepError(
            f"{path}: status is {content.get('status')!r}, expected {' or '.join(map(str, FORMS))}"
        )
    return validate(form, content, str(path)).model_dump(mode="json")


def whole(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield those results that can be read, for an estimate that any of them serves."""
    for path in paths:
        try:
            yield read(path)
        except LockstepError:  # of an older release
            continue
