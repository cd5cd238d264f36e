"""What is shown of a value that a stranger wrote."""

from pipeline.runfile.explain import show


def test_of_a_value_that_stands_for_terabytes_only_the_beginning_is_made():
    value = ["x"] * 10
    for _ in range(15):
        value = [value] * 10
    endless: list = []
    endless.append(endless)
    for shown in (show(value), show(endless)):
        assert shown.startswith("[[[[") and len(shown) == 60
    assert show([1, {"a": None}, "b"]) == '[1, {"a": null}, "b"]'
