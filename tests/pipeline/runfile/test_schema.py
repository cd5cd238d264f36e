"""params/run.schema.json is what the models say, and agrees with the loader."""

import copy
import json
import re
import tomllib

import pytest

from docs import run_file_page
from pipeline.runfile import schema
from pipeline.stage.keys import PROJECT
from tests import tiny

PARAMS = PROJECT / "params"
OLDER = PROJECT / "tests" / "fixtures" / "psyche_older_spelling.toml"


@pytest.mark.parametrize(
    ("file", "generate"),
    [
        ("params/run.schema.json", schema.json_schema),
        ("docs/reference/run-file.md", run_file_page.markdown),
    ],
)
def test_generated_file_is_up_to_date(file, generate):
    stale = (PROJECT / file).read_text() != generate()
    assert not stale, f"{file} is stale: run `make generated`"


def test_the_reference_explains_each_value_on_a_line_of_its_own():
    """Two that are joined by "and" would be torn: the first stays on the line before."""
    assert not re.findall(r"\w+ and<br>`\w+`", run_file_page.markdown())


def test_every_key_and_variant_is_in_the_reference():
    definitions = json.loads(schema.json_schema())["$defs"]
    page = run_file_page.markdown()
    assert "| `verification_percent` | integer, 0 to 100 | required | " in page
    assert '| `policy` | `"applied"` or `"strict"` | `"applied"` | ' in page
    for name, table in definitions.items():
        keys = table.get("properties", {})
        for key in keys if len(keys) > 1 else ():  # a variant's only key stands for its value
            assert f"\n| `{key}` | " in page, f"{name}.{key}"
    for name in ("Distro", "WarmupStableDecay", "P2PGcs", "NumberedFiles", "Seeded", "Server"):
        assert f".{name}" in page


def test_default_run_names_its_schema_on_the_first_line():
    assert (PARAMS / "run.toml").read_text().startswith("#:schema ./run.schema.json\n")


def test_every_key_is_described():
    whole = json.loads(schema.json_schema())
    tables = {"Run": whole, **whole["$defs"]}
    bare = [
        f"{name}.{key}"
        for name, table in tables.items()
        if "properties" in table
        for key, field in table["properties"].items()
        if "description" not in field and "$ref" not in field
    ]
    assert bare == []


def test_schema_has_no_null_since_toml_has_none():
    assert "null" not in schema.json_schema()


@pytest.fixture(scope="module")
def validator():
    jsonschema = pytest.importorskip("jsonschema")
    whole = json.loads(schema.json_schema())
    jsonschema.Draft202012Validator.check_schema(whole)
    return jsonschema.Draft202012Validator(whole)


@pytest.mark.parametrize("path", [*tiny.READY_RUNS, OLDER], ids=lambda path: path.name)
def test_run_files_satisfy_the_schema(validator, path):
    assert list(validator.iter_errors(tomllib.loads(path.read_text()))) == []


@pytest.mark.parametrize(
    ("table", "key", "value"),
    [
        (("config",), "total_steps", 0),
        (("config",), "totl_steps", 3),
        (("model", "LLM"), "optimizer", "Distro"),
        (("model", "LLM", "optimizer", "Distro"), "compression_decay", 1.5),
        (("peers",), "layout", "pmapped"),
        (("faults",), "schedule", [{"kind": "sign_flip", "peer": 0}]),
        (("links",), "upload_mbps", [1, 0]),
    ],
)
def test_schema_refuses_what_the_loader_refuses(validator, table, key, value):
    document = copy.deepcopy(tomllib.loads((PARAMS / "run.toml").read_text()))
    place = document
    for name in table:
        place = place[name]
    place[key] = value
    assert not validator.is_valid(document)


def test_a_file_without_a_base_must_be_whole(validator):
    document = tomllib.loads((PARAMS / "faulty.toml").read_text())
    assert validator.is_valid(document)
    del document["base"]
    assert not validator.is_valid(document)


def test_schema_takes_every_form_of_a_local_folder(validator):
    document = tomllib.loads((PARAMS / "run.toml").read_text())
    for form in ("folder", {"path": "folder", "token_size_in_bytes": "FourBytes"}):
        document["model"]["LLM"]["data_location"] = {"Local": form}
        assert validator.is_valid(document)
