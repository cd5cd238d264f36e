"""Who left, a pause and who stored an epoch's params are recomputed from the rounds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lockstep.protocol import consensus, driver
from lockstep.protocol.round import Message
from lockstep.transcript.entry import Entry, EpochParams
from pipeline import runfile
from pipeline.audit.audit import audit_rounds
from pipeline.start.round_settings import round_settings
from tests.lockstep.protocol import records
from tests.lockstep.swarm.simulated import lab, run_of
from tests.lockstep.transcript.test_recomputed import run_with_checkpointers

pytestmark = pytest.mark.long


def driven(run: runfile.Run, **events: int) -> list[Entry]:
    """The rounds of honest peers, driven and recorded without training.

    Args:
      run: the run, whose peers all begin it.
      events: round in which something happens: peer 2 "leaves", the owner "pauses".
    """
    progress = lab("signs").begin.progress(round_settings(run))
    asked, entries = tuple(range(6)), []
    while True:
        if progress.pausing:
            progress = driver.resume(progress)
        progress, round_ = driver.next_round(driver.ask(progress, asked))
        if round_ is None:
            return entries
        left = (2,) if events.get("leaves") == round_.step else ()
        progress, paused = driver.leave(progress, left), events.get("pauses") == round_.step
        progress = driver.pause(progress) if paused else progress
        sent = {peer: Message("ab" * 32, 1) for peer in round_.assignment}
        said = records.evidence(sent, arrivals=dict.fromkeys(sent, 1.0))
        said = replace(said, attestations=consensus.witnessed(round_, said, 9.0))
        progress, decision = driver.finish_round(progress, round_, said)
        more = {"asked": asked, "left": left, "paused": paused}
        peer = driver.checkpointer(progress)
        if peer is not None:
            progress = driver.checkpointed(progress, peer, "cd" * 32)
            more["checkpointed"] = EpochParams(peer=peer, params="cd" * 32)
        entries.append(records.entry(round_, said, decision, **more))
        asked = ()


def audited_rounds(run: runfile.Run, entries: list[Entry]) -> list[tuple[int, str]]:
    transcript = SimpleNamespace(rounds=entries)  # without payloads
    found = audit_rounds(lab("signs").setup(run), transcript, windows=(), last=0)
    return [(finding.round, finding.kind) for finding in found]


def test_who_left_and_a_pause_are_recorded_and_recomputed():
    run = run_of("signs")
    entries = driven(run, leaves=2, pauses=4)
    assert [(len(e.round.peers), e.round.epoch) for e in entries[1:5]] == [
        (6, 0), (5, 0), (5, 0), (5, 1),
    ]  # fmt: skip
    lines = [entry.model_dump_json() for entry in entries]
    assert ["left" in line or "paused" in line for line in lines] == [n in (1, 3) for n in range(8)]
    read = [Entry.model_validate_json(line) for line in lines]
    assert read == entries and audited_rounds(run, read) == []
    for step, changes in ((2, {"left": ()}), (4, {"paused": False}), (5, {"paused": True})):
        tampered = [e.model_copy(update=changes if e.round.step == step else {}) for e in entries]
        assert audited_rounds(run, tampered) == [(step + 1, "assignment")]
    nobody = entries[2].model_copy(update={"left": (2,)})
    assert audited_rounds(run, [*entries[:2], nobody]) == [(3, "rounds")]


def test_who_stored_an_epochs_params_is_recomputed_where_the_run_has_checkpointers():
    run = run_with_checkpointers()
    entries = driven(run, leaves=2)
    assert [e.round.step for e in entries if e.checkpointed] == [3, 6, 8]
    assert audited_rounds(run, entries) == []
    another = EpochParams(peer=1, params="cd" * 32)
    for step, stored in ((3, None), (3, another), (4, another)):
        tampered = list(entries)
        tampered[step - 1] = entries[step - 1].model_copy(update={"checkpointed": stored})
        assert audited_rounds(run, tampered) == [(step, "decision")]
