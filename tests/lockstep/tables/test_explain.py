"""What is shown of a value that a stranger wrote, and of several mistakes which one."""

from typing import get_args, get_type_hints

import pytest

from lockstep.tables.explain import show
from lockstep.tables.faults import KINDS, OF_OTHERS, Fault, FaultKind
from tests.pipeline.runfile.edited_run import DISTRO, REMOVE, complaint


def test_of_a_value_that_stands_for_terabytes_only_the_beginning_is_made():
    value = ["x"] * 10
    for _ in range(15):
        value = [value] * 10
    endless: list = []
    endless.append(endless)
    for shown in (show(value), show(endless)):
        assert shown.startswith("[[[[") and len(shown) == 60
    assert show([1, {"a": None}, "b"]) == '[1, {"a": null}, "b"]'


@pytest.mark.parametrize(
    "table, wrong, right",
    [("config", "min_client", "min_clients"), (DISTRO, "compression_top_k", "compression_topk")],
)
def test_a_misspelt_key_is_shown_and_not_that_the_right_one_is_missing(table, wrong, right):
    said = complaint((f"{table}.{right}", REMOVE), (f"{table}.{wrong}", 2))
    assert said.startswith(f"{table}.{wrong}: ") and f"did you mean {right}?" in said


# ---- The table of faults has what validation and the peers' wrappers need of each kind ----


each_kind = pytest.mark.parametrize("name", KINDS)


def fault(name: str, **changes) -> Fault:
    peer = [1, 2] if name == "collude" else 1
    return Fault(**{"kind": name, "peer": peer, "rounds": (1, 3)} | changes)


def test_each_part_of_a_round_has_kinds_that_take_its_place_and_no_kind_takes_anothers():
    parts = get_args(get_type_hints(FaultKind)["wraps"])
    assert {kind.wraps for kind in KINDS.values()} == {*parts}
    assert KINDS.keys() >= OF_OTHERS


@each_kind
def test_a_kind_describes_what_it_does_and_its_size(name):
    kind = KINDS[name]
    assert kind.does and "\n" not in kind.does and not kind.does.endswith(".")
    assert ("size" in kind.does) == (kind.size is not None)
    assert f"{name}: it {kind.does}" in Fault.model_fields["kind"].description


@each_kind
def test_strength_is_the_size_or_the_kinds_own(name):
    assert fault(name).strength == KINDS[name].size
    if KINDS[name].size is not None:
        assert fault(name, size=0.25).strength == 0.25
