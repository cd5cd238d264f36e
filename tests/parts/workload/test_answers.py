"""Every value of every answer, changed to what it cannot be: the peer ends in one line."""

import json
from contextlib import closing

import numpy as np
import pytest

from lockstep.errors import StepError
from parts.workload import inner_steps
from parts.workload.process import worker_process
from parts.workload.worker import Worker
from tests.errors import refused
from tests.parts.workload.test_strange_workloads import ROW, ROWS, inner, job, run_of

pytestmark = pytest.mark.usefixtures("source", "quick_workers")
BAD = [-1, 2**63, 2**64 - 1, 1e300, True, "5", None, [], 1.5, "a\0b", {}]
PARAMS = {"w": np.zeros(3, np.float32)}


def places(value, path=()):
    """The path to each plain value in an answer, and to each list."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from places(part, (*path, key))
    elif isinstance(value, list) and value:
        yield path
        yield from places(value[0], (*path, 0))
    else:
        yield path


def changed(value, path, bad):
    """A copy of an answer with something else at a place."""
    if not path:
        return bad
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = changed(value[path[0]], path[1:], bad)
    return copy


@pytest.fixture
def forged(monkeypatch):
    """A dict of methods whose answers are exchanged, and one of those that were given."""
    result_of, call = worker_process.messages.result_of, worker_process.WorkerProcess._call
    asked, forged, given = [], {}, {}

    def note(self, method, params, seconds):
        asked.append(method)
        return call(self, method, params, seconds)

    def exchanged(body, number):
        method = asked[-1]
        given.setdefault(method, json.loads(body).get("result"))
        if method in forged:
            body = json.dumps({"id": number, "ok": True, "result": forged[method]}).encode()
        return result_of(body, number)

    monkeypatch.setattr(worker_process.WorkerProcess, "_call", note)
    monkeypatch.setattr(worker_process.messages, "result_of", exchanged)
    return forged, given


def work_of(worker):
    """What is asked of a worker, by method: of one with gradients, or of one with packs alone."""
    if worker.run.workload.inner == "gradient":
        return {
            "begin": lambda: worker.ask(lambda s: worker._described(s.process, s.asked)),
            "gradient": lambda: worker.gradient(PARAMS, ROW, 0),
            "measure": lambda: worker.measure(PARAMS, ROW),
            "evaluate_params": lambda: worker.evaluate(PARAMS, "train"),
            "dataset": worker.dataset,
        }
    return {
        "parameter_pack_plan": lambda: worker.ask(
            lambda s: worker._planned(s.process, s.device, s.asked)
        ),
        "init_model": worker.init,
        "evaluate": lambda: worker.evaluate(PARAMS, "train"),
        "import_parameter_pack": lambda: worker.evaluate(PARAMS, "train"),
        "run_inner_loop": lambda: inner_steps.take(worker, job()),
    }


def line_of(ask):
    """Return an error's line, "" without one; raise what does not end a peer."""
    try:
        ask()
    except StepError as error:
        line = str(error)
        assert line.startswith("workload strange:") and len(line.splitlines()) == 1
        return line
    return ""


@pytest.fixture(params=["strange:WithData", "strange:Inner"])
def worker(request, tmp_path, monkeypatch):
    """A worker that goes on after a wrong answer, so that many can be tried."""
    monkeypatch.chdir(tmp_path)  # a run that was made here before has a model to begin with
    one = inner(tmp_path, workload__factory=request.param)
    if request.param == "strange:WithData":
        one = Worker(run_of(tmp_path, workload__factory=request.param), ROWS)
    with monkeypatch.context() as patch:
        one.expected = one.describe()
        patch.setattr(one, "_end", lambda: None)
        yield one
    one.close()


def test_each_value_of_an_answer_is_what_it_says_or_a_peer_ends_in_a_line(worker, forged):
    answers, given = forged
    for method, work in work_of(worker).items():
        work()
        tried = [(path, bad) for path in places(given[method]) for bad in BAD]
        lines = []
        for path, bad in tried:
            answers[method] = changed(given[method], path, bad)
            lines.append(line_of(work))
        answers.pop(method)
        work()
        assert any(lines), method
        if method == "gradient":
            numbers = [bad is None or type(bad) in (int, float) for bad in BAD]
            fine = [is_number and bad != 1e300 for is_number, bad in zip(numbers, BAD, strict=True)]
            assert [line == "" for line in lines] == fine


def test_a_file_that_is_no_array_is_one_line(tmp_path, forged):
    forged[0]["dataset"] = {"arrays": [{"name": "x"}]}
    with closing(Worker(run_of(tmp_path, workload__factory="strange:WithData"), ROWS)) as worker:
        folder = worker.ask(lambda session: session.process.folder) / "dataset-train"
        folder.mkdir()
        (folder / "x.npy").write_bytes(b"no array")
        with refused("workload strange:WithData: dataset: x.npy"):
            worker.dataset()
