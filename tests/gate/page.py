"""The tables as a page: `python -m tests.gate.page > docs/reference/what-is-refused.md`."""

from collections.abc import Iterator

from tests.gate.cases import CASES, CONTENT, FOLDER, RIGHT, SERVER, Cell, Cells, No
from tests.gate.rows import FOLDERS, PEERS, SERVERS

HEAD = """# What is refused

What each command does with a folder, an address or a peer that is not as it should be.
`tests/test_gate.py` tries the same thirteen cases on each. The command ends within its limits,
with correct content or with one line. That line repeats no value whole, and no secret in any case
of letters. Quoted text in the tables is part of that line.

- Names and files: `pipeline/stage/untrusted_files.py`. A name is printable, has at most 1,024
  bytes and stays in its folder. A file is regular, and its size is checked before it is read into
  memory. No link leads out of the folder, and folders are nested at most 64 deep.
- Compressed content: the same file. Lines and columns of text, and the rounds of a publication, may
  unpack to 4 MiB or, if that is more, 200 times their compressed size; a row group to 2^28 numbers
  or 200 per byte; YAML to 100,000 values, and numbers of 400 digits. Parquet's text is read a row
  at a time. Only the size of one page of a parquet file, at most 2 GiB, is from the file's footer.
- Servers: `pipeline/net/limits.py`. A listing has at most 10,000 pages, 64 MiB and 10 minutes, and
  no page twice. An attempt ends when a server sends less than 1 KiB (a store of fsspec: 64 KiB) in
  `stall_seconds`; `attempts` such failures in a row end the download. The test uses smaller limits.
- Errors: `lockstep/errors.py`. A line has at most 1,200 characters.

[Network faults](network-faults.md) lists what else a server can do, and what is correct after it.
"""


def lines() -> Iterator[str]:
    """Yield the page's lines."""
    yield from HEAD.splitlines()
    yield from _table("Folders and files", FOLDERS, "cells", FOLDER)
    yield from _table("A server's listing, or its first answer", SERVERS, "listing", SERVER)
    yield from _table("A server's file", SERVERS, "content", CONTENT)
    yield from _table("A peer", PEERS, "cells", CASES)
    yield from ("", "An empty cell is a case that cannot arise, or that is allowed:", "")
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
    return "; ".join("correct" if word == RIGHT else f"`{word.strip()}`" for word in words)


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
