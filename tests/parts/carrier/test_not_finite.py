"""NaN of one peer costs it its place in a process of its own too, with the same bytes."""

from collections.abc import Mapping

from parts.carrier.carrier import Answered
from parts.carrier.requests import Asked
from tests.lockstep.swarm import simulated
from tests.lockstep.swarm.test_no_message import LOST, SPOILT, nan, spoil_all
from tests.parts.carrier import test_remote_peers
from tests.parts.carrier.loopback import Loopback

STEP = 3


def test_one_peers_nan_costs_it_its_place_wherever_peers_run(tmp_path, monkeypatch):
    there = Loopback.ask

    def step_there(
        self: Loopback, asked: Mapping[int, Asked], seconds: float
    ) -> dict[int, Answered]:
        answers = there(self, asked, seconds)
        for peer in {SPOILT} & answers.keys():
            values = asked[peer].values
            if asked[peer].operation == "train" and values.step == STEP:
                assert not values.keep
                answers[peer] = answers[peer]._replace(arrays=nan(answers[peer].arrays))
        return answers

    spoil_all(monkeypatch, {SPOILT}, STEP)
    monkeypatch.setattr(Loopback, "ask", step_there)
    here = simulated.lab("dense").train(LOST, tmp_path / "here").transcript
    remote, _, _ = test_remote_peers.train(LOST, tmp_path / "there", "dense")
    assert remote.hash == here.hash
