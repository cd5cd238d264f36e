"""A run file that differs from a base, written whole: every table, with the comments of both.

The stages, DVC and Snakemake read params/run.toml, in which every table stands.
"""

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from pipeline.toml_file import KINDS, chain, read_run_file


class _Entry(NamedTuple):
    """A key as it is written: the comments above it, and its lines."""

    key: str
    above: list[str]
    lines: list[str]


class _Section(NamedTuple):
    """A table as it is written: the comments above its header, the header, its keys."""

    name: str
    above: list[str]
    header: str
    entries: list[_Entry]

    @property
    def kind(self) -> str | None:
        """The enum of which it is one kind, or a part of one."""
        return next((kind for kind in KINDS if f"{self.name}.".startswith(f"{kind}.")), None)


HEADER = re.compile(r"\[([\w.\"-]+)\][ \t]*(#.*)?")
KEY = re.compile(r"([\w.\"-]+)[ \t]*=")


def written_whole(path: Path) -> str:
    """Return the text of a run file with every table of its bases; one without a base as it is."""
    files = chain(path)
    text = files[-1].read_text(encoding="utf-8")
    for file in reversed(files[:-1]):
        text = _text(_over(_sections(text), _sections(file.read_text(encoding="utf-8")), file))
    try:
        whole = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        whole = {}
    if len(files) > 1 and whole != read_run_file(path):
        raise LockstepError(
            f"{path}: cannot be written whole, expected tables with headers, such as [peers], and "
            "each key on a line of its own"
        )
    return text


def _sections(text: str) -> list[_Section]:
    """Return the tables of a file as they are written, the keys above all headers first.

    A line that is neither a header, a key nor a comment goes on with the value above it.
    """
    sections, above = [_Section("", [], "", [])], []
    for line in text.splitlines():
        entries = sections[-1].entries
        if not line.strip() or line.startswith("#"):
            above.append(line)
            continue
        if header := HEADER.fullmatch(line):
            sections.append(_Section(header[1], above, line, []))
        elif key := KEY.match(line):
            entries.append(_Entry(key[1], above, [line]))
        elif entries:
            entries[-1].lines.extend((*above, line))
        above = []
    return sections


def _over(base: list[_Section], changes: list[_Section], file: Path) -> list[_Section]:
    """Return the tables of a base with those of a file that has it."""
    (_, first, *rest), (top, *changed) = base, changes
    head = "\n".join(line for entry in top.entries for line in entry.above).rstrip()
    made = f"# Written whole from {file.name}, which has what differs from its base."
    own_head = [*first.above, ""].index("") + 1  # of the base, which is left out
    sections = [
        _Section("", [*head.splitlines(), "#", made, ""], "", []),
        first._replace(above=first.above[own_head:]),
        *rest,
    ]
    replaced = set()
    for change in changed:
        kind = change.kind
        if kind and kind not in replaced:
            replaced.add(kind)
            at = next((i for i, old in enumerate(sections) if old.kind == kind), len(sections))
            sections = [old for old in sections if old.kind != kind]
            sections.insert(at, change)
        elif same := next((old for old in sections if old.name == change.name), None):
            sections[sections.index(same)] = _changed(same, change)
        else:
            near = [i for i, old in enumerate(sections) if kind and old.kind == kind]
            sections.insert(max(near, default=len(sections) - 1) + 1, change)
    return sections


def _changed(old: _Section, change: _Section) -> _Section:
    """Return a table with other values; what the base says of a key stays, if nothing else is."""
    entries = {entry.key: entry for entry in old.entries}
    for entry in change.entries:
        lines = entry.lines
        if (before := entries.get(entry.key)) and len(before.lines) == len(lines) == 1:
            lines = lines if "#" in lines[0] else [lines[0] + _comment(before.lines[0])]
        above = _said(entry.above) or (before.above if before else [])
        entries[entry.key] = _Entry(entry.key, above, lines)
    return old._replace(above=_said(change.above) or old.above, entries=[*entries.values()])


def _comment(line: str) -> str:
    """Return the comment at the end of a line, with the blanks before it; empty without one."""
    after = re.split(r"[\"']", line)[-1]
    value, mark, _ = after.partition("#")
    return after[len(value.rstrip()) :] if mark else ""


def _said(lines: list[str]) -> list[str]:
    """Return comment lines; none if there are only blank lines."""
    return lines if any(line.strip() for line in lines) else []


def _text(sections: list[_Section]) -> str:
    lines: list[str] = []
    for section in sections:
        lines += section.above if section.above or not lines else [""]
        lines += [section.header] if section.header else []
        lines += [line for entry in section.entries for line in (*entry.above, *entry.lines)]
    return "\n".join(lines) + "\n"
