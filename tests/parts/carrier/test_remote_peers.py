"""Peers in processes of their own: the same bits and, whatever is lost, a run that an audit passes.

The processes are objects here, so that they die at chosen moments; test_gang.py has real ones.
"""

import os
import signal
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.programs.train_step import Programs
from lockstep.transcript.transcript import Transcript
from parts.carrier import handlers
from parts.carrier.remote_peers import RemotePeers
from pipeline import runfile
from pipeline.stage import signals
from tests.errors import refused
from tests.lockstep.swarm import simulated
from tests.lockstep.swarm.test_no_message import LOST, SPOILT, nan, spoil_all
from tests.parts.carrier.loopback import Answered, Asked, Fails, Loopback, change_answers

pytestmark = pytest.mark.long


def train(run: runfile.Run, folder, form: str = "signs", fails: Fails | None = None):
    """Trains by peers behind a carrier, and audits all of it; programs are traced once."""
    lab = simulated.lab(form)

    def programs_of(theirs: runfile.Run, *_: object) -> Programs:
        return lab.programs

    carrier = Loopback(run.peers.count, *([fails] if fails else []))
    setup = lab.setup(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handlers, "programs_of", programs_of)
        peers = RemotePeers(setup, setup.start.state, carrier, run.snapshots().takes)
        trained = lab.train(run, folder, peers)
    return trained.transcript, lab.audit(run, trained.transcript), carrier


def never_twice(transcript: Transcript) -> None:
    """No sequence is trained on twice or lost: what was not applied is given again first."""
    applied, waiting = set(), set()
    for entry in transcript.rounds:
        spans = {p: set(range(a, b + 1)) for p, (a, b) in entry.round.assignment.items()}
        given = set().union(*spans.values())
        assert not given & applied
        new = given - waiting
        assert not new or waiting <= given
        assert sorted(new) == list(range(len(applied | waiting), len(applied | given | waiting)))
        done = set().union(*(spans[peer] for peer in entry.decision.applied))
        applied |= done
        waiting = (waiting | given) - done


def test_a_trainer_that_waits_for_peers_obeys_the_first_request_to_stop(monkeypatch):
    class EndedError(Exception):
        pass

    def end(status: int) -> None:
        raise EndedError(status)

    def asks(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    waiting = SimpleNamespace(
        seconds=5, absent={1}, returned=lambda: (), carrier=SimpleNamespace(wait=asks)
    )
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(EndedError, match=str(128 + signal.SIGTERM)), signals.stopping():
        RemotePeers.await_return(waiting)


HONEST, VERIFIED = simulated.run_of(), simulated.run_of(verified=True)
IMPRECISE = {"kind": "wrong_precision", "peer": 1, "rounds": [2, 3]}


@pytest.mark.parametrize(
    ("form", "run"),
    [
        ("signs", VERIFIED),
        ("signs", simulated.run_of("signs", IMPRECISE, verified=True)),
        ("dense", simulated.run_of("dense")),
        ("fragments", simulated.run_of("fragments", verified=True)),
    ],
    ids=["signs", "imprecise", "dense", "fragments"],
)
def test_the_transcript_is_that_of_peers_in_one_process(tmp_path, form, run):
    here = simulated.lab(form).train(run, tmp_path / "here").transcript
    there, _, _ = train(run, tmp_path / "there", form)
    assert there.hash == here.hash
    assert there.snapshots == here.snapshots
    assert [there.hashes(step) for step in there.snapshots] == [
        here.hashes(step) for step in here.snapshots
    ]


LONG = dict(simulated.BY_TIME, total_steps=18)


@pytest.mark.parametrize(
    ("moment", "operation"),
    [("before", "train"), ("after", "train"), ("before", "optimize"), ("before", "recompute"),
     ("before", "extract")],
)  # fmt: skip
def test_a_process_that_dies_at_any_moment_costs_its_peer_a_place_and_comes_back(
    tmp_path, operation, moment
):
    seen: Counter[str] = Counter()

    def fails(peer: int, asked: str) -> str:
        seen[asked] += asked == operation
        return moment if asked == operation and seen[asked] == 9 else ""

    run = simulated.run_of("signs", verified=True, **LONG)
    transcript, findings, carrier = train(run, tmp_path, fails=fails)
    assert carrier.events == 1 and findings == []
    never_twice(transcript)
    (lost,) = {peer for entry in transcript.rounds for peer in entry.evidence.silent}
    assert any(lost in entry.decision.applied for entry in transcript.rounds[-6:])


def test_peers_that_nobody_can_drop_for_want_of_a_quorum_come_back_as_they_are(tmp_path):
    seen: Counter[int] = Counter()

    def fails(peer: int, operation: str) -> str:
        seen[peer] += operation == "train"
        return "before" * (operation == "train" and peer < 4 and seen[peer] == 3)

    run = simulated.run_of("signs", witness_nodes=0, **LONG)
    transcript, findings, carrier = train(run, tmp_path, fails=fails)
    assert carrier.events == 4 and findings == []
    never_twice(transcript)
    assert transcript.rounds[2].evidence.silent == (0, 1, 2, 3)
    assert not any(entry.decision.dropped for entry in transcript.rounds)
    assert not any(entry.round.joined for entry in transcript.rounds)
    assert all(len(entry.decision.applied) == 6 for entry in transcript.rounds[-8:])


def test_a_process_that_asks_to_leave_is_let_go_after_what_it_sent(tmp_path):
    seen: Counter[int] = Counter()

    def fails(peer: int, operation: str) -> str:
        seen[peer] += operation == "train"
        return "leave" if peer == 2 and operation == "train" and seen[peer] == 3 else ""

    run = simulated.run_of("signs", **LONG)
    transcript, findings, _ = train(run, tmp_path, fails=fails)
    assert findings == []
    assert [(e.round.step, e.left) for e in transcript.rounds if e.left] == [(3, (2,))]
    assert 2 in transcript.rounds[2].decision.applied
    assert not any(entry.evidence.silent for entry in transcript.rounds)
    assert any(2 in entry.round.joined for entry in transcript.rounds)
    never_twice(transcript)


def at_random(seed: int, share: float) -> Fails:
    rng, once = np.random.default_rng(seed), set[int]()

    def fails(peer: int, operation: str) -> str:
        if rng.random() >= share:
            return ""
        if operation == "extract":  # who does not show its state a second time is ejected
            if peer in once:
                return ""
            once.add(peer)
        return str(rng.choice(["before", "after", "leave"]))

    return fails


@pytest.mark.soak  # the suite has each moment alone
@pytest.mark.parametrize("seed", range(25))
def test_whatever_processes_do_nothing_is_lost_or_done_twice_and_the_audit_accepts(tmp_path, seed):
    run = simulated.run_of("signs", verified=bool(seed % 2), **dict(LONG, total_steps=40))
    transcript, findings, carrier = train(run, tmp_path, fails=at_random(seed, 0.02))
    assert findings == []
    never_twice(transcript)
    assert carrier.events >= 5


def test_a_run_whose_processes_are_all_gone_ends_in_one_line(tmp_path):
    run = simulated.run_of("signs")
    with refused("train", "all processes of peers have ended"):
        train(run, tmp_path, fails=lambda peer, operation: "before" * (operation == "optimize"))


def test_on_the_walls_clock_who_is_late_is_as_the_carrier_saw_it(tmp_path, monkeypatch):
    took, compiled = {0: 1.5, 1: 2.5, 2: 99.0, 3: 0.5, 4: 0.5, 5: 0.5}, set()
    operations = []

    def slow(_: Loopback, asked: Asked, answers: Answered) -> Answered:
        operations.extend({getattr(o.values, "what", o.operation) for o in asked.values()})
        compiled.update(p for p, one in asked.items() if one.operation == "compile")
        return {peer: a._replace(seconds=took[peer]) for peer, a in answers.items()}

    change_answers(monkeypatch, slow)
    run = simulated.run_of("signs", verified=True)
    wall = run.links.model_copy(update={"clock": "wall"})
    runtime = run.runtime.model_copy(update={"carrier": "processes"})
    run = run.model_copy(update={"links": wall, "runtime": runtime})
    transcript, findings, _ = train(run, tmp_path)
    assert findings == []
    for entry in transcript.rounds:
        trained = entry.round.assignment.keys()
        assert entry.evidence.arrivals == {peer: took[peer] for peer in trained}
        assert entry.decision.late == ((2,) if 2 in trained else ())
    assert any(2 in entry.round.assignment for entry in transcript.rounds)
    # verifiers too have compiled the step before the clock of the first round begins
    assert compiled == {*took} and operations.count("compile") == 1
    assert operations.index("compile") < operations.index("train")
    # and who is verified hears of it when all have answered
    phases = [one for one in operations if one in ("train", "optimize", "before")]
    assert {phases[n - 1] for n, one in enumerate(phases) if one == "before"} <= {"train", "before"}
    assert phases.count("before") == 3 * 8 and phases.count("train") == 8


# ---- NaN of one peer costs it its place in a process of its own too, with the same bytes ----


STEP = 3


def test_one_peers_nan_costs_it_its_place_wherever_peers_run(tmp_path, monkeypatch):
    def step_there(_: Loopback, asked: Asked, answers: Answered) -> Answered:
        for peer in {SPOILT} & answers.keys():
            values = asked[peer].values
            if asked[peer].operation == "train" and values.step == STEP:
                assert not values.keep
                answers[peer] = answers[peer]._replace(arrays=nan(answers[peer].arrays))
        return answers

    spoil_all(monkeypatch, {SPOILT}, STEP)
    change_answers(monkeypatch, step_there)
    here = simulated.lab("dense").train(LOST, tmp_path / "here").transcript
    remote, _, _ = train(LOST, tmp_path / "there", "dense")
    assert remote.hash == here.hash
