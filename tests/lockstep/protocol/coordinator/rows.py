"""Rows of transitions: a state, an event, and what is expected to be so afterwards."""

from collections.abc import Mapping

from lockstep.protocol.coordinator import CoordinatorState, Event, tick
from tests.lockstep.protocol.three_peers import DROPPED, records

ONE_GONE = (*records(0, 1), *records(2, state=DROPPED))
TWO_GONE = (*records(0), *records(1, 2, state=DROPPED))


def found_and_expected(
    before: CoordinatorState, event: Event, expected: Mapping[str, object]
) -> tuple[object, object]:
    """What a row says is so after its event; of the whole state, where it says nothing."""
    after = tick(before, event)
    if not expected:
        return after, before
    return {name: getattr(after, name) for name in expected}, expected
