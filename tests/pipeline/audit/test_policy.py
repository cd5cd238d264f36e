"""What a verdict makes of findings."""

import pytest

from pipeline.audit.verdict import Finding, accepts, merged

DISCARDED, APPLIED = (Finding(3, 1, "message", "", applied) for applied in (False, True))


@pytest.mark.parametrize(
    ("findings", "applied", "strict"),
    [
        ([], True, True),
        ([DISCARDED], True, False),
        ([APPLIED], False, False),
        ([DISCARDED, APPLIED], False, False),
    ],
)
def test_policy_applied_refuses_what_got_into_the_params_and_strict_refuses_all(
    findings, applied, strict
):
    assert (accepts("applied", findings), accepts("strict", findings)) == (applied, strict)


def test_that_a_peer_was_ejected_is_said_only_where_nothing_else_says_why():
    ejected = [Finding(step, peer, "ejected", "", False) for step, peer in ((5, 1), (3, 1), (3, 2))]
    assert merged([ejected[0], DISCARDED, *ejected[1:]]) == [DISCARDED, ejected[2], ejected[0]]
