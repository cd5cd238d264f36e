"""A verdict's findings are found again, or are said to be stated, or refuse the publication."""

import re
from types import SimpleNamespace

import pytest

from lockstep.transcript.windows import Window
from pipeline.audit import bundle
from pipeline.audit.replay import WindowOutcome
from pipeline.audit.verdict import SHOWN_BY, Finding, Replayed
from pipeline.recheck.witness import _accused, check_findings
from pipeline.stage.keys import PROJECT
from tests.errors import refused

FIRST, SECOND = WINDOWS = [Window(1, 3), Window(4, 6)]
CAUGHT = Finding(2, 0, "ejected", "caught in its round: false check", False)


def of_replay(step: int, peer: int, kind: str = "message", detail: str = "d") -> Finding:
    window = FIRST if step in FIRST.rounds else SECOND
    return Finding(step, peer, kind, detail, False, bundle.name(window, peer))


LIE = of_replay(2, 1)
FALSE_CHECK = of_replay(5, 0, "check", "recomputed the step of peer 1 as abc, its replay gives d")


def compared(said, rounds=(), found=(), *, comparable=True):
    """What is known of some findings, where the first window of peer 1 was repeated."""
    audited = SimpleNamespace(
        findings=list(rounds), windows=WINDOWS,
        transcript=SimpleNamespace(senders=lambda window: {0, 1}),
    )  # fmt: skip
    outcome = (
        WindowOutcome(list(found), (1,)) if comparable else WindowOutcome([], (), "another machine")
    )
    replayed = [Replayed(n, *window, 1) for n, window in enumerate(WINDOWS)]
    verdict = SimpleNamespace(findings=said, replayed_windows=replayed)
    return check_findings(audited, verdict, {FIRST: outcome})


def test_what_was_found_again_is_shown_and_what_was_not_repeated_is_stated():
    assert compared([LIE, FALSE_CHECK, CAUGHT], [CAUGHT], [LIE]) == (
        [LIE],
        [FALSE_CHECK, CAUGHT],
        2,
    )
    idle = of_replay(2, 2, "state")  # of a window without messages, which no verdict counts
    assert compared([idle], [], []) == ([], [idle], 2)
    assert compared([LIE], comparable=False) == ([], [LIE], 2)  # the reader's machine is another


def test_whom_a_finding_of_a_replay_explains_is_not_named_twice():
    caught = Finding(2, 1, "ejected", "caught in its round", False)
    assert compared([LIE], [caught], [LIE]).shown == [LIE]


WORDS = {"replay": "proven", "bytes": "proven", "record": "stated"}


@pytest.mark.parametrize("kind", SHOWN_BY)
def test_what_only_the_authors_record_shows_is_stated(kind):
    if SHOWN_BY[kind] == "replay":
        said = of_replay(2, 1, kind, "recomputed the step of peer 1 as abc, its replay gives d")
        accusations = compared([said], [], [said])
    else:
        found = Finding(2, 1, kind, "d", False)
        said = of_replay(2, 1, kind) if kind in bundle.KINDS else found
        accusations = compared([said], [found])
    (claim,) = (c for c in _accused(accusations) if c.name != "verdict")
    assert claim.kind == WORDS[SHOWN_BY[kind]] and f"({kind})" in claim.text


def test_every_kind_of_finding_against_a_peer_says_what_shows_it():
    page = (PROJECT / "docs/reference/verdict.md").read_text().split("## Kinds of findings")[1]
    rows = re.findall(r"^\| (`.+`) \|.+\| the (?:peer|verifier|witness)", page, re.M)
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row)} == SHOWN_BY.keys()


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
    with refused(why):
        compared(said, rounds, found)
