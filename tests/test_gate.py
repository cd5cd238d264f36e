"""One gate: who reads a folder, an address or a peer, and what becomes of thirteen cases of each.

The tables are tests/gate; docs/reference/what-is-refused.md shows them.
"""

import tempfile
from pathlib import Path

import pytest

from lockstep import errors
from lockstep.errors import LockstepError
from pipeline.net import limits
from pipeline.runfile import Network
from pipeline.sources.token_files import preprocessed
from pipeline.stage.keys import PROJECT
from tests.gate import cases, page
from tests.gate.cases import CASES, RIGHT, No
from tests.gate.folders import FolderRow
from tests.gate.rows import FOLDERS, PEERS, SERVERS
from tests.gate.servers import ServerRow
from tests.linear import in_time
from tests.servers.misbehaviour import Misbehaviour

IN_TIME = 30  # seconds: a net for what would never end
Words = str | tuple[str, ...]


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    """Waits of hundredths of a second between attempts, and listings that soon are long."""
    brief = lambda seconds, cancelled: cancelled.wait(min(seconds, 0.02))  # noqa: E731
    monkeypatch.setattr(limits, "pause", brief)
    monkeypatch.setattr(limits, "LISTING_PAGES", 9)
    monkeypatch.setattr(limits, "LISTING_BYTES", 2**16)
    monkeypatch.setattr(preprocessed, "LEAST_NUMBERS", 2**16)  # so that bombs may be small


@pytest.fixture(scope="module")
def deep():
    with cases.deep_folder() as folder:
        yield folder


def outcome(read, *arguments: object, errors_of_reading: type[Exception] = LockstepError) -> str:
    """The one line with which reading ends, or RIGHT."""
    with in_time(IN_TIME):
        try:
            read(*arguments)
        except errors_of_reading as error:
            line = str(error)
            assert line.isprintable() and len(line) <= errors.LONGEST, line
            return line
    return RIGHT


def cells(rows: list, phase: str, *more: str) -> list:
    """The cells that something may come of."""
    found = []
    for row in rows:
        for case, cell in getattr(row, phase).items():
            if not isinstance(cell, No):
                found.append(pytest.param(row, case, cell, *more, id=f"{row.what}: {case}"))
    return found


@pytest.mark.parametrize(("row", "case", "says"), cells(FOLDERS, "cells"))
def test_what_a_folder_holds_is_read_right_or_refused_in_one_line(
    row: FolderRow, case: str, says: str, tmp_path: Path, deep: Path
):
    place = deep.parent if case == cases.DEEP else tmp_path  # where folders can be moved to
    folder, out = Path(tempfile.mkdtemp(dir=place)), tmp_path / "out"
    out.mkdir()
    row.make(folder)
    with cases.spoiled(case, folder, row.target, deep):
        line = outcome(row.read, folder, out)
    assert bool(line) == bool(says) and says in line


@pytest.mark.parametrize(
    ("row", "case", "says", "phase"),
    [*cells(SERVERS, "listing", "listing"), *cells(SERVERS, "content", "bytes")],
)
def test_what_a_server_lists_and_sends_is_right_or_refused_in_one_line(
    row: ServerRow, case: str, says: Words, phase: str, tmp_path: Path, monkeypatch
):
    """It does in one phase what a case says, in each of its forms."""
    waits = says and case in (cases.SILENT, cases.DRIPPING, cases.BREAK)
    patience = (0.2, 1.0, 5.0) if waits else (10.0,)  # more, where the machine has no time for it
    with row.serving(tmp_path / "home", monkeypatch) as place:
        if case in cases.NAMES:
            place.put(cases.NAMES[case])
            spoils = [None]
        else:
            spoils = cases.spoils(case, place.served, place.kind, phase)
        where = place.places.get("pages" if case == cases.PAGES else phase, place.places[phase])
        for number, spoil in enumerate(spoils):
            place.served.faults[:] = [Misbehaviour(spoil, where=where)] if spoil else []
            for seconds in patience:
                out = Path(tempfile.mkdtemp(dir=tmp_path))
                line = outcome(row.read, place, out, Network(attempts=2, stall_seconds=seconds))
                if happened := all(fault.hits for fault in place.served.faults):
                    break
            assert happened, line
            expected = says if isinstance(says, str) else says[number]
            assert bool(line) == bool(expected) and expected in line
            for secret in (*place.secrets, *cases.signatures(place.served)):
                assert secret.lower() not in line.lower()


@pytest.mark.parametrize(("row", "case", "says"), cells(PEERS, "cells"))
def test_what_a_peer_answers_is_read_right_or_refused_in_one_line(row, case: str, says: str):
    line = outcome(row.read, case, errors_of_reading=row.error)
    assert line and says in line


def test_each_row_has_all_thirteen_cases():
    of_folder, of_server = set(cases.FOLDER), set(cases.SERVER)
    assert all(row.cells.keys() == of_folder for row in FOLDERS)
    assert all(row.cells.keys() == set(CASES) for row in PEERS)
    for row in SERVERS:
        assert not row.listing or row.listing.keys() == of_server, row.what
        assert not row.content or row.content.keys() == set(cases.CONTENT), row.what


def test_the_page_is_the_table():
    found = (PROJECT / "docs/reference/what-is-refused.md").read_text()
    assert found.splitlines() == [*page.lines()]
