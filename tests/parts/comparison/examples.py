"""A comparison, results and rows of its table, for tests."""

from lockstep.tables.validation import validate
from parts.comparison.compare_file import Compare
from parts.comparison.results_table import Row
from parts.comparison.search import Found
from parts.comparison.training_result import KEPT, TRAINED
from pipeline import runfile
from pipeline.stage.keys import PROJECT

BASE = runfile.load(PROJECT / "params/run.toml")
PLAIN = {"recipe": "adamw", "search": {"rate": 1e-3}}
LIAR = {"kind": "scale_up", "peer": 1, "start": 0.5, "size": 4.0}


def compared(**changes: object) -> Compare:
    methods = {"a": PLAIN}
    given = {"base": "params/run.toml", "tokens": 819_200, "seeds": [3, 4], "methods": methods}
    given["tuning"] = {"seed": 9, "trainings": 2}
    return validate(Compare, given | changes, "compare.toml")


def made(*losses: float | None, bytes_up: int = 10, seconds: float = 1.0) -> tuple[dict, ...]:
    """Results of seeds: a curve from 9 nats down to each loss, in two measures."""
    return tuple(
        {"key": "k", "loss": None}
        if loss is None
        else {
            **dict.fromkeys(KEPT, 100),
            "held_out_stderr": 0.125,
            "held_out_rows": [64, 640],
            "held_out_seen": 0.002,
            "key": "k",
            "loss": loss,
            TRAINED: 100.0,
            "tokens_per_second": 10.0,
            "peak_bytes": 10,
            "curve": [
                {"tokens": 100 * i, "bytes_up": bytes_up * i, TRAINED: seconds * i, "loss": at}
                for i, at in enumerate((9.0, loss + 1, loss))
            ],
        }
        for loss in losses
    )


def row(name: str, *losses: float | None, bytes_up: int = 10) -> Row:
    return Row(name, name, "none", 1, Found({"rate": 1e-3}), made(*losses, bytes_up=bytes_up))
