"""Witnesses that say that an honest peer's bytes are no message: they alone are named for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.protocol import driver
from lockstep.protocol.attestation import Attestation, attest
from lockstep.transcript.entry import Entry
from lockstep.transcript.recomputed import begin_round, finish_round
from lockstep.transcript.transcript import Transcript
from tests.lockstep.swarm.simulated import lab, run_of
from tests.pipeline.audit.edited.audited_run import Audited, rows

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


@pytest.mark.parametrize("times, count", [(2, 1), (1, 2)], ids=["one of them twice", "all"])
def test_witnesses_eject_nobody_whose_message_can_be_shown(times, count, tmp_path):
    entry, liars = with_refusals(tmp_path, times, count)
    assert entry.decision.ejected == {} and PEER not in entry.decision.applied
    assert rows(Audited(RUN, tmp_path).audit()) == [(8, liar, "attestation") for liar in liars]
