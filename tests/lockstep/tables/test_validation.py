"""What is shown of a value that a stranger wrote, and of several mistakes which one."""

import pytest

from lockstep.tables.faults import KINDS, Fault
from lockstep.tables.validation import show
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


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_describes_what_it_does_and_its_size(name):
    kind = KINDS[name]
    assert kind.does and "\n" not in kind.does and not kind.does.endswith(".")
    assert ("size" in kind.does) == (kind.size is not None)
    assert f"{name}: it {kind.does}" in Fault.model_fields["kind"].description


def test_the_size_of_a_fault_is_its_own_or_its_kinds():
    late = Fault(kind="late", peer=1, rounds=(1, 3))
    assert (late.strength, late.model_copy(update={"size": 2.0}).strength) == (3600.0, 2.0)
