"""`lockstep import FILE`: a complete run file, with every table and key, from a Psyche file."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import runfile
from pipeline.errors import shown
from pipeline.runfile.psyche import STATE_KEYS
from pipeline.runfile.serde_enum import Variant
from pipeline.runfile.table import Table
from pipeline.toml_file import read_toml

WIDTH = 98  # characters of a comment line without its "# "


def import_psyche(source: Path) -> str:
    """Convert a Psyche configuration or coordinator state file to a run file.

    Psyche's tables keep their spelling and values; Lockstep's own tables that the source lacks get
    their defaults. Each key has its meaning above it.

    Raises:
      LockstepError: The source cannot be read, or does not describe a valid run.
    """
    document = read_toml(source)
    dropped = [key for key in STATE_KEYS if key in document]
    run = runfile.parse(
        {key: value for key, value in document.items() if key not in dropped}, str(source)
    )
    lines = ["#:schema ./run.schema.json", *_comment(f"Imported from {shown(source.name)}.")]
    if dropped:
        lines += _comment(
            f"Left out, as the state of a run and not its configuration: {', '.join(dropped)}."
        )
    return "\n".join([*lines, *_table(run, ())]) + "\n"


def _table(table: Table, path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a table: its header and plain values, then the tables within."""
    values: list[str] = []
    within: list[str] = []
    for name, field in type(table).model_fields.items():
        value, meaning = getattr(table, name), _comment(field.description)
        if value is None:
            values += [*meaning, f"# {name} is absent."]
        elif isinstance(value, Variant) and type(value).model_fields:
            within += _variant(value, (*path, name))
        elif isinstance(value, Table) and not isinstance(value, Variant):
            within += _table(value, (*path, name))
        elif isinstance(value, dict):
            within += ["", *meaning, _header((*path, name))]
            within += [f"{_key(key)} = {toml(item)}" for key, item in value.items()]
        else:
            values += [*meaning, f"{name} = {toml(value)}"]
    if path and values:
        yield from ["", *_comment(type(table).__doc__), _header(path)]
    yield from values
    yield from within


def _variant(variant: Variant, path: tuple[str, ...]) -> Iterator[str]:
    """The lines of a variant that has fields: a table of its own, or one key with a bare value."""
    tag = variant.tag()
    if variant.takes_table():
        yield from _table(variant, (*path, tag))
    else:
        meaning = (
            f"{type(variant).__doc__} {type(variant).model_fields[variant.newtype].description}"
        )
        value = toml(getattr(variant, variant.newtype))
        yield from ["", _header(path), *_comment(meaning), f"{tag} = {value}"]


def _header(path: tuple[str, ...]) -> str:
    return f"[{'.'.join(map(_key, path))}]"


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def toml(value: Any) -> str:
    """Return a value in TOML, on one line."""
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
    lines = textwrap.wrap(" ".join(text.split()), WIDTH, break_long_words=False)
    return [f"# {line}" for line in lines]
