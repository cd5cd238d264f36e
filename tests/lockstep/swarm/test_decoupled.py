"""Decoupled DiLoCo in a swarm: with nobody late it is Streaming DiLoCo; with late messages, slower
peers and peers that go, rounds are repeated to the same bits from what was recorded of them.

What every elastic method owes, and where it is tested:

1. equal speeds, a quorum of all, no delay: the bits of the method that waits     here
2. one peer: as alone                      tests/lockstep/simulation/test_decoupled.py
3. another order of arrivals: the same     protocol/test_closing.py, programs/test_train_step.py
4. an absent slot: the same bits           optim/test_common.py, optim/local/test_outer_steps.py
5. the record repeated: the same bits      here, in an audit and after kills
6. too old: recorded, and not merged       protocol/test_closing.py
7. gone after it sent: counts, and once    here, and protocol/test_closing.py
8. peers restarted from their own states   here after each round, all at once: the same bits; one
                                           that missed a round begins anew, as with every method
9. the coordinator killed anywhere         here after each round, and in simulation/ between
11. momentum once to a merge               optim/local/test_outer_steps.py
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from benchmarks.simulated import Lab, Trained
from lockstep.protocol import links
from lockstep.protocol.closing import slot
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import make_peers
from lockstep.swarm.swarm import Swarm
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.recheck.train import follow_params
from pipeline.runfile.run import Run
from pipeline.start.round_settings import round_settings
from tests import tiny
from tests.lockstep.swarm.simulated import MODEL, entries, lab, run_of

pytestmark = pytest.mark.long

SLOW, FAR = 4, 5  # peers: of half the speed, and behind a thin line
LINKS = {
    "tokens_per_second": [200.0, 200.0, 200.0, 200.0, 100.0, 200.0],
    "upload_mbps": [20.0, 20.0, 20.0, 20.0, 20.0, 0.03],
}
CRASH = {"kind": "crash", "peer": FAR, "rounds": [2, 3]}
LIE = {"kind": "sign_flip", "peer": FAR, "rounds": [1, 1]}


def late_run(*schedule: dict, form: str = "late") -> runfile.Run:
    """A run of 8 rounds whose peers are unlike; a snapshot after every fourth."""
    document = run_of(form, *schedule).model_dump(mode="json")
    document["links"] |= LINKS
    return Run.model_validate(document)


@pytest.fixture(scope="module")
def late(tmp_path_factory) -> Trained:
    return lab("late").train(late_run(), tmp_path_factory.mktemp("late"))


def test_with_nobody_late_it_is_streaming_diloco_bit_for_bit(tmp_path):
    table = tiny.STREAMING["StreamingDiLoCo"]
    common = {key: table[key] for key in ("inner_steps", "fragments", "delay", "inner", "mixing")}
    outer = {"Nesterov": {"learning_rate": 0.7, "momentum": 0.9}}
    run = run_of("late").model_dump(mode="json")
    run["model"]["LLM"]["optimizer"] = {
        "DecoupledDiLoCo": {
            **common, "adopt": "blend", "quorum": 6, "grace_seconds": 0.0, "max_age": 3,
            "outer": outer,
        }
    }  # fmt: skip
    run = Run.model_validate(run)
    decoupled = Lab(run, MODEL, devices=1).train(run, tmp_path / "decoupled")
    streaming = lab("fragments").train(run_of("fragments"), tmp_path / "streaming")
    for one, other in zip(decoupled.transcript.rounds, streaming.transcript.rounds, strict=True):
        assert one.decision == other.decision
        assert {*one.evidence.messages} == {*other.evidence.messages}
    jax.tree.map(np.testing.assert_array_equal, decoupled.params, streaming.params)


def test_slower_peers_take_fewer_local_steps_and_late_messages_are_merged_with_their_age(late):
    rounds = late.transcript.rounds
    given = {p: entry.round.sequences[p] for entry in rounds for p in entry.round.assignment}
    assert given == {0: 4, 1: 4, 2: 4, 3: 4, SLOW: 2, FAR: 4}  # of 2 local steps of 2 sequences
    merged = [number for e in rounds for number in {*e.round.travelling} & {*e.decision.applied}]
    assert {*merged} == {slot(FAR, 1)}
    assert all({*e.round.assignment} == {*range(6)} for e in rounds)  # who is late trains on
    both = [e for e in rounds if {FAR, slot(FAR, 1)} <= {*e.decision.applied}]
    assert both  # two of its messages in one round
    waited = [entry for entry in rounds if entry.round.step % 4 == 0]
    assert all(not entry.decision.travelling for entry in waited)
    quick = [e.decision.train_seconds for e in rounds if e not in waited]
    assert max(quick) < 1.0 < min(e.decision.train_seconds for e in waited)


@pytest.mark.parametrize(
    "form, schedule", [("late", ()), ("late", (CRASH,)), ("late codes", (CRASH,))]
)
def test_an_audit_repeats_rounds_with_late_messages_bit_for_bit(late, form, schedule, tmp_path):
    """Where messages are kept and where they are recomputed; and of a peer that is gone by then."""
    run = late_run(*schedule, form=form)
    trained = lab(form).train(run, tmp_path) if schedule else late
    assert lab(form).programs.form.kept == (form == "late codes")
    assert lab(form).audit(run, trained.transcript) == []
    merged = [e for e in trained.transcript.rounds if {*e.round.travelling} & {*e.decision.applied}]
    gone = [e for e in merged if FAR not in e.evidence.present(e.round.peers)]
    assert merged and bool(gone) == bool(schedule)
    if form == "late codes":  # params follow from the messages alone, late ones among them
        setup, steps = lab(form).setup(run), []
        state = setup.start.state
        arrived = lambda step, *_: steps.append(step)  # noqa: E731
        follow_params(setup, trained.transcript, state.params, state.shared, arrived)
        assert steps == trained.transcript.snapshots


def test_a_liar_whose_message_is_merged_later_is_named_and_what_it_did_reached_the_params(tmp_path):
    run = late_run(LIE)
    trained = lab("late").train(run, tmp_path)
    first, third = (trained.transcript.rounds[n] for n in (0, 2))
    assert FAR in first.decision.travelling and slot(FAR, 1) in third.decision.applied
    found = lab("late").audit(run, trained.transcript)
    assert {(f.round, f.peer, f.kind, f.applied) for f in found} == {(1, FAR, "message", True)}


def test_killed_after_every_round_it_goes_on_to_the_same_rounds():
    run = late_run(CRASH)
    whole, killed = (entries("late", run, killed=killed)[0] for killed in (False, True))
    assert whole == killed and any('"travelling"' in line for line in whole)


def test_forged_records_of_what_travels_are_found(late):
    made, run = lab("late"), late_run()
    rounds = late.transcript.rounds
    number = next(n for n, entry in enumerate(rounds) if entry.round.travelling)
    entry = rounds[number]
    peer, one = next(iter(entry.round.travelling.items()))

    def audited(changed):
        forged = Transcript(late.transcript.folder)
        forged.__dict__["rounds"] = [*rounds[:number], changed, *rounds[number + 1 :]]
        return made.audit(run, forged)

    forged = replace(one, seconds=one.seconds + 1.0)
    round_ = replace(entry.round, travelling={peer: forged})
    found = audited(entry.model_copy(update={"round": round_}))
    assert [(f.round, f.peer, f.kind) for f in found][:1] == [(number + 1, None, "assignment")]
    decision = replace(entry.decision, applied=tuple(set(entry.decision.applied) - {peer}))
    found = audited(entry.model_copy(update={"decision": decision}))
    assert [(f.round, f.peer, f.kind) for f in found][:1] == [(number + 1, None, "decision")]


# ---- Streaming DiLoCo in a swarm: who takes up what, and when messages arrive ----


def begun(run: runfile.Run) -> tuple[Swarm, RunProgress]:
    """The peers of a run of fragments, and the run before its first round."""
    made, settings = lab("fragments"), round_settings(run)
    peers = make_peers(made.programs, run.peers.layout, made.begin.state, made.devices)
    faults = FaultSchedule([], run.peers.seed, made.programs.form)
    swarm = Swarm(settings, peers, lambda _: made.data, faults)
    return swarm, made.begin.progress(settings)


def test_a_verifier_takes_up_what_the_round_before_its_own_came_to():
    swarm, progress = begun(run_of("fragments", verified=True))
    peers, sat_out = swarm.peers, set()
    for step in range(1, 6):
        before = jax.device_get(peers.state())
        progress, taken = swarm.take_round(progress)
        after = jax.device_get(peers.state())
        for peer in taken.entry.round.idle:
            expected = before.own[peer]
            if step > 1:
                sat_out.add(peer)
                align = peers.programs.optimizer.align
                expected = align(expected, before.params, (step - 2) % 2)
            jax.tree.map(
                lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=1e-7),
                after.own[peer], expected,
            )  # fmt: skip
    assert len(sat_out) > 1


def test_messages_travel_beside_the_local_steps_until_they_are_needed():
    """A delay of 1 of a round's 2 local steps: half of its training is beside them."""
    run = run_of("fragments", total_steps=1)
    swarm, progress = begun(run)
    evidence = swarm.take_round(progress)[1].entry.evidence
    tokens = dict.fromkeys(evidence.messages, 24 // 6 * run.llm.max_seq_len)
    sizes = {peer: message.bytes for peer, message in evidence.messages.items()}
    waiting = links.arrivals(run.links, range(6), tokens, sizes)
    seconds = tokens[0] / run.links.tokens_per_second
    assert evidence.arrivals == pytest.approx({p: s - seconds / 2 for p, s in waiting.items()})
