"""A peer that lies in what it answers: the run goes on, and an audit names nobody else."""

import logging
from collections.abc import Callable

import jax
import numpy as np
import pytest

from lockstep.protocol import consensus
from lockstep.protocol.round import Evidence, Round
from lockstep.transcript.trees import tree_hash
from parts.carrier.carrier import PeerAnswer
from parts.carrier.requests import PeerRequest
from tests.lockstep.swarm import simulated
from tests.parts.carrier.loopback import Answered, Asked, Loopback, change_answers
from tests.parts.carrier.test_remote_peers import LONG, never_twice, train

pytestmark = pytest.mark.long

LIAR = 0  # whom the trainer asks first for what all have alike
Lie = Callable[[Loopback, PeerRequest, PeerAnswer], PeerAnswer]


def lying(monkeypatch, lie: Lie, liar: int = LIAR) -> None:
    def told(carrier: Loopback, asked: Asked, answers: Answered) -> Answered:
        if liar in answers:
            answers[liar] = lie(carrier, asked[liar], answers[liar])
        return answers

    change_answers(monkeypatch, told)


def one_after_the_other(*about: str, told: list[str]) -> Lie:
    """Some lies, each told when what it is about is asked for the next time."""
    lies = iter(about)
    now = [next(lies)]

    def lie(_: Loopback, one: PeerRequest, answer: PeerAnswer) -> PeerAnswer:
        values, arrays, what = answer.header.values, answer.arrays, getattr(one.values, "what", "")
        about = {"train": ["loss", "hash"], "recompute": ["recompute"], "optimize": ["optimize"]}
        lied = [what] if one.operation == "extract" else [*about.get(one.operation, [])]
        lied += ["kept"] * bool(one.operation == "train" and one.values.keep)
        if now[0] not in lied:
            return answer
        told.append(now[0])
        if now[0] in ("params", "own", "before"):
            arrays = [np.asarray(array * 1.5 + 1, array.dtype) for array in arrays]
        elif now[0] == "loss":
            arrays = [np.float32("nan"), *arrays[1:]]
        elif now[0] == "kept":
            arrays = [*arrays[:-1], np.full_like(arrays[-1], np.nan)]
        else:
            values |= {"hash": {"a": 10**400}} if now[0] != "optimize" else {"params": "0" * 64}
        now[0] = next(lies, "")
        return answer._replace(arrays=arrays)

    return lie


MORE = ("params", "own", "before", "recompute", "loss", "hash", "params", "optimize", "kept")


@pytest.mark.parametrize(
    ("rounds", "lies"),
    [(18, ("loss", "params", "optimize")), pytest.param(60, MORE, marks=pytest.mark.soak)],
)
def test_the_worst_answers_cost_their_author_its_place_and_nobody_is_accused(
    tmp_path, monkeypatch, caplog, rounds, lies
):
    told: list[str] = []
    lying(monkeypatch, one_after_the_other(*lies, told=told))
    run = simulated.run_of("signs", verified=True, **dict(LONG, total_steps=rounds))
    with caplog.at_level(logging.INFO):
        transcript, findings, _ = train(run, tmp_path)
    assert told == [*lies]
    lost = [m for r in caplog.records if " is lost: " in (m := r.getMessage())]
    assert len(lost) == len(lies)
    assert all(line.startswith(f"train: peer {LIAR} is") for line in lost)
    assert findings == []
    never_twice(transcript)
    assert np.isfinite([entry.loss for entry in transcript.rounds]).all()
    assert {peer for e in transcript.rounds for peer in e.evidence.silent} == {LIAR}


def test_a_peer_that_commits_to_a_false_state_and_goes_on_from_it_is_named_and_no_verifier(
    tmp_path, monkeypatch
):
    run = simulated.run_of("signs", verified=True)
    step, liar, drawn = 2, 5, consensus.checked  # which trains in it, and in the next round too

    def but_for_the_liar(round_: Round, evidence: Evidence) -> dict[int, int]:
        pairs = drawn(round_, evidence)
        return {v: p for v, p in pairs.items() if (round_.step, p) != (step, liar)}

    monkeypatch.setattr(consensus, "checked", but_for_the_liar)

    def lie(carrier: Loopback, one: PeerRequest, answer: PeerAnswer) -> PeerAnswer:
        if one.operation == "train" and one.values.step == step:
            peer = carrier.of[liar].operations
            false = jax.tree.map(lambda x: x * -1.5, peer.own)
            peer.own, answer.header.values["hash"] = false, tree_hash(false)
        return answer

    lying(monkeypatch, lie, liar)
    transcript, findings, _ = train(run, tmp_path / "lies")
    assert liar not in {check.peer for check in transcript.rounds[step - 1].evidence.checks}
    (check,) = [c for c in transcript.rounds[step].evidence.checks if c.peer == liar]
    assert check.found == transcript.rounds[step].evidence.messages[liar].claim
    assert (findings[0].round, findings[0].peer, findings[0].kind) == (step, liar, "state")
    assert {finding.peer for finding in findings} == {liar}
