"""A run as the text of a run file, with every table and key explained; of a Psyche file too."""

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, shown
from lockstep.tables.explain import validate
from lockstep.tables.table import Count, Table
from lockstep.tables.variant import Variant
from pipeline import runfile
from pipeline.runfile.data import Seed, TokenSize
from pipeline.runfile.psyche import STATE_KEYS
from pipeline.toml_file import read_toml

WIDTH = 98  # characters of a comment line without its "# "
SERVED = "data.toml"  # beside a state file: what Psyche's data server serves


class ServedData(Table):
    """Psyche's data.toml: the token files that a data server serves."""

    dir: str
    """Their folder; a relative path is relative to the file's own folder."""
    token_size: TokenSize
    """Size of a token in the files."""
    seq_len: Count
    """Length of the served sequences in tokens."""
    shuffle_seed: Seed
    """Seed of the sequences' order."""


def import_psyche(source: Path) -> str:
    """Convert a Psyche configuration or coordinator state file to a run file.

    Psyche's tables keep their spelling and values; Lockstep's own tables that the source lacks get
    their defaults. Each key has its meaning above it. A data server is replaced by the files that
    the data.toml beside the source says it serves.
    """
    document = read_toml(source)
    dropped = [key for key in STATE_KEYS if key in document]
    run = runfile.parse(
        {key: value for key, value in document.items() if key not in dropped}, str(source)
    )
    comments = [f"Imported from {shown(source.name)}."]
    if dropped:
        left_out = ", ".join(dropped)
        comments += [f"Left out, as the state of a run and not its configuration: {left_out}."]
    served, location = source.with_name(SERVED), run.llm.data_location
    if isinstance(location, runfile.DataServer) and served.is_file():
        run = _with_files(run, served)
        comments += [f"The files of {SERVED}, in place of a data server at {location.address}."]
    return run_file(run, *comments)


def run_file(run: runfile.Run, *comments: str, notes: Mapping[str, str] | None = None) -> str:
    """Return a run as a complete run file that begins with comments.

    `notes` has further comments on some keys, by their dotted names, after their meaning.
    """
    head = [line for comment in comments for line in _comment(comment)]
    lines = ["#:schema ./run.schema.json", *head, *_table(run, (), notes or {})]
    return "\n".join(lines) + "\n"


def _with_files(run: runfile.Run, source: Path) -> runfile.Run:
    """Return the run with the files of a data.toml as its data location."""
    served = validate(ServedData, read_toml(source), str(source))
    if served.seq_len != run.llm.max_seq_len:
        raise LockstepError(
            f"{source}: seq_len is {served.seq_len}, expected {run.llm.max_seq_len}, the value of "
            "model.LLM.max_seq_len"
        )
    local = {
        "path": os.path.normpath(source.parent / served.dir),
        "token_size_in_bytes": served.token_size,
        "shuffle": {"Seeded": served.shuffle_seed},
    }
    location = validate(runfile.DataLocal, local, str(source))
    llm = run.llm.model_copy(update={"data_location": location})
    return run.model_copy(update={"model": run.model.model_copy(update={"LLM": llm})})


def _table(table: Table, path: tuple[str, ...], notes: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table: its header and plain values, then its inner tables."""
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
    """Yield a variant's lines, if it has fields: its own table, or one key with a bare value."""
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
