"""The JSON Schema of a run file, made from its models; an editor completes and checks by it.

lockstep schema > params/run.schema.json
"""

import json
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pipeline.runfile.run import Run


class _WithoutTitles(GenerateJsonSchema):
    """pydantic would give each key a title that repeats its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def generate() -> str:
    """The whole file's JSON Schema, draft 2020-12, as text."""
    schema = Run.model_json_schema(schema_generator=_WithoutTitles)
    whole = {"$schema": _WithoutTitles.schema_dialect} | _tidy(schema)
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _tidy(node: Any) -> Any:
    """The schema without what TOML does not have, null; and each description on one line."""
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
