"""What came of a training, as its file must have it before a table is made of it."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, create_model

from lockstep.errors import LockstepError
from lockstep.tables.validation import validate
from pipeline.stage.artifacts import read_sealed

TRAINED = "train_seconds"  # simulated: of training and links
NUMBERS = ("rounds", "tokens", "parameters", "bytes_up", "bytes_down", "simulated_seconds")
KEPT = (*NUMBERS, "held_out_stderr", "held_out_rows")  # of train.json
CURVE_COLUMNS = ("tokens", "bytes_up", TRAINED)  # of a curve, beside the loss
Amount, Nats = Annotated[float, Field(ge=0, le=1e18)], Annotated[float, Field(ge=-1e9, le=1e9)]
RowCounts = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]
STRICT: Any = {"__config__": ConfigDict(strict=True), "loss": (Nats, ...)}
Measure: Any = create_model("Measure", **STRICT, **dict.fromkeys(CURVE_COLUMNS, (Amount, ...)))
Trained = create_model(
    "Trained",
    held_out_stderr=(Amount | None, ...),
    held_out_rows=(RowCounts, ...),
    held_out_seen=(Annotated[float, Field(ge=0, le=1)] | None, None),
    tokens_per_second=(Amount | None, ...),
    curve=(Annotated[list[Measure], Field(min_length=2)], ...),
    **STRICT,
    **dict.fromkeys((*NUMBERS, TRAINED, "peak_bytes"), (Amount, ...)),
)


def read(path: Path) -> dict[str, Any]:
    """Return a training's result as it was written; one that diverged has no loss."""
    content = read_sealed(path, path)
    if content.get("loss", 0) is not None:
        validate(Trained, content, str(path))
        for name in CURVE_COLUMNS:
            values = [measure[name] for measure in content["curve"]]
            if values != sorted(values) or values[-1] == 0:
                raise LockstepError(f"{path}: curve: {name} does not grow, expected it to")
    elif more := Trained.model_fields.keys() & content.keys() - {"loss"}:
        raise LockstepError(f"{path}: loss is null, expected a number beside {min(more)}")
    return content
