"""A run as the text of a run file, with every table and key explained."""

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.tables.table import Table
from lockstep.tables.variant import Variant
from pipeline import runfile

COMMENT_WIDTH = 98  # characters of a comment line without its "# "


def run_file(run: runfile.Run, *comments: str, notes: Mapping[str, str] | None = None) -> str:
    """Return a run as a complete run file that begins with comments.

    `notes` has further comments on some keys, by their dotted names, after their meaning.
    """
    head = [line for comment in comments for line in _comment(comment)]
    lines = ["#:schema ./run.schema.json", *head, *_table(run, (), notes or {})]
    return "\n".join(lines) + "\n"


def _table(table: Table, path: tuple[str, ...], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield a table's lines of text: its header and plain values, then its inner tables."""
    values: list[str] = []
    within: list[str] = []
    for name, field in type(table).model_fields.items():
        value, note = getattr(table, name), notes.get(".".join((*path, name)), "")
        meaning = [*_comment(field.description), *_comment(note)]
        if value is None:
            values += [*meaning, f"# {name} is absent."]
        elif isinstance(value, Variant) and type(value).model_fields:
            within += _variant(value, (*path, name), notes)
        elif isinstance(value, Table) and not isinstance(value, Variant):
            within += _table(value, (*path, name), notes)
        elif isinstance(value, dict):
            within += ["", *meaning, _header((*path, name))]
            within += [f"{_key(key)} = {toml(item)}" for key, item in value.items()]
        else:
            values += [*meaning, f"{name} = {toml(value)}"]
    if path and values:
        yield from ["", *_comment(type(table).__doc__), _header(path)]
    yield from values
    yield from within


def _variant(variant: Variant, path: tuple[str, ...], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield a variant's lines of text, if it has fields: its own table, or one key with a value."""
    tag = variant.tag()
    if variant.takes_table():
        yield from _table(variant, (*path, tag), notes)
    else:
        field = type(variant).model_fields[variant.newtype]
        meaning = f"{type(variant).__doc__} {field.description}"
        value = toml(getattr(variant, variant.newtype))
        yield from ["", _header(path), *_comment(meaning), f"{tag} = {value}"]


def _header(path: tuple[str, ...]) -> str:
    return f"[{'.'.join(map(_key, path))}]"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def toml(value: Any) -> str:
    """Return a run file's value as text in TOML, on one line."""
    match value:
        case Table():
            return toml(value.model_dump(mode="json", exclude_none=True))
        case dict():
            pairs = (f"{_key(key)} = {toml(item)}" for key, item in value.items())
            return f"{{ {', '.join(pairs)} }}"
        case list() | tuple():
            return f"[{', '.join(map(toml, value))}]"
        case str():
            text = json.dumps(value, ensure_ascii=False)
            return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
        case bool():
            return "true" if value else "false"
        case _:
            return repr(value)


def _comment(text: str) -> list[str]:
    lines = textwrap.wrap(" ".join(text.split()), COMMENT_WIDTH, break_long_words=False)
    return [f"# {line}" for line in lines]
