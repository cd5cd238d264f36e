"""Scheduled faults: every kind loads in a run that has what it needs."""

import pytest

from lockstep.tables.faults import KINDS
from tests.pipeline.runfile.edited_run import DISTRO, fault, load

ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-8, "clip_grad_norm": 1.0}
VALUES = (f"{DISTRO}.quantize_1bit", False)
PLAIN = ("peers.wire", "psyche")
VERIFIED = ("config.verification_percent", 50)


def scheduled(kind: str, **changes) -> tuple[str, object]:
    return "faults.schedule", [fault(kind=kind) | changes]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_loads_in_a_run_that_has_what_it_needs(kind):
    needed = {"not_finite": [VALUES], "duplicated": [PLAIN], "false_verifier": [VERIFIED]}
    changes = {"collude": {"peer": [0, 2]}, "join": {"rounds": [1, 9]}}.get(kind, {})
    edits = [VALUES] if kind.startswith("scale_") else needed.get(kind, [])
    run = load(scheduled(kind, **changes), *edits)
    assert run.faults.schedule[0].kind == kind
    needs = {"values", "plain"} & {KINDS[kind].needs}
    assert bool(needs) == bool(edits) or kind == "false_verifier"


def test_gradients_have_a_size():
    load(scheduled("scale_up", size=3.0), ("model.LLM.optimizer", {"AdamW": ADAMW}))


def test_peers_of_a_fault_are_a_tuple_however_they_are_written():
    one, more = load(("faults.schedule", [fault(), fault(peer=[3, 0])])).faults.schedule
    assert (one.peers, more.peers) == ((2,), (3, 0))
