"""One line for what pydantic found wrong in a run file: file, dotted key, value, expectation."""

import json
from datetime import date, datetime, time
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import ValidationError

from pipeline.runfile.serde_enum import Variant
from pipeline.runfile.table import Table

WIDTH = 60  # characters of a value that are shown

EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "invalid-json-value": "a string, number, boolean, list or table",
}


def one_line(error: ValidationError, document: dict, root: type[Table]) -> str:
    """The first error in words, and how many more there are.

    Args:
      error: what validating `document` raised.
      document: the parsed TOML.
      root: the model of the whole document.
    """
    lines = error.errors(include_url=False)
    first = lines[0]
    context = {"key": (), "tag": ""} | (first.get("ctx") or {})  # a key comes from `wrong`
    path = first["loc"] + context["key"]
    path, found = _find(path, document, missing=first["type"] == "missing")
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    key = dotted(path)
    match first["type"]:
        case "missing":
            fields = _models(path[:-1], document, root)[0].model_fields
            meaning = " ".join(fields[path[-1]].description.split()).rstrip(".")
            said = f"{key}: missing, expected it ({meaning})"
        case "extra_forbidden":
            known = list(_models(path[:-1], document, root)[0].model_fields)
            said = f"{key}: unknown key, expected one of {_list(known, path[-1])}"
        case "union_tag_invalid" | "union_tag_not_found":
            tags = [model.tag() for model in _models(path, document, root)]
            said = f"{key} is {show(found)}, expected exactly one of {_list(tags, context['tag'])}"
        case _:
            said = f"{key} is {show(found)}, expected {_expected(first)}"
    return said + more


def dotted(path: tuple[str | int, ...]) -> str:
    """The path as a user writes it: `faults.schedule[0].peer`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_key(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def show(value: Any) -> str:
    """A TOML value, shortened."""
    if isinstance(value, dict):
        return f"a table with {', '.join(map(_key, value))}" if value else "an empty table"
    if isinstance(value, datetime | date | time):
        return f"the date {value}"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def _key(key: str) -> str:
    return key if key.isprintable() else json.dumps(key)


def _expected(line: dict) -> str:
    match line["type"]:
        case kind if kind in EXPECTED:
            return EXPECTED[kind]
        case "too_short":
            return f"at least {line['ctx']['min_length']} items"
        case "too_long":
            return f"at most {line['ctx']['max_length']} items"
        case "string_pattern_mismatch":
            return f"a string that matches {line['ctx']['pattern']}"
    text = line["msg"].removeprefix("Input should be ")
    return f"a number {text}" if text.startswith(("greater", "less")) else text


def _list(known: list[str], word: str) -> str:
    matches = get_close_matches(word, known, n=1)
    return ", ".join(known) + (f"; did you mean {matches[0]}?" if matches else "")


def _find(path: tuple, document: dict, *, missing: bool) -> tuple[tuple, Any]:
    """The part of pydantic's path that the document has, and the value there.

    The rest are names of ours: of a union's branch, or of the field that a bare value stands for,
    as `path` in `Local = "folder"`.
    """
    there: tuple[str | int, ...] = ()
    found: Any = document
    for part in path[:-1] if missing else path:
        in_table = isinstance(found, dict) and part in found
        if in_table or (isinstance(found, list) and isinstance(part, int) and part < len(found)):
            there, found = (*there, part), found[part]
    return (*there, path[-1]) if missing else there, found


def _models(path: tuple, document: dict, root: type[Table]) -> list[type[Table]]:
    """The model of the table at `path`; where an enum stands there, all its variants."""
    models, found, is_enum = [root], document, False
    for part in path:
        found = found[part]
        if isinstance(part, int):
            continue  # `models` are those of a list's items already
        if is_enum:
            models = [model for model in models if model.tag() == part]
        else:
            models = _tables_in(models[0].model_fields[part].annotation)
        is_enum = not is_enum and any(issubclass(model, Variant) for model in models)
        if not is_enum and isinstance(found, dict):  # [config] has two spellings: the likelier
            models = sorted(models, key=lambda model: -len(model.model_fields.keys() & found))
    return models


def _tables_in(annotation: Any) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for part in get_args(annotation) for table in _tables_in(part)]
