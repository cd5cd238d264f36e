"""The operations' tables: the bytes of a request, what is refused, and the page about them."""

import json
from collections import Counter

import jax
import numpy as np
import pytest

from lockstep.swarm.peers import work_of
from parts.carrier import requests
from parts.carrier.handlers import Operations, leaves
from parts.carrier.requests import (
    OPERATIONS,
    FrameError,
    Outcome,
    PeerRequest,
    RequestHeader,
    decode,
)
from pipeline.start.round_settings import round_settings
from tests.errors import refused
from tests.lockstep.swarm import simulated
from tests.parts.carrier import operations_page

TRAIN = {"step": 7, "count": 2, "broken": None, "keep": True, "hash": False}
CREATE = {"run": {"a": [1.5, None]}, "model": {"b": {}}, "first_step": 3, "columns": ["text"]}
REQUESTS = {
    "create": CREATE,
    "compile": {"broken": 0},
    "align": {"step": 7, "hash": True},
    "train": TRAIN,
    "optimize": {"step": 7, "peers": [1, 0], "sequences": [4, 5]},
    "extract": {"what": "own", "hash": True},
    "restore": {},
    "recompute": {"step": 7, "count": 2},
    "forward": {},
    "exit": {},
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_request_has_these_bytes_and_is_read_as_what_was_asked(operation):
    values = REQUESTS[operation]
    table = OPERATIONS[operation].takes(**values)
    buffers = PeerRequest(table, [np.arange(2, dtype="i4")]).buffers("0" * 16, 5, "host:1")
    header = {"version": 2, "trainer": "0" * 16, "number": 5, "operation": operation}
    arrays = [{"dtype": "int32", "shape": [2]}]
    header |= {"gang": "host:1", "values": values, "arrays": arrays}
    assert bytes(buffers[0]).decode() == json.dumps(header, separators=(",", ":"))
    read = PeerRequest.read(*decode(RequestHeader, buffers))
    assert (read.operation, read.values) == (operation, table)


@pytest.mark.parametrize(
    ("operation", "values", "named"),
    [
        ("pickle", {}, ["'pickle'"]),
        ("train", {k: v for k, v in TRAIN.items() if k != "keep"}, ["train", "keep"]),
        ("train", TRAIN | {"step": 0}, ["train", "step"]),
        ("train", TRAIN | {"count": "2"}, ["train", "count"]),
        ("train", TRAIN | {"seed": 1}, ["train", "seed"]),
        ("extract", {"what": "secrets", "hash": False}, ["extract", "what"]),
        ("optimize", {"step": 1, "peers": [-1], "sequences": [1]}, ["optimize", "peers.0"]),
        ("x" * 10**5, {}, ["operation"]),
    ],
)
def test_a_wrong_request_is_refused_in_one_line_that_names_the_field(operation, values, named):
    header = RequestHeader(trainer="0" * 16, number=1, operation=operation, values=values)
    with refused(*named, error=FrameError) as caught:
        PeerRequest.read(header, [])
    assert len(str(caught.value)) < 300


def test_the_page_has_the_tables():
    stale = operations_page.PAGE.read_text() != operations_page.page()
    assert not stale, "run `python -m tests.parts.carrier.operations_page`"


# ---- What a peer's process does on request ----


LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"


@pytest.fixture
def lowered():
    """How many programs JAX has lowered, which it does before it compiles them or finds them."""
    count = Counter()

    def listen(event: str, seconds: float, **_: object) -> None:
        count["programs"] += event == LOWERED

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_step_that_was_compiled_before_compiles_nothing_and_gives_the_same_bits(lowered):
    run, lab = simulated.run_of("signs"), simulated.lab("signs")
    params, shared, own = lab.begin.state.params, lab.begin.state.shared, lab.begin.state.own[0]
    work = work_of(round_settings(run), lab.programs, lab.data, (0, 1), simulated.PEERS)
    rows = work.rows_MB

    def process() -> Operations:
        """A process that has state: with programs of its own, which nobody has compiled."""
        process = Operations(run, simulated.MODEL, 0, lab.programs.task.columns)
        assert process.programs is not lab.programs
        assert all(hasattr(process, f"_{name}") for name in requests.OPERATIONS.keys() - {"exit"})
        columns = lab.programs.task.columns
        create = requests.Create(run={}, model=simulated.MODEL, first_step=0, columns=columns)
        process.handle(PeerRequest(create, [*leaves(params), *leaves(shared)]))
        process.handle(PeerRequest(requests.Restore(), leaves(own)))
        return process

    def train(process: Operations) -> tuple[Outcome, int]:
        before = lowered["programs"]
        asked = requests.Train(step=1, count=2, broken=None, keep=True, hash=True)
        return process.handle(PeerRequest(asked, [rows])), lowered["programs"] - before

    ready, other = process(), process()
    ready.handle(PeerRequest(requests.Compile(broken=None), [rows]))
    (done, of_ready), (expected, of_other) = train(ready), train(other)
    assert (of_ready, of_other > 0) == (0, True)
    assert done.values == expected.values
    for array, like in zip(done.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(array, like)
