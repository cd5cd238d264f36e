"""Witnesses that say that an honest peer's bytes are no message: they alone are named for it."""

from dataclasses import replace
from pathlib import Path

from lockstep.protocol import driver
from lockstep.protocol.attestation import Attestation, attest
from lockstep.transcript.entry import Entry
from lockstep.transcript.recomputed import begin_round, finish_round
from lockstep.transcript.transcript import Transcript
from pipeline.audit.audit import audit
from tests.lockstep.swarm.simulated import lab, run_of

PEER = 2
RUN = run_of("signs")


def refusing(entry: Entry, witness: int, times: int) -> Attestation:
    """What a witness attests that holds all messages of a round but one, which it refuses."""
    held = {p: c for p, c in entry.evidence.commitments.items() if p != PEER}
    return attest(witness, entry.round.seed, entry.round.peers, held, refused=[PEER] * times)


def with_refusals(folder: Path, times: int, count: int) -> tuple[Entry, tuple[int, ...]]:
    """Have some witnesses of the last round refuse, and the decision follow from it."""
    lab("signs").train(RUN, folder)
    setup = lab("signs").setup(RUN)
    *before, last = Transcript(folder).rounds
    progress = setup.start.progress(setup.settings)
    for entry in before:
        progress = finish_round(begin_round(progress, entry), entry)
    witnesses = last.evidence.attestations
    assert len(witnesses) == last.decision.quorum == 2
    lying = [refusing(last, attestation.witness, times) for attestation in witnesses[:count]]
    evidence = replace(last.evidence, attestations=(*lying, *witnesses[count:]))
    _, decision = driver.finish_round(begin_round(progress, last), last.round, evidence)
    entry = last.model_copy(update={"evidence": evidence, "decision": decision})
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], entry.model_dump_json() + "\n"]))
    return entry, tuple(attestation.witness for attestation in lying)


def test_one_witness_that_refuses_twice_is_no_quorum(tmp_path):
    entry, (liar,) = with_refusals(tmp_path, times=2, count=1)
    assert entry.decision.ejected == {}
    found = audit(lab("signs").setup(RUN), Transcript(tmp_path))
    assert [(f.peer, f.kind) for f in found] == [(liar, "attestation")]


def test_all_witnesses_together_eject_nobody_whose_message_can_be_shown(tmp_path):
    entry, liars = with_refusals(tmp_path, times=1, count=2)
    assert entry.decision.ejected == {} and PEER not in entry.decision.applied
    found = audit(lab("signs").setup(RUN), Transcript(tmp_path))
    assert [(f.peer, f.kind) for f in found] == [(liar, "attestation") for liar in liars]
