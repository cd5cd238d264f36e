"""A peer of several processes: `[peers] processes`, joined by `jax.distributed`."""

import pytest

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from parts.carrier.carrier import PeerAnswer, Processes
from parts.carrier.requests import PeerRequest
from tests import tiny
from tests.parts.carrier.test_remote_peers import never_twice

pytestmark = pytest.mark.long

KILLED_IN = 3  # round
SGD = {"SGD": {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}}


@pytest.mark.parametrize("optimizer", ["SGD", pytest.param("Distro", marks=pytest.mark.soak)])
def test_a_peer_of_two_processes_computes_as_on_two_devices_and_comes_back_when_one_is_killed(
    tmp_path, monkeypatch, optimizer
):
    """A sum of two has no order, so that here, and only here, even an audit's bits are the same."""
    trained = []

    def ask(
        self: Processes, by_peer: dict[int, PeerRequest], seconds: float
    ) -> dict[int, PeerAnswer]:
        if any(one.operation == "train" for one in by_peer.values()):
            trained.append(sorted(self._of))
            if len(trained) == KILLED_IN:
                self._of[1, 1].child.kill()
        return before(self, by_peer, seconds)

    before = Processes.ask
    monkeypatch.setattr(Processes, "ask", ask)
    run_file, root = tiny.start(
        tmp_path,
        **tiny.SHORT_EPOCHS,
        **{"model__LLM__optimizer": SGD} if optimizer == "SGD" else {},  # which compiles soonest
        held_out__sequences=0,
        peers__fsdp=2,
        peers__processes=2,
        runtime__carrier="processes",
        runtime__answer_seconds=120.0,
    )
    output = tiny.make(run_file, root, "download", "convert", "train", devices=2)
    assert trained[0] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert output.count("peer 1 is lost") == output.count("is lost") == 1, output

    transcript = Transcript(root / "data/trained/transcript")
    killed = transcript.rounds[KILLED_IN - 1]
    assert (killed.evidence.silent, killed.decision.applied) == ((1,), (0,))
    assert transcript.rounds[-1].decision.applied == (0, 1)
    never_twice(transcript)

    tiny.make(run_file, root, "witness", devices=2)
    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["accepted"] and verdict["replayed_windows"] == [], verdict["findings"]
    assert "[peers] processes = 2" in verdict["not_comparable"]


# ---- Every carrier gives the same bytes, from the made file to the transcript ----


def test_peers_in_processes_give_the_bytes_of_peers_in_one_process(tmp_path):
    made = {}
    for carrier in ("in_process", "processes"):
        document = tiny.run_document(
            tiny.write_data(tmp_path / "tokens"),
            runtime__carrier=carrier,
            config__verification_percent=34,
            config__total_steps=3,
            peers__count=3,
            model__LLM__optimizer=SGD,
        )
        run_file = tmp_path / f"{carrier}.toml"
        tiny.write_run(run_file, document)
        root = tmp_path / carrier
        tiny.make(run_file, root, "download", "convert", "train")
        made[carrier] = tiny.contents(root / "data/trained")
    assert made["in_process"] == made["processes"]
