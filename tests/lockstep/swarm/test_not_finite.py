"""NaN of one peer is that peer's; NaN of all is divergence."""

import logging

import jax
import numpy as np
import pytest

from lockstep.swarm.peers import Done, RoundSteps, SimulatedPeers
from lockstep.swarm.swarm import NotFiniteError
from tests.lockstep.swarm import simulated

SPOILT = 2  # a peer
RUN = simulated.run_of("dense")
LOST = simulated.run_of("dense", witness_nodes=0, **dict(simulated.BY_TIME, total_steps=14))


def nan(tree):
    return jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tree)


def spoil(monkeypatch, peers: set[int], step: int) -> None:
    """Of some peers, loss and message of a round are NaN."""
    here = SimulatedPeers.step

    def step_here(self: SimulatedPeers, asked: RoundSteps) -> dict[int, Done]:
        spoilt = peers if asked.number == step else set()

        def pack(message, peer):
            return asked.pack(nan(message) if peer in spoilt else message, peer)

        done = here(self, asked._replace(pack=pack))
        return {p: d._replace(loss=float("nan")) if p in spoilt else d for p, d in done.items()}

    monkeypatch.setattr(SimulatedPeers, "step", step_here)


def test_one_peers_nan_costs_it_its_place_and_nobody_is_accused(tmp_path, monkeypatch, caplog):
    spoil(monkeypatch, {SPOILT}, 3)
    with caplog.at_level(logging.INFO):
        here = simulated.lab("dense").train(LOST, tmp_path / "here").transcript
    assert [record.getMessage() for record in caplog.records] == [
        "train: peer 2 is lost: its loss is nan at round 3, others' are finite"
    ]
    assert [e.round.step for e in here.rounds if e.evidence.silent == (SPOILT,)] == [3]
    assert not any(entry.decision.ejected for entry in here.rounds)
    assert any(SPOILT in e.round.joined for e in here.rounds)
    assert SPOILT in here.rounds[-1].decision.applied
    assert np.isfinite([entry.loss for entry in here.rounds]).all()
    assert simulated.lab("dense").audit(LOST, here) == []


def test_a_run_that_is_killed_while_a_peer_is_lost_goes_on_as_if_it_were_not(monkeypatch):
    run = simulated.run_of("dense", witness_nodes=0, **dict(simulated.BY_TIME, total_steps=10))
    spoil(monkeypatch, {SPOILT}, 3)
    whole = simulated.entries("dense", run, killed=False)
    assert simulated.entries("dense", run, killed=True) == whole


def test_a_message_that_only_one_peer_has_not_finite_costs_it_its_place(
    tmp_path, monkeypatch, caplog
):
    spoil(monkeypatch, {SPOILT}, 8)
    spoilt = SimulatedPeers.step
    monkeypatch.setattr(SimulatedPeers, "step", finite_loss(spoilt))
    with caplog.at_level(logging.INFO):
        transcript = simulated.lab("dense").train(RUN, tmp_path).transcript
    assert [record.getMessage() for record in caplog.records] == [
        "train: peer 2 is lost: its message is not finite at round 8, others' are finite"
    ]
    assert transcript.rounds[-1].evidence.silent == (SPOILT,)


def finite_loss(step):
    def with_finite_loss(self: SimulatedPeers, asked: RoundSteps) -> dict[int, Done]:
        return {peer: one._replace(loss=1.0) for peer, one in step(self, asked).items()}

    return with_finite_loss


def test_nan_of_all_peers_is_divergence_that_names_its_cause(tmp_path, monkeypatch):
    spoil(monkeypatch, set(range(simulated.PEERS)), 2)
    with pytest.raises(NotFiniteError, match="^loss is nan at round 2$"):
        simulated.lab("dense").train(RUN, tmp_path / "loss")
    monkeypatch.setattr(SimulatedPeers, "step", finite_loss(SimulatedPeers.step))
    with pytest.raises(NotFiniteError, match="^no peer's message is finite at round 2: gradients"):
        simulated.lab("dense").train(RUN, tmp_path / "message")
