"""What is shown of a value that a stranger wrote, and of several mistakes which one."""

import json
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_core import SchemaValidator, core_schema

from lockstep.tables.faults import Fault
from lockstep.tables.table import Table
from lockstep.tables.validation import show
from pipeline.stage.keys import PROJECT
from tests.pipeline.runfile.edited_run import DISTRO, REMOVE, complaint

WINGS, STRICT = ("lockstep", "pipeline", "parts"), core_schema.CoreConfig(strict=True)


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


def test_the_size_of_a_fault_is_its_own_or_its_kinds():
    late = Fault(kind="late", peer=1, rounds=(1, 3))
    assert (late.strength, late.model_copy(update={"size": 2.0}).strength) == (3600.0, 2.0)


def keys_of(schema: Any) -> Iterator[Any]:
    """What validates the keys of each table in what pydantic makes of a model."""
    if isinstance(schema, dict):
        if schema.get("type") == "dict" and "keys_schema" in schema:
            yield schema["keys_schema"]
        schema = [*schema.values()]
    if isinstance(schema, list | tuple):
        yield from chain.from_iterable(map(keys_of, schema))


def test_a_number_that_is_a_key_has_one_text():
    """Or "1" and "01" are two peers to others, and one to pydantic, which takes the last."""
    for file in chain.from_iterable((PROJECT / wing).rglob("*.py") for wing in WINGS):
        if "validate_json(" in file.read_text():
            import_module(".".join(file.relative_to(PROJECT).with_suffix("").parts))
    models, numbers = [Table], 0
    for model in models:
        models += model.__subclasses__()
    for keys in keys_of([model.__pydantic_core_schema__ for model in models]):
        if "'type': 'int'" in str(keys):
            read, numbers = SchemaValidator(core_schema.dict_schema(keys), STRICT), numbers + 1
            assert read.validate_json('{"1": 0}') == {1: 0}
            for text in ("01", "+1", " 1", "1_0", "1.0"):
                with pytest.raises(ValidationError):
                    read.validate_json(json.dumps({"1": 0, text: 0}))
    assert numbers > 5
