"""What is shown of a value that a stranger wrote, and of several mistakes which one."""

import pytest

from lockstep.tables.explain import show
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
