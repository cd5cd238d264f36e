"""Who lies is out of the run, and what it sent is not applied."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from lockstep.protocol import consensus, driver
from lockstep.protocol.attestation import Check, Claim, Ruling, attest
from lockstep.protocol.coordinator import CoordinatorError
from lockstep.protocol.round import Evidence, Round
from tests.lockstep.protocol.driver.driven_run import (
    LONG,
    VERIFIED,
    begun,
    commitment,
    evidence,
    other,
    spans,
)


def attested(said: Evidence, round: Round, count: int = 1, without: int | None = None) -> Evidence:
    """The first witnesses attest to every message, or to all but one."""
    held = {peer: c for peer, c in said.commitments.items() if peer != without}
    words = [attest(witness, round.seed, round.peers, held) for witness in round.witnesses[:count]]
    return replace(said, attestations=(*words, *said.attestations[count:]))


def false_witness(round: Round) -> tuple[Evidence, dict[int, str]]:
    late = next(peer for peer in round.assignment if peer not in round.witnesses)
    said = evidence(round, {late: None})
    return attested(said, round), {round.witnesses[0]: "false witness"}


def no_message(round: Round) -> tuple[Evidence, dict[int, str]]:
    return evidence(round, refused=(1,)), {1: "no message"}


def two_messages(round: Round) -> tuple[Evidence, dict[int, str]]:
    return evidence(round, others={1: other(round.witnesses[:1])}), {1: "two messages"}


def disputed(round: Round, rulings: Callable[[Check, Claim], dict[int, Claim]]) -> Evidence:
    """The verifier found something else than the trainer claims; the tie-breakers' findings."""
    ((verifier, peer),) = consensus.checked(round, evidence(round)).items()
    check = Check(verifier, peer, Claim("cd" * 32, "ef" * 32), 2.0, 100)
    claimed = Claim(commitment(round, peer), "ab" * 32)
    ruling = Ruling(verifier, peer, rulings(check, claimed))
    return evidence(round, checks=(check,), rulings=(ruling,), settle_seconds=3.0)


def false_message(round: Round) -> tuple[Evidence, dict[int, str]]:
    said = disputed(round, lambda check, claimed: {0: check.found, 1: check.found, 2: claimed})
    return said, {said.checks[0].peer: "false message"}


def false_check(round: Round) -> tuple[Evidence, dict[int, str]]:
    said = disputed(round, lambda check, claimed: {0: claimed, 1: check.found, 2: claimed})
    return said, {said.checks[0].verifier: "false check"}


@pytest.mark.parametrize(
    "lie", [false_witness, no_message, two_messages, false_message, false_check]
)
def test_a_liar_is_ejected_its_message_discarded_and_its_sequences_given_out_again(lie):
    settings = VERIFIED if lie in (false_message, false_check) else LONG
    progress, round = driver.next_round(begun(settings, 5))
    said, ejected = lie(round)
    progress, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == ejected
    (liar,) = ejected
    gone = set() if lie in (false_witness, false_check) else {liar}  # its own message was true
    gone |= set(decision.late)
    discarded = round.assignment.keys() & ({liar} | gone)
    assert set(decision.applied) == round.assignment.keys() - discarded
    _, after = driver.next_round(progress)
    assert liar not in after.peers and len(after.peers) == 4
    again = {round.assignment[peer] for peer in discarded}
    assert len(again & spans(after)) == len(again)
    with pytest.raises(CoordinatorError, match="ejected"):
        driver.ask(progress, [liar])


def test_witness_that_claims_to_hold_what_is_no_message_is_ejected_with_its_sender():
    progress, round = driver.next_round(begun(LONG, 5))
    said = attested(evidence(round, refused=(1,)), round)
    _, decision = driver.finish_round(progress, round, said)
    assert decision.ejected == {round.witnesses[0]: "false witness", 1: "no message"}
    assert not {*decision.applied} & decision.ejected.keys()


@pytest.mark.parametrize(("deny", "applied"), [(1, (0, 1, 2, 3, 4)), (2, (1, 2, 3, 4))])
def test_one_witness_that_denies_is_outvoted_and_without_a_quorum_nobody_applies(deny, applied):
    progress, round = driver.next_round(begun(LONG, 5))
    said = attested(evidence(round), round, deny, without=0)
    _, decision = driver.finish_round(progress, round, said)
    assert (decision.applied, decision.ejected) == (applied, {})


def test_other_message_that_a_quorum_holds_is_not_the_one_that_is_applied():
    progress, round = driver.next_round(begun(LONG, 5))
    said = evidence(round, others={1: other(round.witnesses)})
    _, decision = driver.finish_round(progress, round, said)
    assert 1 not in decision.applied


def no_majority(check: Check, claimed: Claim) -> dict[int, Claim]:
    return {0: check.found, 1: claimed, 2: Claim("00" * 32, "00" * 32)}


@pytest.mark.parametrize("rulings", [no_majority, lambda check, claimed: {}])
def test_dispute_that_nobody_settles_discards_the_message_and_ejects_nobody(rulings):
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, rulings)
    peer = said.checks[0].peer
    progress, decision = driver.finish_round(progress, round, said)
    assert (decision.ejected, decision.late) == ({}, ())
    assert set(decision.applied) == round.assignment.keys() - {peer}
    assert round.assignment[peer] in spans(driver.next_round(progress)[1])


def test_round_waits_for_checks_and_for_disputes_to_be_settled():
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, lambda check, claimed: {0: check.found})
    _, decision = driver.finish_round(progress, round, said)
    # messages are there after 1 second; only then it is drawn whom to check, which takes 2
    assert (decision.train_seconds, decision.now) == (1.0, 3 + 1 + 2 + 3)
    quick = replace(said, checks=(replace(said.checks[0], seconds=0.5),), settle_seconds=0.5)
    assert driver.finish_round(progress, round, quick)[1].now == 3 + 1 + 2  # round_witness_time


def test_check_that_comes_too_late_counts_for_nothing():
    progress, round = driver.next_round(begun(VERIFIED, 5))
    said = disputed(round, lambda check, claimed: {0: check.found})
    said = replace(said, checks=(replace(said.checks[0], seconds=30.5),))
    _, decision = driver.finish_round(progress, round, said)
    assert (decision.ejected, decision.applied) == ({}, tuple(sorted(round.assignment)))
    assert (decision.train_seconds, decision.now) == (1.0, 3 + 1 + 30 + 3)


def test_a_state_that_is_withheld_costs_its_message_and_the_second_time_its_peer_the_run():
    progress, round = driver.next_round(begun(VERIFIED, 5))
    (peer,) = consensus.checked(round, evidence(round)).values()
    progress, decision = driver.finish_round(progress, round, evidence(round, withheld=(peer,)))
    assert (decision.ejected, decision.late) == ({}, ())
    assert set(decision.applied) == round.assignment.keys() - {peer}
    while True:
        progress, after = driver.next_round(progress)
        assert round.assignment[peer] in spans(after) or after.step > round.step + 1
        if peer in after.assignment:
            break
        progress, _ = driver.finish_round(progress, after, evidence(after))
    _, decision = driver.finish_round(progress, after, evidence(after, withheld=(peer,)))
    assert decision.ejected == {peer: "no state"} and peer not in decision.applied
