"""A value that nobody chose: a drand round by its signature, or a word given by hand."""

import sys

import pytest

from lockstep.errors import LockstepError
from pipeline.audit.sample import read_beacon

# https://pypi.org/project/drand-verify: a round of quicknet with its randomness
SIGNATURE = (
    "b713718a38ae728dfd477991af2822e08d2f305e47718cef"
    "9f7848ce4050e7be41076862b98fad56e91a6b85b89cd97b"
)
VALUE = "fc1873a13f3545aeade8401532ef5519920652eee6b0d2b19ca12643b87b3587"
ROUND = f"drand quicknet 657413 {SIGNATURE}"


def test_a_round_of_drand_is_known_by_its_signature_and_when_it_was():
    limit = sys.getrecursionlimit()
    found = read_beacon(ROUND)
    assert sys.getrecursionlimit() == limit  # which py_ecc raises to 100,000
    assert found.value == VALUE
    assert found.text == "round 657413 of drand's quicknet, of 2023-09-15 11:00:03 UTC"


@pytest.mark.parametrize(
    "said",
    [
        ROUND.replace("657413", "657414"),
        ROUND[:-1] + "a",
        f"drand quicknet 657413 {'0' * 96}",
        f"drand quicknet 657413 c0{'0' * 94}",  # infinity
    ],
    ids=["another round", "another signature", "no point", "infinity"],
)
def test_another_signature_is_refused(said):
    with pytest.raises(LockstepError, match="round 65741[34] of drand's quicknet has another"):
        read_beacon(said)


def test_without_py_ecc_the_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "py_ecc.bls.hash_to_curve", None)
    with pytest.raises(LockstepError, match=r"py_ecc .*pip install .*\[beacon\]"):
        read_beacon(ROUND)


def test_a_word_given_by_hand_is_taken_as_it_is_and_said_to_be_that():
    assert read_beacon("4 8 15 16 23 42") == ("4 8 15 16 23 42", "'4 8 15 16 23 42', given by hand")
    assert read_beacon("") is None
