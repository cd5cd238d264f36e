"""A minority of colluding peers ejects nobody honest, and cannot know whose lie is looked at."""

from collections import Counter

import pytest

from benchmarks import minority
from benchmarks.minority import Settings, follow
from lockstep.protocol import consensus, driver
from lockstep.protocol.attestation import attest
from lockstep.protocol.round import Round
from tests.lockstep.protocol.driver.driven_run import evidence

TEN = Settings(10, 5, 4, 20, total_steps=8)


def first_round(seed: int = 1) -> tuple[driver.RunProgress, Round]:
    return driver.next_round(driver.ask(driver.start(TEN, 10, seed, 1), range(10)))


@pytest.mark.parametrize("colluders", [1, 2, 3, 4])
def test_witnesses_that_refuse_what_others_can_show_eject_nobody(colluders):
    progress, round_ = first_round()
    said, liars = evidence(round_), round_.witnesses[:colluders]
    refused = round_.assignment.keys() - set(liars)
    words = [attest(w, round_.seed, round_.peers, {}, refused=refused) for w in liars]
    attestations = (*words, *said.attestations[colluders:])
    _, decision = driver.finish_round(
        progress, round_, minority.replace(said, attestations=attestations)
    )
    assert decision.ejected == {} and decision.quorum == 3
    assert bool(decision.applied) == (colluders == 1)


@pytest.mark.parametrize(("refuse", "ejected"), [(2, {}), (3, {1: "no message"})])
def test_a_tie_of_witnesses_is_no_verdict(refuse, ejected):
    progress, round_ = first_round()
    assert 1 in round_.assignment
    said = evidence(round_, refused=(1,))
    held = {p: m.commitment for p, m in said.messages.items() if p != 1}
    silent = [attest(w, round_.seed, round_.peers, held) for w in round_.witnesses[refuse:]]
    attestations = (*said.attestations[:refuse], *silent)
    _, decision = driver.finish_round(
        progress, round_, minority.replace(said, attestations=attestations)
    )
    assert decision.ejected == ejected and 1 not in decision.applied


def test_whom_verifiers_check_follows_from_every_commitment_and_not_from_the_seed_alone():
    drawn: Counter[int] = Counter()
    _, round_ = first_round()
    peers = sorted(round_.assignment)
    for number in range(400):
        said = evidence(round_)
        last = peers[number % len(peers)]
        message = minority.replace(said.messages[last], commitment=f"{number:064x}")
        varied = minority.replace(said, messages=said.messages | {last: message})
        pairs = consensus.checked(round_, varied)
        assert pairs == consensus.checked(round_, varied) and [*pairs] == [*round_.verifiers]
        drawn.update(pairs.values())
    # 2 of 8 each time, 100 expected of each: 5 standard deviations
    assert drawn.keys() == set(peers) and all(60 < count < 140 for count in drawn.values())


@pytest.mark.parametrize(("peers", "witnesses"), [(8, 2), (12, 4)])
def test_a_quarter_that_colludes_ejects_no_honest_peer(peers, witnesses):
    settings = (peers, witnesses, 25, peers // 4)
    assert all(follow(*settings, "eject", seed, 25).honest is None for seed in range(2))
    outcome = follow(*settings, "lie", 0, 25)
    assert outcome.colluders == peers // 4 and outcome.sent > outcome.applied
