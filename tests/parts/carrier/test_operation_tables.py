"""The operations' tables: the bytes of a request, what is refused, and the page about them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from parts.carrier import operation_tables as tables
from parts.carrier.frames import AnswerHeader, FrameError, RequestHeader, decode
from parts.carrier.operation_tables import OPERATIONS, Asked, Outcome
from parts.carrier.peer_process import PeerProcess
from tests.parts.carrier import operations_page

TRAIN = {"step": 7, "count": 2, "imprecise": False, "keep": True, "hash": False}
CREATE = {"run": {"a": [1.5, None]}, "model": {"b": {}}, "first_step": 3, "columns": ["text"]}
REQUESTS = {
    "create": (tables.Create(**CREATE), CREATE),
    "hyperparameters": (tables.GetHyperparameters(), {}),
    "compile": (tables.Compile(imprecise=True), {"imprecise": True}),
    "align": (tables.Align(step=7, hash=True), {"step": 7, "hash": True}),
    "train": (tables.Train(**TRAIN), TRAIN),
    "optimize": (
        tables.Optimize(step=7, peers=[1, 0], sequences=[4, 5], ages=[0, 2]),
        {"step": 7, "peers": [1, 0], "sequences": [4, 5], "ages": [0, 2]},
    ),
    "extract": (tables.Extract(what="own", hash=True), {"what": "own", "hash": True}),
    "restore": (tables.Restore(), {}),
    "recompute": (tables.Recompute(step=7, count=2), {"step": 7, "count": 2}),
    "forward": (tables.Forward(), {}),
    "exit": (tables.Exit(), {}),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_request_has_these_bytes_and_is_read_as_what_was_asked(operation):
    table, values = REQUESTS[operation]
    buffers = Asked(table, [np.arange(2, dtype="i4")]).buffers("0" * 16, 5, "host:1")
    header = {"version": 2, "trainer": "0" * 16, "number": 5, "operation": operation}
    arrays = [{"dtype": "int32", "shape": [2]}]
    header |= {"gang": "host:1", "values": values, "arrays": arrays}
    assert bytes(buffers[0]).decode() == json.dumps(header, separators=(",", ":"))
    read = Asked.read(*decode(RequestHeader, buffers))
    assert (read.operation, read.values) == (operation, table)


@pytest.mark.parametrize(
    ("operation", "values", "says"),
    [
        ("pickle", {}, "operation 'pickle', expected one of ['create', "),
        ("train", {k: v for k, v in TRAIN.items() if k != "keep"}, "keep: Field required"),
        ("train", TRAIN | {"step": 0}, "step: "),
        ("train", TRAIN | {"count": "2"}, "count: "),
        ("train", TRAIN | {"seed": 1}, "seed: Extra inputs are not permitted"),
        ("extract", {"what": "secrets", "hash": False}, "what: "),
        ("optimize", {"step": 1, "peers": [-1], "sequences": [1]}, "peers.0: "),
        ("x" * 10**5, {}, "operation 'xxx"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_that_names_the_field(operation, values, says):
    header = RequestHeader(trainer="0" * 16, number=1, operation=operation, values=values)
    with pytest.raises(FrameError) as refused:
        Asked.read(header, [])
    line = str(refused.value)
    assert line.startswith(says) and "\n" not in line and len(line) < 300
    assert operation not in OPERATIONS or line.endswith(f", expected what {operation} takes")


class Doubling(PeerProcess):
    """A process that computes with NumPy, and is itself what does the operations."""

    def create(self, create: tables.Create, gang: str) -> "Doubling":
        return self

    def handle(self, asked: Asked) -> Outcome:
        return Outcome(arrays=[array * 2 for array in asked.arrays])


def test_a_process_may_compute_with_what_it_likes():
    process = Doubling(0)

    def ask(table: tables.Table, number: int) -> tuple[AnswerHeader, list[np.ndarray]]:
        asked = Asked(table, [np.arange(3.0)]).buffers("0" * 16, number)
        return decode(AnswerHeader, process.answer(asked))

    assert "forward before create, expected it after" in ask(tables.Forward(), 1)[0].error
    assert ask(tables.Create(**CREATE), 2)[0].error is None
    np.testing.assert_array_equal(ask(tables.Forward(), 3)[1], [[0.0, 2.0, 4.0]])


def test_a_process_reads_its_first_request_before_jax_is_imported():
    for module in ("peer_process", "jax_process"):
        seen = f"import sys, parts.carrier.{module}; sys.exit('jax' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", seen]).returncode == 0, module


def test_the_page_has_the_tables():
    stale = operations_page.PAGE.read_text() != operations_page.page()
    assert not stale, "run `python -m tests.parts.carrier.operations_page`"
