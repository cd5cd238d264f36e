"""Rounds without arrays are rounds: an auditor follows them."""

import pytest

from benchmarks import scale


@pytest.mark.parametrize("case", scale.CASES)
def test_rounds_that_are_measured_are_audited(case):
    swarm = scale.Rounds(20, case)
    for _ in range(2):
        swarm.take_round()
    swarm.audit()
    assert len(swarm.seconds) == 7 and len(swarm.entries) == 2
    ejected = [len(entry.decision.ejected) for entry in swarm.entries]
    assert (min(ejected) > 0) == (case == "rough")
