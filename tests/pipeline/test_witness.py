"""Stage witness: what it replays, what its policy makes of findings, and how it goes on."""

from pathlib import Path

import jax
import pytest

from lockstep.files import read_json
from pipeline import runfile, witness
from pipeline.audit.replay import Replay
from pipeline.stage import devices
from pipeline.stage.artifacts import Paths
from tests import tiny

pytestmark = pytest.mark.long

CAUGHT = {"kind": "malformed", "peer": 1, "rounds": [2, 2]}


class Trained:
    """A finished training of 6 rounds and 3 peers; peer 1 was caught in round 2 and sent away."""

    def __init__(self, folder: Path):
        self.data, self.run_file = tiny.write_data(folder / "tokens"), folder / "run.toml"
        self.root = folder / "root"
        self.set()
        tiny.make(self.run_file, self.root, "download", "convert", "train")

    def set(self, **changes: object) -> Paths:
        asked = {f"witness__{name}": value for name, value in changes.items()}
        document = tiny.run_document(self.data, peers__count=3, faults__schedule=[CAUGHT], **asked)
        tiny.write_run(self.run_file, document)
        return Paths("witness", self.run_file, self.root)

    def verdict(self, **changes: object) -> dict:
        paths = self.set(**changes)
        witness.run(runfile.load(self.run_file), paths)
        return read_json(paths.out("witness") / "verdict.json")

    def contents(self) -> dict[str, bytes]:
        return tiny.contents(self.root / "data/verdict")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(autouse=True)
def one_device_and_programs_in_common(monkeypatch):
    """Each device would compile all programs, each audit would trace them anew, and the stage would
    move the process's store of them."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: first)
    monkeypatch.setattr("pipeline.start.set_up.programs_of", tiny.programs_in_common)
    monkeypatch.setattr(devices, "keep_compiled", lambda folder: None)


def replayed(verdict: dict) -> list[tuple[int, int]]:
    return [(row["window"], row["peer"]) for row in verdict["replayed_windows"]]


@pytest.mark.parametrize(("policy", "accepted"), [("applied", True), ("strict", False)])
def test_a_liar_that_was_caught_in_its_round_is_named_and_refused_by_the_strict_policy_only(
    trained, policy, accepted
):
    verdict = trained.verdict(policy=policy)
    assert (verdict["accepted"], verdict["policy"]) == (accepted, policy)
    found = [(f["round"], f["peer"], f["kind"], f["applied"]) for f in verdict["findings"]]
    assert found == [(2, 1, "payload", False)]
    assert verdict["ejected"] == {"1": 2}
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 5  # ejected, it sent no more
    assert (1, 1) not in replayed(verdict)


def test_a_window_asked_for_by_name_is_replayed_and_no_other(trained):
    assert replayed(trained.verdict(replay_percent=0, replay=["1:0"])) == [(1, 0)]
    assert replayed(trained.verdict(replay_percent=0, replay=[])) == []
    found = replayed(trained.verdict(replay_percent=0, replay=["1:2", "0:1", "1:2"]))
    assert found == [(0, 1), (1, 2)]


def test_windows_asked_for_come_on_top_of_the_sample(trained):
    drawn = replayed(trained.verdict(replay_percent=33, seed="mine"))
    assert len(drawn) == 2
    window, peer = next((w, p) for w in (0, 1) for p in range(3) if (w, p) not in drawn)
    more = [f"{window}:{peer}"]
    found = replayed(trained.verdict(replay_percent=33, seed="mine", replay=more))
    assert found == sorted([*drawn, (window, peer)])


class Killed(BaseException):
    pass


def test_a_killed_audit_goes_on_where_it_was_and_ends_with_the_same_bytes(trained, monkeypatch):
    trained.verdict()
    expected, window, done = trained.contents(), Replay.window, []

    def until_the_second(self: Replay, steps, *rest) -> list:
        if steps.first == 4:
            raise Killed
        return window(self, steps, *rest)

    def counted(self: Replay, steps, *rest) -> list:
        done.append(steps.first)
        return window(self, steps, *rest)

    monkeypatch.setattr(Replay, "window", until_the_second)
    with pytest.raises(Killed):
        trained.verdict()
    monkeypatch.setattr(Replay, "window", counted)
    trained.verdict()
    assert done == [4]  # the first was kept
    assert trained.contents() == expected
    assert not trained.set().scratch.exists()


def test_what_an_audit_kept_of_a_window_is_believed_by_the_same_audit_only(trained, monkeypatch):
    def killed(self: Replay, steps, *rest) -> list:
        raise Killed

    monkeypatch.setattr(Replay, "window", killed)
    kept = trained.set().scratch / "windows"
    for first in (1, 4):
        kept.mkdir(parents=True, exist_ok=True)
        (kept / f"{first:05}.json").write_text('{"findings": [], "peers": [], "why": null}')
    trained.verdict()  # replays nothing
    with pytest.raises(Killed):
        trained.verdict(seed="another")
