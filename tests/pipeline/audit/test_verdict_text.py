"""verdict.txt, and the sentences about a verdict that the pages share."""

import pytest

from pipeline.audit import verdict_text
from tests.pipeline.finished_run import CAUGHT, LIAR, verdict


def test_a_refused_verdict_says_why_and_how_to_repeat_each_finding():
    text = verdict_text.render(verdict((LIAR,)))
    assert text.splitlines() == [
        "REFUSED: 1 of 1 finding got into the params (policy applied)",
        "  compared    bit for bit",
        "  audited     all 40 rounds",
        "  replayed    4 of 16 windows: rounds 1-10 of peer 3; 11-20 of peer 2; 21-30 of peer 0;",
        "              31-40 of peer 1",
        "  drawn from  5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed, the",
        "              transcript's own hash; whoever wrote the whole transcript could have tried",
        "              until the sample suited them: set [witness] seed to rule that out",
        "  transcript  sha256 5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed5eed",
        "  stated      by the transcript's author, and computed again by nobody: all losses in it,",
        "              who came, left or was silent, and whose message came late or never",
        "  late        peer 3 (1 message)",
        "round 12, peer 2: message (got into the params)",
        "  sent 0123, its replay gives <4567>",
        "  lockstep replay data/verdict/bundles/00011-00020-peer-02",
    ]
    assert max(map(len, text.splitlines())) <= verdict_text.WIDTH


def test_an_accepted_verdict_says_who_was_ejected_dropped_or_late():
    said = verdict((CAUGHT,), dropped={"0": 7, "1": 9}, late={"0": 2})
    said |= {"sample_seed": "5eed", "sample_seed_of": "auditor"}
    text = verdict_text.render(said)
    assert text.startswith("accepted: 0 of 1 finding got into the params (policy applied)\n")
    for line in (
        "  ejected     peer 2 in round 12",
        "  dropped out peer 0 in round 7, peer 1 in round 9",
        "  late        peer 0 (2 messages)",
        "round 12, peer 2: commitment (did not get into the params)",
    ):
        assert line in text.splitlines()
    assert "the auditor's own" in text and "whoever wrote" not in text


def test_policy_strict_and_a_tolerance_are_named():
    why = "jax is 'B' here, was 'A' in training"
    said = verdict((CAUGHT,), policy="strict", accepted=False, method="tolerance", tolerance=0.05)
    text = verdict_text.render(said | {"why_not_bitwise": why})
    assert text.startswith("REFUSED: 1 finding (policy strict refuses any)\n")
    assert f"  compared    within a tolerance of 0.05, because {why}\n" in text
    assert verdict_text.render(verdict()).startswith("accepted: no findings\n")


def test_what_was_measured_and_compared_of_large_messages_is_said():
    why = "threads is '1' here, was '4' in training"
    varied = {"distance": 4.2e-7, "there": "AVX instructions and 1 thread", "messages": 48}
    found = {"messages": 96, "sketched": 95, "bytes": 10**6, "bytes_shown": 9000}
    said = verdict(method="tolerance", tolerance=1e-4, why_not_bitwise=why, compared=found)
    said |= {"varied": varied}
    lines = " ".join(verdict_text.render(said).split())
    assert f"within a tolerance of 0.0001, because {why}; 48 honest messages with AVX" in lines
    assert "instructions and 1 thread were up to 4.2e-07 from those here" in lines
    assert "pieces of 95 of 96 are kept, 0.90% of their bytes, and were compared; a lie " in lines
    assert "a lie elsewhere passes" in lines and "update" not in lines
    assert "states what peers own was not compared, since nothing was learnt of it" in lines
    said |= {"varied": varied | {"params": 3e-5}, "params_tolerance": 0.002}
    said |= {"own_tolerance": {"mu": 0.003, "nu": 0.003, "error": 1.9}}
    lines = " ".join(verdict_text.render(said).split())
    assert "from those here, and the params after a window up to 3e-05 of its update" in lines
    assert "params after each replayed window, off by at most 0.002 of the window's update" in lines
    assert "after its window, off by at most 0.003 of its change, error by 1.9 " in lines
    assert "a lie elsewhere shows only in the params" in lines
    said |= {"method": "bitwise", "why_not_bitwise": None, "varied": None}
    assert "the roots over all pieces were compared" in verdict_text.compared_messages(said)
    assert "and whose message came late or never, whose bytes were no message" in (
        verdict_text.stated(said)
    )


@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("bitwise", "none of 96 are kept; what they commit to was compared"),
        (
            "tolerance",
            "of 96 nothing is kept or was compared, not even pieces as newer transcripts",
        ),
    ],
)
def test_of_messages_without_sketches_it_is_said_that_none_was_compared(method, text):
    found = {"messages": 96, "sketched": 0, "bytes": 0, "bytes_shown": 0}
    assert verdict_text.compared_messages(verdict(method=method, compared=found)).startswith(text)


@pytest.mark.parametrize(("clock", "said"), [("simulated", False), ("wall", True)])
def test_what_nobody_computes_again_is_marked_as_stated(clock, said):
    text = " ".join(verdict_text.render(verdict(clock=clock)).split())
    assert "stated by the transcript's author, and computed again by nobody: all losses" in text
    assert ("on the wall's clock every arrival" in text) == said


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


def test_blame_gives_each_peer_and_kind_once_with_its_first_round():
    findings = [
        {"peer": 2, "round": 20, "kind": "message"},
        {"peer": 2, "round": 12, "kind": "message"},
        {"peer": 2, "round": 30, "kind": "message"},
        {"peer": None, "round": 3, "kind": "params"},
    ]
    assert (
        verdict_text.blame(findings)
        == "peer 2 in round 12 (message); the transcript in round 3 (params)"
    )


def test_blame_of_many_is_still_one_line():
    findings = [{"peer": peer, "round": 1, "kind": "message"} for peer in range(60)]
    said = verdict_text.blame(findings)
    assert said.endswith("peer 3 in round 1 (message); and 56 more")


def test_rounds_that_applied_nothing_are_counted_and_if_all_did_it_is_refused():
    some = verdict(empty_rounds=3)
    assert "\n  applied     nothing in 3 of 40 rounds\n" in verdict_text.render(some)
    assert verdict_text.summarize(some).endswith("; nothing was applied in 3 of 40 rounds")
    said = verdict(empty_rounds=40, accepted=False)
    why = "no message was applied in any round, so the params are those that the run began with"
    assert verdict_text.render(said).startswith(f"REFUSED: {why}\n")
    assert verdict_text.why_refused(said) == why
