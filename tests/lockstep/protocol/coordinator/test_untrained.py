"""Sequences of a round that nobody trained, which wait for the next."""

import pytest

from lockstep.protocol.coordinator import RunState, Tick, Untrained
from tests.lockstep.protocol.coordinator.rows import found_and_expected
from tests.lockstep.protocol.three_peers import BOTH, FIRST, SPANS, at

TRANSITIONS = {
    "untrained: said": (
        at(RunState.RoundWitness),
        Untrained((SPANS[1], SPANS[0]), 101),
        {"missed": (SPANS[1], SPANS[0]), "untrained": (), "data_index": 0},
    ),
    "untrained: nothing is": (at(RunState.RoundWitness), Untrained((), 101), {"missed": ()}),
    "witness: what was untrained waits for the next round": (
        at(RunState.RoundWitness, spoken=BOTH, missed=(SPANS[1],)),
        Tick(102, 7),
        {"untrained": (SPANS[1],), "missed": None, "data_index": 8},
    ),
    "witness: what found no place waits before what is untrained now": (
        # Two trainers take 3 sequences each; 3 more would pass the batch of 8, so 2 are new.
        at(
            RunState.RoundWitness,
            spoken=BOTH,
            data_index=50,
            untrained=((0, 29),),
            missed=((3, 5),),
        ),
        Tick(102, 7),
        {"untrained": ((6, 29), (3, 5)), "data_index": 52},
    ),
    "witness: without a quorum everything is untrained": (
        at(RunState.RoundWitness, spoken=(FIRST,), missed=(SPANS[1],)),
        Tick(102, 7),
        {"untrained": tuple(sorted(SPANS.values())), "data_index": 8},
    ),
}


@pytest.mark.parametrize("row", TRANSITIONS.values(), ids=TRANSITIONS.keys())
def test_transition(row):
    found, expected = found_and_expected(*row)
    assert found == expected
