"""The data that a workload itself gives, for `data_location.Workload`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import numpy as np

from parts.workload.worker import NO_ROWS, Worker
from pipeline import runfile

Dataset = Callable[[], Mapping[str, Mapping[str, np.ndarray]]]
"""dataset() -> arrays [N, ...] by split and name."""


@contextmanager
def opened(run: runfile.Run) -> Iterator[Dataset | None]:
    """Yield what reads the workload's data, or None where the run has no workload."""
    if not run.workload.factory:
        yield None
        return
    with closing(Worker(run, NO_ROWS)) as worker:
        yield worker.dataset
