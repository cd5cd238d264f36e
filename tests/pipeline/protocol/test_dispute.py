"""A dispute is settled by more than half of its tie-breakers, or by nobody."""

import pytest

from pipeline.protocol.dispute import Check, Claim, Ruling, settle

VERIFIER, PEER = 3, 7
FOUND, CLAIMED, OTHER = (Claim(letter * 64, letter * 64) for letter in "abc")
CHECK = Check(VERIFIER, PEER, FOUND, 1.0, 10)


def ruling(*found: Claim, verifier: int = VERIFIER, peer: int = PEER) -> Ruling:
    return Ruling(verifier, peer, dict(enumerate(found)))


@pytest.mark.parametrize(
    ("found", "loser"),
    [
        ((FOUND, FOUND, FOUND), PEER),
        ((FOUND, CLAIMED, FOUND), PEER),
        ((CLAIMED, FOUND, CLAIMED), VERIFIER),
        ((CLAIMED, OTHER, CLAIMED), VERIFIER),
        ((FOUND,), PEER),
        ((CLAIMED,), VERIFIER),
        ((OTHER,), None),
        ((FOUND, CLAIMED, OTHER), None),
        ((FOUND, OTHER, OTHER), None),  # they agree, but with neither party
        ((FOUND, CLAIMED), None),
        ((), None),
    ],
)
def test_majority_of_the_tie_breakers_says_who_lost(found, loser):
    assert settle(CHECK, CLAIMED, [ruling(*found)]) == loser


def test_claim_about_the_message_alone_is_not_enough():
    same_message = Claim(FOUND.message, OTHER.state)
    assert settle(CHECK, CLAIMED, [ruling(same_message, same_message, same_message)]) is None


def test_ruling_on_another_dispute_settles_nothing():
    others = [ruling(FOUND, verifier=4), ruling(FOUND, peer=6)]
    assert settle(CHECK, CLAIMED, others) is None
    assert settle(CHECK, CLAIMED, [*others, ruling(CLAIMED)]) == VERIFIER
    assert settle(CHECK, CLAIMED, []) is None
