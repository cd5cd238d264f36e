"""A verdict's findings are found again, or are said to be stated, or refuse the publication."""

from types import SimpleNamespace

import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.windows import Window
from parts.publication import publish
from parts.publication.checks import accusations
from parts.publication.drawn import DrawnWindow
from pipeline.audit import bundle
from pipeline.audit.verdict import Finding, Replayed
from tests import tiny
from tests.parts.publication.published_run import STAGES, verify

FIRST, SECOND = WINDOWS = [Window(1, 3), Window(4, 6)]
CAUGHT = Finding(2, 0, "ejected", "caught in its round: false check", False)


def of_replay(step: int, peer: int, kind: str = "message", detail: str = "d") -> Finding:
    window = FIRST if step in FIRST.rounds else SECOND
    return Finding(step, peer, kind, detail, False, bundle.name(window, peer))


LIE = of_replay(2, 1)
FALSE_CHECK = of_replay(5, 0, "check", "recomputed the step of peer 1 as abc, its replay gives d")


def compared(said, rounds=(), found=(), *, bitwise=True, method="bitwise"):
    """What is known of some findings, where the first window of peer 1 was repeated."""
    chosen = [DrawnWindow(FIRST, (1,))]
    audited = SimpleNamespace(findings=list(rounds), windows=WINDOWS, chosen=chosen)
    replayed = [Replayed(n, *window, 1) for n, window in enumerate(WINDOWS)]
    verdict = SimpleNamespace(findings=said, method=method, replayed_windows=replayed)
    return accusations.check(audited, verdict, list(found), bitwise=bitwise)


def test_what_was_found_again_is_shown_and_what_was_not_repeated_is_stated():
    assert compared([LIE, FALSE_CHECK, CAUGHT], [CAUGHT], [LIE]) == (
        [LIE, CAUGHT],
        [FALSE_CHECK],
        2,
    )
    assert compared([LIE], [], [], bitwise=False) == ([], [LIE], 2)  # below a reader's tolerance
    farther = of_replay(1, 1)
    assert compared([LIE], [], [farther], method="tolerance") == ([LIE], [], 2)


def test_whom_a_finding_of_a_replay_explains_is_not_named_twice():
    caught = Finding(2, 1, "ejected", "caught in its round", False)
    assert compared([LIE], [caught], [LIE]).shown == [LIE]


@pytest.mark.parametrize(
    "said, rounds, found, why",
    [
        ([CAUGHT], [], [], "findings has peer 0 in round 2 (ejected)"),
        ([], [CAUGHT], [], "findings lacks peer 0 in round 2 (ejected)"),
        ([CAUGHT, CAUGHT], [CAUGHT], [], "findings has peer 0 in round 2 (ejected)"),
        ([LIE], [], [], "since window 1-3 of peer 1 does not show it"),
        ([of_replay(2, 1, "message", "other")], [], [LIE], "window 1-3 of peer 1 does not show it"),
        ([of_replay(2, 0)], [], [], "since no window was replayed that could show it"),
        ([], [], [LIE], "round 2, peer 1, message: d"),
    ],
    ids=["invented", "left out", "twice", "not shown", "another", "not replayed", "not said"],
)
def test_findings_are_compared_both_ways(said, rounds, found, why):
    with pytest.raises(LockstepError) as caught:
        compared(said, rounds, found)
    assert why in str(caught.value)


@pytest.mark.soak
def test_an_honest_verdict_that_names_liars_verifies(tmp_path):
    document = tiny.run_document(
        tiny.write_data(tmp_path / "tokens"),
        config__verification_percent=34,
        config__init_min_clients=3,
        config__global_batch_size_start=6,
        config__global_batch_size_end=6,
        peers__count=5,
        faults__schedule=[
            {"kind": "false_verifier", "peer": 0, "rounds": [1, 6]},
            {"kind": "wrong_hash", "peer": 4, "rounds": [1, 6]},
        ],
    )
    run_file, root = tmp_path / "run.toml", tmp_path / "root"
    tiny.write_run(run_file, document)
    tiny.make(run_file, root, *STAGES)
    for name, count, is_shown in (("whole", 99, True), ("one", 1, False)):
        publish.write(tmp_path / name, run_file, root, count, None)
        verified = verify(tmp_path / name)
        assert "what the author's audit found of peer 4 in round 1 (commitment)" in verified.text
        (claim,) = (c for c in verified.claims if "peer 0 in round 1 (check)" in c.text)
        assert claim.kind == ("proven" if is_shown else "stated")
