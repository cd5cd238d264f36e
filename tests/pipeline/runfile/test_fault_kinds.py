"""The table of faults has what validation and the peers' wrappers need of each kind."""

import pytest

from pipeline import runfile
from pipeline.runfile.fault_kinds import KINDS, OF_OTHERS

each_kind = pytest.mark.parametrize("name", KINDS)

WRAPS = {
    "message": "free_rider copycat stale sign_flip scale_up scale_down noise opposite "
    "little_enough drift collude forged",
    "bytes": "malformed not_finite duplicated wrong_hash equivocation",
    "work": "lazy wrong_data",
    "program": "wrong_precision",
    "clock": "dropped late crash join",
    "attestation": "false_witness denying_witness",
    "check": "false_verifier",
}


def fault(name: str, **changes) -> runfile.Fault:
    peer = [1, 2] if name == "collude" else 1
    return runfile.Fault(**{"kind": name, "peer": peer, "rounds": (1, 3)} | changes)


def test_every_kind_is_there_and_takes_the_place_of_what_it_should():
    found = {place: {name for name in KINDS if KINDS[name].wraps == place} for place in WRAPS}
    assert found == {place: set(names.split()) for place, names in WRAPS.items()}
    assert sum(map(len, found.values())) == len(KINDS)
    assert KINDS.keys() >= OF_OTHERS


@each_kind
def test_a_kind_describes_what_it_does_and_its_size(name):
    kind = KINDS[name]
    assert kind.does and "\n" not in kind.does and not kind.does.endswith(".")
    assert ("size" in kind.does) == (kind.size is not None)
    assert f"{name}: it {kind.does}" in runfile.Fault.model_fields["kind"].description


@each_kind
def test_strength_is_the_size_or_the_kinds_own(name):
    assert fault(name).strength == KINDS[name].size
    if KINDS[name].size is not None:
        assert fault(name, size=0.25).strength == 0.25
