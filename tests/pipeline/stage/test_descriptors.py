"""How many files a process may open."""

import resource

import pytest

from pipeline.stage import descriptors
from tests.errors import refused

NO_END = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("given", "left"),
    [((1024, 524288), 65536), ((64, 4096), 4096), ((256, NO_END), 65536), ((2**20, 2**20), 2**20)],
)
def test_the_limit_is_raised_as_far_as_it_may(monkeypatch, given, left):
    limits = {"now": given}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, to: limits.update(now=to))
    descriptors.check()
    assert limits["now"] == (left, given[1])


@pytest.mark.parametrize("given", [(32, 32), (32, NO_END)])
def test_a_limit_that_is_too_low_and_cannot_be_raised_is_refused_in_one_line(monkeypatch, given):
    def refuse(kind: int, to: tuple) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: given)
    monkeypatch.setattr(resource, "setrlimit", refuse)
    with refused("ulimit -n", 32, descriptors.LEAST):
        descriptors.check()
