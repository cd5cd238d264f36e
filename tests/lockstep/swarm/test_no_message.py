"""What is no message, or not finite, costs its peer its place; of all peers it is divergence."""

import logging
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.protocol.round import Round
from lockstep.swarm.delivery import Outbox
from lockstep.swarm.peers import RoundSteps, SimulatedPeers, StepResult
from lockstep.swarm.swarm import NotFiniteError
from lockstep.wire.leaves.chosen import Signs, Values
from lockstep.wire.message import WireError
from tests.lockstep.swarm import simulated
from tests.lockstep.wire.test_leaves import form_of

SPOILT = 2  # a peer
RUN = simulated.run_of("dense")
LOST = simulated.run_of("dense", witness_nodes=0, **dict(simulated.BY_TIME, total_steps=14))


def nan(tree):
    return jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), tree)


def spoil(monkeypatch, spoilt: dict) -> None:
    """By round, what some peers' steps in this process give for a message."""
    honest = SimulatedPeers.step

    def step(self: SimulatedPeers, steps: RoundSteps) -> dict[int, StepResult]:
        peers, change = spoilt.get(steps.number, ((), None))

        def pack(message, peer):
            return steps.pack(change(message) if peer in peers else message, peer)

        return honest(self, steps._replace(pack=pack))

    monkeypatch.setattr(SimulatedPeers, "step", step)


def spoil_all(monkeypatch, peers: set[int], step: int) -> None:
    """Of some peers, loss and message of a round are NaN."""
    spoil(monkeypatch, {step: (peers, nan)})
    here = SimulatedPeers.step

    def step_here(self: SimulatedPeers, steps: RoundSteps) -> dict[int, StepResult]:
        spoilt = peers if steps.number == step else set()
        done = here(self, steps)
        return {p: d._replace(loss=float("nan")) if p in spoilt else d for p, d in done.items()}

    monkeypatch.setattr(SimulatedPeers, "step", step_here)


def test_one_peers_nan_costs_it_its_place_and_nobody_is_accused(tmp_path, monkeypatch, caplog):
    spoil_all(monkeypatch, {SPOILT}, 3)
    with caplog.at_level(logging.INFO):
        here = simulated.lab("dense").train(LOST, tmp_path / "here").transcript
    assert [record.getMessage() for record in caplog.records] == [
        "train: peer 2 is lost: its loss or gradient is nan at round 3, others' are finite"
    ]
    assert [e.round.step for e in here.rounds if e.evidence.silent == (SPOILT,)] == [3]
    assert not any(entry.decision.ejected for entry in here.rounds)
    assert any(SPOILT in e.round.joined for e in here.rounds)
    assert SPOILT in here.rounds[-1].decision.applied
    assert np.isfinite([entry.loss for entry in here.rounds]).all()
    assert simulated.lab("dense").audit(LOST, here) == []


def test_a_run_that_is_killed_while_a_peer_is_lost_goes_on_as_if_it_were_not(monkeypatch):
    run = simulated.run_of("dense", witness_nodes=0, **dict(simulated.BY_TIME, total_steps=10))
    spoil_all(monkeypatch, {SPOILT}, 3)
    whole = simulated.entries("dense", run, killed=False)
    assert simulated.entries("dense", run, killed=True) == whole


def test_a_message_that_only_one_peer_has_not_finite_costs_it_its_place(
    tmp_path, monkeypatch, caplog
):
    spoil_all(monkeypatch, {SPOILT}, 8)
    spoilt = SimulatedPeers.step
    monkeypatch.setattr(SimulatedPeers, "step", finite_loss(spoilt))
    with caplog.at_level(logging.INFO):
        transcript = simulated.lab("dense").train(RUN, tmp_path).transcript
    assert [record.getMessage() for record in caplog.records] == [
        "train: peer 2 is lost: its message is not finite at round 8, others' are finite"
    ]
    assert transcript.rounds[-1].evidence.silent == (SPOILT,)


def finite_loss(step):
    def with_finite_loss(self: SimulatedPeers, steps: RoundSteps) -> dict[int, StepResult]:
        return {peer: one._replace(loss=1.0) for peer, one in step(self, steps).items()}

    return with_finite_loss


def test_nan_of_all_peers_is_divergence_that_names_its_cause(tmp_path, monkeypatch):
    spoil_all(monkeypatch, set(range(simulated.PEERS)), 2)
    with pytest.raises(NotFiniteError, match="^loss or gradients are nan at round 2$"):
        simulated.lab("dense").train(RUN, tmp_path / "loss")
    monkeypatch.setattr(SimulatedPeers, "step", finite_loss(SimulatedPeers.step))
    with pytest.raises(NotFiniteError, match="^no peer's message is finite at round 2: gradients"):
        simulated.lab("dense").train(RUN, tmp_path / "message")


ROUND = Round(1, 0, 0, 0, 1, (0,), {0: (0, 0)}, {}, (), ())


LIES = {  # about places, in each block
    "zero": np.zeros_like,
    "once twice": lambda i: np.concatenate([i[:, :1], i[:, :-1]], axis=1),
    "one too large": lambda i: np.where(i == i[:, -1:], np.iinfo(i.dtype).max, i).astype(i.dtype),
    "backwards": lambda i: i[:, ::-1],
}


def each(change, message):
    def changed(one):
        return change(one) if isinstance(one, Coefficients) else one

    return jax.tree.map(changed, message, is_leaf=lambda one: isinstance(one, Coefficients))


def with_places(lie, message):
    return each(lambda one: one._replace(index_NK=lie(np.asarray(one.index_NK))), message)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    ("kind", "layout"), [(Signs, "lockstep"), (Signs, "psyche"), (Values, "lockstep")]
)
def test_false_places_are_no_message(kind, layout, lie):
    form, (message, *_) = form_of(kind, layout)
    outbox = Outbox(SimpleNamespace(form=form))
    assert outbox.put(message, 0, ROUND).make().largest >= 0
    with pytest.raises(WireError):
        outbox.put(with_places(LIES[lie], message), 0, ROUND).make()


def huge(message):
    return each(lambda one: one._replace(value_NK=one.value_NK * 0 + 1e30), message)


@pytest.mark.long
def test_a_run_goes_on_without_whose_message_is_none_and_its_audit_finds_the_same(
    tmp_path, monkeypatch, caplog
):
    fault = {"kind": "scale_up", "peer": 4, "size": 1e30, "rounds": [6, 6]}
    run = simulated.run_of("values", fault, **dict(simulated.BY_TIME, total_steps=8))
    spoil(
        monkeypatch, {2: ({1}, lambda message: with_places(LIES["zero"], message)), 4: ({2}, huge)}
    )
    with caplog.at_level(logging.INFO):
        seen = simulated.see("values", run, tmp_path)
    said = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    begin = [
        "train: peer 1 is lost: its message is invalid at round 2: ",
        "train: peer 2 is lost: ",
    ]
    assert all(line.startswith(text) for line, text in zip(said, begin, strict=True))
    assert " bytes, expected at most" in said[0] and "a value of 1e+30, expected at most" in said[1]
    silent = {e.round.step: e.evidence.silent for e in seen.transcript.rounds}
    assert silent[2] == (1,) and silent[4] == (2,)
    assert [e.evidence.broken for e in seen.transcript.rounds if e.evidence.broken] == [(4,)]
    assert seen.ejected == {4: (6, "no message")}  # which the audit came to as well
    assert seen.blamed == [(6, 4, "payload", False), (6, 4, "message", False)]
    assert np.isfinite([entry.loss for entry in seen.transcript.rounds]).all()
