"""What a peer's process does on request."""

from collections import Counter

import jax
import numpy as np
import pytest

from parts.carrier import requests
from parts.carrier.operations import Operations, leaves
from parts.carrier.requests import Asked, Outcome
from pipeline.start.round_settings import round_settings
from tests.lockstep.swarm import simulated

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
    work = round_settings(run).work(lab.programs, lab.data, (0, 1), simulated.PEERS)
    rows = work.rows_MB

    def process() -> Operations:
        """A process that has state: with programs of its own, which nobody has compiled."""
        process = Operations(run, simulated.MODEL, 0, lab.programs.task.columns)
        assert process.programs is not lab.programs
        assert all(hasattr(process, f"_{name}") for name in requests.OPERATIONS.keys() - {"exit"})
        columns = lab.programs.task.columns
        create = requests.Create(run={}, model=simulated.MODEL, first_step=0, columns=columns)
        process.handle(Asked(create, [*leaves(params), *leaves(shared)]))
        process.handle(Asked(requests.Restore(), leaves(own)))
        return process

    def train(process: Operations) -> tuple[Outcome, int]:
        before = lowered["programs"]
        asked = requests.Train(step=1, count=2, imprecise=False, keep=True, hash=True)
        return process.handle(Asked(asked, [rows])), lowered["programs"] - before

    ready, other = process(), process()
    ready.handle(Asked(requests.Compile(imprecise=False), [rows]))
    (done, of_ready), (expected, of_other) = train(ready), train(other)
    assert (of_ready, of_other > 0) == (0, True)
    assert done.values == expected.values
    for array, like in zip(done.arrays, expected.arrays, strict=True):
        np.testing.assert_array_equal(array, like)
