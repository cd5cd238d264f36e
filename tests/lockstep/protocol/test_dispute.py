"""A dispute is settled by more than half of a round's peers, its parties among them, or nobody."""

import pytest

from lockstep.protocol.attestation import Check, Claim, Ruling, settle

VERIFIER, PEER = 3, 7
FOUND, CLAIMED, OTHER = (Claim(letter * 64, letter * 64) for letter in "abc")
CHECK = Check(VERIFIER, PEER, FOUND, 1.0, 10)


def ruling(*found: Claim, verifier: int = VERIFIER, peer: int = PEER) -> Ruling:
    return Ruling(verifier, peer, dict(enumerate(found)))


@pytest.mark.parametrize(
    ("found", "peers", "loser"),
    [
        ((FOUND, FOUND, FOUND), 5, PEER),
        ((FOUND, CLAIMED, FOUND), 5, PEER),
        ((CLAIMED, FOUND, CLAIMED), 5, VERIFIER),
        ((CLAIMED, OTHER, CLAIMED), 5, VERIFIER),
        ((FOUND,), 3, PEER),
        ((CLAIMED,), 3, VERIFIER),
        ((OTHER,), 3, None),
        ((FOUND, CLAIMED), 4, None),  # a tie is no verdict
        ((FOUND, CLAIMED, OTHER), 5, None),
        ((OTHER, OTHER, OTHER), 5, None),  # they agree, but with neither party
        ((FOUND,), 4, None),  # who says nothing agrees with nobody
        ((FOUND, FOUND), 7, None),
        ((), 2, None),
    ],
)
def test_more_than_half_of_a_rounds_peers_say_who_lost(found, peers, loser):
    assert settle(CHECK, CLAIMED, [ruling(*found)], peers) == loser


def test_no_minority_settles_a_dispute_against_the_truth():
    for peers in range(3, 40):
        for colluders in range(1, peers // 2 + 1):  # of whom one is the verifier
            said = [FOUND] * (colluders - 1) + [CLAIMED] * (peers - 1 - colluders)
            loser = settle(CHECK, CLAIMED, [ruling(*said)], peers)
            assert loser == (VERIFIER if 2 * colluders < peers else None)


def test_claim_about_the_message_alone_is_not_enough():
    same_message = Claim(FOUND.message, OTHER.state)
    assert settle(CHECK, CLAIMED, [ruling(same_message, same_message, same_message)], 5) is None


def test_ruling_on_another_dispute_settles_nothing():
    others = [ruling(FOUND, verifier=4), ruling(FOUND, peer=6)]
    assert settle(CHECK, CLAIMED, others, 3) is None
    assert settle(CHECK, CLAIMED, [*others, ruling(CLAIMED)], 3) == VERIFIER
    assert settle(CHECK, CLAIMED, [], 3) is None
