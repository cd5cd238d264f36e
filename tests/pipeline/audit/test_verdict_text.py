"""verdict.txt, and the sentences about a verdict that the pages share."""

import pytest

from pipeline.audit import verdict_text
from tests.pipeline.finished_run import CAUGHT, LIAR, verdict


def said_of(verdict: dict) -> str:
    """The text as one line, since where lines break is no matter."""
    text = verdict_text.render(verdict)
    for line in text.splitlines():  # a hash has no place to break it
        assert len(line) <= verdict_text.LINE_WIDTH or max(map(len, line.split())) > 60, line
    return " ".join(text.split())


WHY = "jax is 'B' here, was 'A' in training"
# A verdict, and what stands in its text.
SAID = {
    "refused": (
        verdict((LIAR,)),
        *("REFUSED: 1 of 1 finding", "policy applied", "bit for bit", "all 40 rounds"),
        *("4 of 16 windows: rounds 1-10 of peer 3; 11-20 of peer 2;", "5eed" * 16),
        *("transcript's own hash; whoever", "late peer 3 (1 message)", "round 12, peer 2: message"),
        "sent 0123, its replay gives <4567> lockstep replay data/verdict/bundles/00011-00020-peer-",
    ),
    "accepted": (
        verdict((CAUGHT,), dropped={"0": 7, "1": 9}, late={"0": 2})
        | {"sample_seed": "5eed", "sample_seed_of": "auditor"},
        *("accepted: 0 of 1 finding", "ejected peer 2 in round 12", "the auditor's own"),
        "dropped out peer 0 in round 7, peer 1 in round 9 late peer 0 (2 messages)",
    ),
    "nothing found": (verdict(), "accepted: no findings"),
    "strict": (
        verdict((CAUGHT,), policy="strict", accepted=False),
        "REFUSED: 1 finding (policy st",
    ),
    "sampled": (
        verdict(drawn_windows=4),
        *("s = 4 of 16 windows = 0.25", "0.25 for n = 1, 0.44 for n = 2, 0.68 for n = 4"),
    ),
    "not comparable": (
        verdict(not_comparable=WHY, replayed_windows=[], drawn_windows=0),
        *("NOT COMPARABLE HERE: no findings", "accuses nobody", WHY, "0 of 16 windows"),
    ),
    "in part": (
        verdict(not_comparable=WHY, drawn_windows=2),
        *("accepted: no findings", "the other windows bit for bit; not comparable here", WHY),
        *("s = 2 of 16 windows", "of its windows that can be compared here"),
    ),
    "nothing replayed": (
        verdict(replayed_windows=[], drawn_windows=0),
        *("compared not at all", "0 of 16 windows"),
    ),
    "the wall's clock": (verdict(clock="wall"), "on the wall's clock every arrival"),
}


@pytest.mark.parametrize("case", SAID)
def test_the_text_has_what_the_verdict_has(case):
    verdict, *parts = SAID[case]
    text = said_of(verdict)
    assert [part for part in parts if part not in text] == []
    assert "stated by the transcript's author, and computed again by nobody: all losses" in text
    assert ("whoever wrote" in text) == (case != "accepted")
    assert ("on the wall's clock" in text) == (case == "the wall's clock")


def test_a_seed_cannot_steer_a_terminal():
    assert "\x1b" not in verdict_text.render(verdict(sample_seed="\x1b[2J"))


@pytest.mark.parametrize(
    ("ejected", "said"),
    [
        ({}, "2 liars caught"),
        ({"1": 3}, "2 liars caught, 1 of them ejected"),
        ({"1": 3, "2": 3, "0": 4}, "2 liars caught and ejected"),
    ],
)
def test_liars_are_counted_once_each_and_those_that_were_ejected(ejected, said):
    findings = (CAUGHT, CAUGHT | {"round": 13}, CAUGHT | {"peer": 1})
    assert verdict_text.caught(verdict(findings, ejected=ejected)) == said


def test_blame_gives_a_few_peers_and_kinds_once_with_their_first_round():
    findings = [
        {"peer": 2, "round": 20, "kind": "message"},
        {"peer": 2, "round": 12, "kind": "message"},
        {"peer": 2, "round": 30, "kind": "message"},
        {"peer": None, "round": 3, "kind": "params"},
    ]
    said = verdict_text.blame(findings)
    assert said == "peer 2 in round 12 (message); the transcript in round 3 (params)"
    many = [{"peer": peer, "round": 1, "kind": "message"} for peer in range(60)]
    assert verdict_text.blame(many).endswith("peer 3 in round 1 (message); and 56 more")


def test_rounds_that_applied_nothing_are_counted_and_if_all_did_it_is_refused():
    some = verdict(empty_rounds=3)
    assert "\n  applied     nothing in 3 of 40 rounds\n" in verdict_text.render(some)
    assert verdict_text.summarize(some).endswith("; nothing was applied in 3 of 40 rounds")
    said = verdict(empty_rounds=40, accepted=False)
    why = "no message was applied in any round, so the params are those that the run began with"
    assert verdict_text.render(said).startswith(f"REFUSED: {why}\n")
    assert verdict_text.why_refused(said) == why
