"""MLflow: a run with the key as its tag, on a server or in files below `mlruns`."""

import os
from collections.abc import Iterator

from pipeline.monitor.sinks.sink import Scalars, TrackedRun

TAG = "lockstep.key"
MOST = 100  # parameters in one request, of MLflow's REST interface
# By itself, MLflow tells its makers of each use, and prints the address of each run.
QUIET = ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT")
FIRST = "loss/train"  # in every round where anybody trained


class MlflowSink:
    """Tells MLflow; a `Sink`.

    `MLFLOW_TRACKING_URI` names a server; without it, files are written, which need no server and no
    database. MLflow cannot forget a step: what a killed training had told beyond its checkpoint
    stays, and is not told again.
    """

    def open(self, run: TrackedRun) -> int:
        """Begin or resume the run, and return its last step."""
        for name in QUIET:
            os.environ.setdefault(name, "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            run.folder.mkdir(parents=True, exist_ok=True)
            uri = (run.folder / "mlruns").resolve().as_uri()
            # files are what every version of MLflow reads, and what a database would be made from
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else client.create_experiment(run.project)
        found = client.search_runs([number], f"tags.`{TAG}` = '{run.key}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            points = client.get_metric_history(self._id, FIRST)
            return max((point.step for point in points), default=-1)
        self._id = client.create_run(number, run_name=run.name).info.run_id
        params = [Param(name, value) for name, value in _flat(run.settings, "")]
        client.log_batch(self._id, tags=[RunTag(TAG, run.key)])
        for begin in range(0, len(params), MOST):
            client.log_batch(self._id, params=params[begin : begin + MOST])
        return -1

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Log the numbers in one request."""
        from mlflow.entities import Metric

        milliseconds = round(1000 * at)
        metrics = [Metric(name, value, milliseconds, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        """Say how the training ended."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    """The dotted name and the text of each value of a table."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif value is not None:
        yield name, str(value)
