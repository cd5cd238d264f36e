"""NaN of one peer is that peer's; NaN of all is divergence."""

import logging
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from pipeline.carrier.carrier import Answered, Asked
from pipeline.swarm.begin import make_peers
from pipeline.swarm.peers import Done, RoundSteps, SimulatedPeers
from pipeline.swarm.swarm import NotFiniteError
from pipeline.transcript.state import State
from tests.pipeline.carrier import test_remote_peers
from tests.pipeline.carrier.loopback import Loopback
from tests.pipeline.swarm import simulated

SPOILT = 2  # a peer
RUN = simulated.run_of("dense")


def nan(tree):
    return jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tree)


def spoil(monkeypatch, peers: set[int], step: int) -> None:
    """Of some peers, loss and message of a round are NaN, wherever they run."""
    here, there = SimulatedPeers.step, Loopback.ask

    def step_here(self: SimulatedPeers, asked: RoundSteps) -> dict[int, Done]:
        done = here(self, asked)
        for peer in peers & done.keys() if asked.number == step else ():
            done[peer] = done[peer]._replace(message=nan(done[peer].message), loss=float("nan"))
        return done

    def step_there(
        self: Loopback, asked: Mapping[int, Asked], seconds: float
    ) -> dict[int, Answered]:
        answers = there(self, asked, seconds)
        for peer in peers & answers.keys():
            values = asked[peer].values
            if asked[peer].operation == "train" and values["step"] == step:
                assert not values["keep"]
                answers[peer] = answers[peer]._replace(arrays=nan(answers[peer].arrays))
        return answers

    monkeypatch.setattr(SimulatedPeers, "step", step_here)
    monkeypatch.setattr(Loopback, "ask", step_there)


def test_one_peers_nan_is_refused_and_named_and_the_mean_loss_is_of_the_others(
    tmp_path, monkeypatch, caplog
):
    honest = simulated.lab("dense").train(RUN, tmp_path / "honest").transcript
    spoil(monkeypatch, {SPOILT}, 3)
    with caplog.at_level(logging.INFO, "pipeline.swarm"):
        here = simulated.lab("dense").train(RUN, tmp_path / "here").transcript
    assert {record.getMessage() for record in caplog.records} == {
        "round 3: peer 2's loss is nan, others' are not",
        "round 3: peer 2's message is refused: array 0: a value is not finite",
    }
    assert {p: e.round.step for e in here.rounds for p in e.decision.ejected} == {SPOILT: 3}
    assert np.isfinite([entry.loss for entry in here.rounds]).all()
    assert here.rounds[1].loss == honest.rounds[1].loss
    assert here.rounds[2].loss != honest.rounds[2].loss
    there, _, _ = test_remote_peers.train(RUN, tmp_path / "there", "dense")
    assert there.hash == here.hash


def test_nan_of_all_peers_is_divergence_that_names_its_cause(tmp_path, monkeypatch):
    spoil(monkeypatch, set(range(simulated.PEERS)), 2)
    with pytest.raises(NotFiniteError, match="^loss is nan at round 2$"):
        simulated.lab("dense").train(RUN, tmp_path / "loss")
    spoilt = SimulatedPeers.step

    def finite_loss(self: SimulatedPeers, asked: RoundSteps) -> dict[int, Done]:
        return {peer: one._replace(loss=1.0) for peer, one in spoilt(self, asked).items()}

    monkeypatch.setattr(SimulatedPeers, "step", finite_loss)
    with pytest.raises(NotFiniteError, match="^no peer's message is finite at round 2: gradients"):
        simulated.lab("dense").train(RUN, tmp_path / "message")


GOOD, BAD = {"w": np.ones(2)}, {"w": np.array([1, np.inf])}


@pytest.mark.parametrize(
    ("state", "senders", "expected"),
    [
        (State(GOOD, GOOD, (GOOD, GOOD)), {0, 1}, None),
        (State(BAD, GOOD, (GOOD, GOOD)), {0, 1}, "params/w"),
        (State(GOOD, BAD, (GOOD, BAD)), {0, 1}, "shared/w"),
        (State(GOOD, GOOD, (GOOD, BAD)), {0, 1}, None),  # peer 1's own affair
        (State(GOOD, GOOD, (BAD, BAD)), {0, 1}, "own/0/w"),
        (State(GOOD, GOOD, (GOOD, BAD)), {1}, "own/1/w"),
        (State(GOOD, GOOD, (GOOD, BAD)), {0}, None),  # ejected before
        (State(GOOD, GOOD, (GOOD, BAD)), set(), None),
    ],
)
def test_training_diverged_where_no_sender_has_a_finite_state(state, senders, expected):
    assert state.diverged(senders) == expected


def test_what_a_peer_made_of_its_own_state_can_be_snapshot_and_read(tmp_path, monkeypatch):
    taken = make_peers

    def spoilt(*arguments):
        peers = taken(*arguments)
        restart = peers.state

        def state() -> State:
            found = restart()
            own = [nan(tree) if peer == SPOILT else tree for peer, tree in enumerate(found.own)]
            return found._replace(own=tuple(own))

        peers.state = state
        return peers

    monkeypatch.setattr("benchmarks.simulated.make_peers", spoilt)
    run = simulated.run_of("signs")
    trained = simulated.lab("signs").train(run, tmp_path)
    found = simulated.lab("signs").audit(run, trained.transcript)
    assert {finding.peer for finding in found} == {SPOILT}
