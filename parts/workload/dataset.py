"""The data that a workload itself gives, for `data_location.Workload`."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from parts.workload.tables import DataWorkload, workload_of
from parts.workload.worker import NO_ROWS, Worker
from pipeline import runfile
from pipeline.sources.provider import Dataset


@contextmanager
def opened(run: runfile.Run) -> Iterator[Dataset | None]:
    """Yield what reads the dataset of the workload, or None where the run takes none of one."""
    location = run.llm.data_location
    if not (workload_of(run).factory and isinstance(location, DataWorkload)):
        yield None
        return
    with closing(Worker(run, NO_ROWS)) as worker:
        yield worker.dataset
