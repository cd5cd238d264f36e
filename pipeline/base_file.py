"""A run file that says only how it differs from another one, its base: read, and written whole.

    base = "default.toml"        # beside it, at its top
    [peers]
    count = 8

Its tables are merged into the base's. A table that says which kind something is, such as
`[model.LLM.optimizer.AdamW]`, takes the place of the base's. The stages, DVC and Snakemake read
params/run.toml, in which every table stands: `written_whole` makes such a file, with the comments
of both. Every Snakemake job imports this, so it imports nothing heavy.
"""

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from pipeline.toml_file import read_toml

BASE = "base"
KINDS = (  # enums of the run file: one kind, or another, never a mixture of two
    "model.LLM.checkpoint",
    "model.LLM.data_location",
    "model.LLM.lr_schedule",
    "model.LLM.optimizer",
)


def read_run_file(path: Path) -> dict[str, Any]:
    """Return the tables of a run file, those of its bases included.

    Raises:
      LockstepError: It or a base is missing or is not TOML, or a base has itself as its base.
    """
    document: dict[str, Any] = {}
    for file in reversed(_chain(path)):
        document = _merged(document, read_toml(file), "")
    document.pop(BASE, None)
    return document


def _chain(path: Path) -> list[Path]:
    """Return a run file, its base, the base of that, and so on."""
    files = [path]
    while (name := read_toml(files[-1]).get(BASE)) is not None:
        named = isinstance(name, str) and Path(name).name == name
        base = files[-1].parent / name if named else path
        if not named or not base.is_file():
            raise LockstepError(
                f"{files[-1]}: base is {name!r}, expected the name of a run file beside it"
            )
        if base in files:
            raise LockstepError(
                f"{files[-1]}: base is {name!r}, expected another file than one that needs it"
            )
        files.append(base)
    return files


def _merged(base: dict[str, Any], changes: dict[str, Any], where: str) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        path = f"{where}{key}"
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value, f"{path}.") if both and path not in KINDS else value
    return merged


# ---- Written whole ----


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


HEADER = re.compile(r"\[([\w.\"-]+)\]")


def written_whole(path: Path) -> str:
    """Return the text of a run file with every table of its bases; one without a base as it is.

    Raises:
      LockstepError: As `read_run_file`; or its keys are not written on lines of their own.
    """
    files = _chain(path)
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
    """Return the tables of a file as they are written, the keys above all headers first."""
    sections, above, lines = [_Section("", [], "", [])], [], text.splitlines()
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.startswith("#"):
            above.append(line)
        elif header := HEADER.match(line):
            sections.append(_Section(header[1], above, line, []))
            above = []
        else:
            value = [line]
            while lines and not _is_toml(value):  # a list over several lines
                value.append(lines.pop(0))
            sections[-1].entries.append(_Entry(line.partition("=")[0].strip(), above, value))
            above = []
    return sections


def _is_toml(lines: list[str]) -> bool:
    try:
        tomllib.loads("\n".join(lines))
    except tomllib.TOMLDecodeError:
        return False
    return True


def _over(base: list[_Section], changes: list[_Section], file: Path) -> list[_Section]:
    """Return the tables of a base with those of a file that has it."""
    (_, first, *rest), (top, *changed) = base, changes
    told = "\n".join(line for entry in top.entries for line in entry.above).rstrip()
    made = f"# Written whole from {file.name}, which has what differs from its base."
    _, _, others = "\n".join(first.above).partition("\n\n")  # the head of the base is its own
    head = [*told.splitlines(), "#", made, "", *others.splitlines(), ""]
    sections, replaced = [first._replace(above=head), *rest], set()
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
            comment = re.search(r"\s+#[^\"']*$", before.lines[0])
            lines = lines if comment is None or "#" in lines[0] else [lines[0] + comment[0]]
        above = _said(entry.above) or (before.above if before else [])
        entries[entry.key] = _Entry(entry.key, above, lines)
    return old._replace(above=_said(change.above) or old.above, entries=[*entries.values()])


def _said(lines: list[str]) -> list[str]:
    """Return comment lines; none where there are blank lines alone."""
    return lines if any(line.strip() for line in lines) else []


def _text(sections: list[_Section]) -> str:
    lines: list[str] = []
    for section in sections:
        lines += section.above if section.above or not lines else [""]
        lines += [section.header] if section.header else []
        lines += [line for entry in section.entries for line in (*entry.above, *entry.lines)]
    return "\n".join(lines) + "\n"
