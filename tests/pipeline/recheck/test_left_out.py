"""Who is recorded as away, late or silent is counted in a claim, whatever the record's field."""

from types import SimpleNamespace

import pytest

from lockstep.protocol.round import Evidence
from lockstep.transcript.entry import Entry
from pipeline.recheck.train import _left_out

EMPTY = {"messages": {}, "silent": (), "withheld": (), "false_links": ()}
DECISION = {"applied": (0,), "late": (), "ejected": {}, "dropped": ()}
# Fields that a round's record may have, which nobody recomputes: an event of each, and its count.
EVENTS = {
    "asked": ({"asked": (2,)}, {}, "asked"),
    "left": ({"left": (1,)}, {}, "left"),
    "paused": ({"paused": True}, {}, "paused"),
    "silent": ({}, {"silent": (1,)}, "silent"),
    "withheld": ({}, {"withheld": (1,)}, "withheld"),
    "false_links": ({}, {"false_links": (1,)}, "false_links"),
}


def entry(fields: dict, evidence: dict) -> SimpleNamespace:
    said = SimpleNamespace(**EMPTY | evidence)
    plain = {"asked": (), "left": (), "paused": False, "decision": SimpleNamespace(**DECISION)}
    return SimpleNamespace(**plain | {"evidence": said} | fields)


def claimed(*events: tuple[dict, dict]):
    first = entry({"asked": (0, 1)}, {})
    return _left_out(SimpleNamespace(rounds=[first, *(entry(*event) for event in events)]))


@pytest.mark.parametrize("name", EVENTS)
def test_each_event_that_only_the_record_shows_is_counted(name):
    *event, count = EVENTS[name]
    quiet, claim = claimed(({}, {})), claimed(event, event)
    assert (quiet.values[count], claim.values[count], claim.kind) == (0, 2, "stated")
    assert quiet.values["began"] == 2 and claim.text != quiet.text
    assert {*EVENTS} <= Entry.model_fields.keys() | Evidence.__dataclass_fields__.keys()
