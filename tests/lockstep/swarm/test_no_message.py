"""What a peer's process says is a message may be none: it costs that peer its place, and no run."""

import logging

import numpy as np
import pytest

from lockstep.protocol.round import Round
from lockstep.swarm.delivery import Outbox
from lockstep.swarm.peers import Done, RoundSteps, SimulatedPeers
from lockstep.wire.message import WireError
from tests.lockstep.swarm import simulated
from tests.lockstep.swarm.test_lies import messages

ROUND = Round(1, 0, 0, 0, 1, (0,), {0: (0, 0)}, {}, (), ())


LIES = {  # about places, in each block
    "zero": np.zeros_like,
    "equal": lambda i: i[:, :1] + 0 * i,
    "once twice": lambda i: np.concatenate([i[:, :1], i[:, :-1]], axis=1),
    "negative": lambda i: (-1 - i.astype(np.int64)).astype(i.dtype),
    "largest": lambda i: np.full_like(i, np.iinfo(i.dtype).max),
    "one too large": lambda i: np.where(i == i[:, -1:], np.iinfo(i.dtype).max, i).astype(i.dtype),
    "backwards": lambda i: i[:, ::-1],
    "random": lambda i: np.random.default_rng(0).integers(0, 256, i.shape).astype(i.dtype),
}


def with_places(lie, message):
    return {
        name: one._replace(index_NK=lie(np.asarray(one.index_NK)))
        if hasattr(one, "index_NK")
        else with_places(lie, one)
        for name, one in message.items()
    }


@pytest.mark.parametrize("name", ["signs", "plain signs", "values"])
@pytest.mark.parametrize("lie", LIES)
def test_false_places_are_no_message(lie, name):
    form, (message, *_) = messages(name)
    outbox = Outbox(form)
    assert outbox.put(message, 0, ROUND).result().largest >= 0
    with pytest.raises(WireError):
        outbox.put(with_places(LIES[lie], message), 0, ROUND).result()


def spoil(monkeypatch, spoilt: dict) -> None:
    """Of some rounds, what a peer's step gives for its message."""
    honest = SimulatedPeers.step

    def step(self: SimulatedPeers, asked: RoundSteps) -> dict[int, Done]:
        who, change = spoilt.get(asked.number, (None, None))

        def pack(message, peer):
            return asked.pack(change(message) if peer == who else message, peer)

        return honest(self, asked._replace(pack=pack))

    monkeypatch.setattr(SimulatedPeers, "step", step)


def huge(message):
    return {
        name: one._replace(value_NK=one.value_NK * 0 + 1e30)
        if hasattr(one, "value_NK")
        else huge(one)
        for name, one in message.items()
    }


def test_a_run_goes_on_without_whose_message_is_none_and_its_audit_finds_the_same(
    tmp_path, monkeypatch, caplog
):
    fault = {"kind": "scale_up", "peer": 4, "size": 1e30, "rounds": [6, 6]}
    run = simulated.run_of("values", fault, **dict(simulated.BY_TIME, total_steps=8))
    spoil(
        monkeypatch,
        {2: (1, lambda message: with_places(LIES["zero"], message)), 4: (2, huge)},
    )
    with caplog.at_level(logging.INFO):
        seen = simulated.see("values", run, tmp_path)
    said = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    begin = [
        "train: peer 1 is lost: its message is invalid at round 2: ",
        "train: peer 2 is lost: ",
    ]
    assert all(line.startswith(text) for line, text in zip(said, begin, strict=True))
    assert "Rice parameters" in said[0] and "a value of 1e+30, expected at most" in said[1]
    silent = {e.round.step: e.evidence.silent for e in seen.transcript.rounds}
    assert silent[2] == (1,) and silent[4] == (2,)
    assert [e.evidence.broken for e in seen.transcript.rounds if e.evidence.broken] == [(4,)]
    assert seen.ejected == {4: (6, "no message")}  # which the audit came to as well
    assert seen.blamed == [(6, 4, "payload", False), (6, 4, "message", False)]
    assert np.isfinite([entry.loss for entry in seen.transcript.rounds]).all()
