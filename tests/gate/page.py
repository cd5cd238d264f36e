"""The tables as a page: `python -m tests.gate.page > docs/reference/what-is-refused.md`."""

from collections.abc import Iterator

from tests.gate.cases import CASES, CONTENT, FOLDER, RIGHT, SERVER, Cell, Cells, No
from tests.gate.rows import FOLDERS, PEERS, SERVERS

HEAD = """# What is refused

What comes of a folder, an address or a peer that is not what it should be. `tests/test_gate.py`
asks each command that reads one for the same thirteen cases. It ends within its limits, with what
is right or with one line: no value is repeated whole, and no secret in any case of letters. In the
tables, quoted text is part of that line.

- Names and files: `pipeline/stage/untrusted_files.py`. A name is printable, has at most 1,024
  bytes and stays in its folder. A file is regular, and where it is read into memory its size is
  looked at first. No link leads out of the folder, in which at most 64 folders are within each
  other.
- What unpacks, there too: lines and columns of text come to at most 4 MiB or 200 times their packed
  size, a row group of numbers to 2^28 or 200 for each of its bytes, YAML to 100,000 values.
  Parquet's text is read a row at a time. One page of a parquet file, of 2 GiB at most, is believed
  to be as large as the file's end says.
- Servers: `pipeline/net/limits.py`. A listing has at most 10,000 pages, 64 MiB and 10 minutes, and
  no page twice. An attempt ends when a server sends less than 1 KiB (a store of fsspec: 64 KiB) in
  `stall_seconds`; `attempts` such failures in a row end the download. The test's limits are small.
- Errors: `lockstep/errors.py`. A line has at most 1,200 characters.

[Network faults](network-faults.md) has what else a server can do, and what is right after it.
"""


def lines() -> Iterator[str]:
    """Yield the page's lines."""
    yield from HEAD.splitlines()
    yield from _table("Folders and files", FOLDERS, "cells", FOLDER)
    yield from _table("A server's listing, or its first answer", SERVERS, "listing", SERVER)
    yield from _table("A server's file", SERVERS, "content", CONTENT)
    yield from _table("A peer", PEERS, "cells", CASES)
    yield from ("", "A cell without text cannot arise:", "")
    for why, cells in sorted(_reasons().items()):
        yield f"- {why}: {', '.join(sorted(cells))}"


def _table(title: str, rows: list, phase: str, cases: tuple[str, ...]) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    asked = [row for row in rows if getattr(row, phase)]
    shown = [case for case in cases if any(_says(getattr(row, phase), case) for row in asked)]
    yield f"| | {' | '.join(shown)} |"
    yield "|---" * (len(shown) + 1) + "|"
    for row in asked:
        found = [_says(getattr(row, phase), case) for case in shown]
        yield f"| {row.what} | {' | '.join(found)} |"


def _says(cells: Cells, case: str) -> str:
    cell: Cell = cells.get(case, No(""))
    if isinstance(cell, No):
        return ""
    words = [cell] if isinstance(cell, str) else cell
    return "; ".join("right" if word == RIGHT else f"`{word.strip()}`" for word in words)


def _reasons() -> dict[str, set[str]]:
    reasons: dict[str, set[str]] = {}
    for row in (*FOLDERS, *SERVERS, *PEERS):
        for phase in ("cells", "listing", "content"):
            for case, cell in getattr(row, phase, {}).items():
                if isinstance(cell, No):
                    reasons.setdefault(cell.why, set()).add(case)
    return reasons


if __name__ == "__main__":
    print(*lines(), sep="\n")
