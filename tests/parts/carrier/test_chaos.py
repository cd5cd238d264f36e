"""Real processes, killed, stopped, cut off and started again while they train."""

import pytest

from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from tests import tiny
from tests.parts.carrier.chaos import EVENTS, Chaos
from tests.parts.carrier.test_remote_peers import never_twice


@pytest.mark.soak
@pytest.mark.parametrize(
    ("seed", "events", "rounds", "kinds"),
    [
        (0, 5, 60, ("kill", "crowd", "harm", "cut", "trainer")),
        *((s, 25, 400, EVENTS) for s in range(4)),
    ],
)
def test_whatever_happens_to_processes_none_outlives_its_trainer_and_the_audit_accepts(
    tmp_path, seed, events, rounds, kinds
):
    chaos = Chaos(tmp_path, seed, rounds, 4 + seed)
    try:
        chaos.go(events, kinds)
    except AssertionError as error:
        raise AssertionError(
            f"seed {seed}: {error}\n{(tmp_path / 'log.txt').read_text()}"
        ) from None
    finally:
        chaos.close()
    transcript = Transcript(chaos.root / "data/trained/transcript")
    assert len(transcript.rounds) == rounds
    never_twice(transcript)
    assert "its params are" not in (tmp_path / "log.txt").read_text()  # all had the same, always
    tiny.make(chaos.run_file, chaos.root, "witness")
    verdict = read_json(chaos.root / "data/verdict/verdict.json")
    assert verdict["accepted"] and verdict["not_comparable"] is None, verdict["findings"]
    print(dict(chaos.counts))
