"""The run file's JSON Schema, params/run.schema.json, by which editors complete and check.

`make generated` writes it, and docs/reference/run-file.md (docs/run_file_page.py).
"""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pipeline.runfile.run import Run

DESCRIPTION_OF_BASE = "A run file beside it, from which it says only what differs."


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out of the schema the title of each key, which repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema() -> str:
    """Return the JSON Schema of a run file, draft 2020-12, as text."""
    schema = {"$schema": _WithoutTitles.schema_dialect} | _with_base(plain_schema())
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def plain_schema() -> dict:
    """Return the schema of whole run files, as a document."""
    return _tidy(Run.model_json_schema(schema_generator=_WithoutTitles))


def _with_base(schema: dict) -> dict:
    """Return the schema of files that may have a `base`; with one, no table need be complete."""
    definitions = schema["$defs"]

    def required(node: dict) -> dict:
        """Remove from the schema of a table, and inner ones, what a file requires; return that."""
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]]
        if forms := node.get("anyOf"):
            return {"anyOf": [required(form) for form in forms]}
        within = {key: required(field) for key, field in node.get("properties", {}).items()}
        within = {key: value for key, value in within.items() if value}
        keys = {"required": node.pop("required")} if "required" in node else {}
        return keys | ({"properties": within} if within else {})

    schema["properties"]["base"] = {"type": "string", "description": DESCRIPTION_OF_BASE}
    rules = required(schema)
    return schema | {"if": {"not": {"required": ["base"]}}, "then": rules}


def _tidy(node: Any) -> Any:
    """Return the schema without null, which TOML lacks, and with descriptions on one line."""
    if isinstance(node, list):
        return [_tidy(item) for item in node if item != {"type": "null"}]
    if not isinstance(node, dict):
        return node
    tidy = {}
    for key, value in node.items():
        if key == "description" and isinstance(value, str):
            tidy[key] = " ".join(value.split())
        elif value is not None:
            tidy[key] = _tidy(value)
    if len(tidy.get("anyOf", ())) == 1:
        tidy |= tidy.pop("anyOf")[0]
    return tidy
