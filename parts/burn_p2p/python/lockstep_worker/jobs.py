"""An inner loop's job: the rows of each step, and where its state goes.

A job's batches name files of NumPy, int32 rows [n, W] each, with `rows.json` beside them, which
says what the words are. Step `i` takes file `i`, and after the last the first again. Where rows are
files of the user, which have no such ending, each batch is a step and names them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from . import rows


def files_of(batches: list[dict]) -> list[str]:
    """The files of rows of a job's batches, in order."""
    paths = [str(path) for batch in batches for path in batch.get("shard_paths", ())]
    return [path for path in paths if path.endswith(".npy")]


def step_rows(job: dict, step: int) -> Any:
    """The decoded rows of a job's step; of files their paths.

    Raises:
        ValueError: the job has no rows.
    """
    if files := files_of(job["batches"]):
        path = Path(files[step % len(files)])
        spec = json.loads(path.with_name("rows.json").read_text(encoding="utf-8"))
        return rows.decoded(np.load(path, allow_pickle=False), spec)
    steps = [paths for batch in job["batches"] if (paths := batch.get("shard_paths"))]
    if not steps:
        raise ValueError(f"job: no shard_paths in {len(job['batches'])} batches")
    return steps[step % len(steps)]


def state_path(job: dict) -> Path:
    """Return where an optimizer's state goes: beside the pack that the loop writes."""
    path = Path(job["output_parameter_pack_path"])
    return path.with_name(f"{path.name}.state")


def given_state(job: dict) -> bytes | None:
    """The optimizer's state that the loop before this job left, if there was one."""
    path = job.get("inner_optimizer_state_path")
    return None if path is None else Path(path).read_bytes()


class Rates:
    """The learning rates of a job's optimizer by group, each its own times the run's schedule.

    Made before an earlier state is loaded, which has the rates of the last step.
    """

    def __init__(self, optimizer: Any, job: dict):
        self.groups = lambda: optimizer.param_groups  # new ones once a state is loaded
        self.own = [group["lr"] for group in optimizer.param_groups]
        self.factors = job.get("learning_rate_factors")  # a host of burn_p2p gives none

    def factor(self, step: int) -> float:
        """Return what scales the learning rates of a step of the job, counted from 0."""
        return 1.0 if self.factors is None else self.factors[min(step, len(self.factors) - 1)]

    def scale(self, factor: float) -> None:
        """Set each group's own learning rate in the job times a factor."""
        for group, own in zip(self.groups(), self.own, strict=True):
            group["lr"] = own * factor
