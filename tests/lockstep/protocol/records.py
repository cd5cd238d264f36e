"""Records of rounds, for tests: whatever is not given is empty."""

from collections.abc import Mapping
from dataclasses import replace

from lockstep.protocol.round import Decision, Evidence, Message, Round
from lockstep.transcript.entry import Entry

NOTHING = Evidence({}, {}, {}, (), (), (), (), (), 0.0)


def evidence(messages: Mapping[int, Message], **given: object) -> Evidence:
    """What was sent and said in a round."""
    return replace(NOTHING, messages=dict(messages), **given)


def entry(round_: Round, evidence: Evidence, decision: Decision, **given: object) -> Entry:
    """A line of rounds.jsonl."""
    empty = {"asked": (), "joined_params": None, "loss": None, "held_out_loss": None}
    record = {"round": round_, "evidence": evidence, "decision": decision}
    return Entry(**empty | record | given)
