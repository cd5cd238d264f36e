"""What a stage says of its progress where there is no terminal, and where there is one."""

import io
import logging
import re

import pytest

from lockstep.machine import progress
from lockstep.machine.progress import Progress, size
from pipeline.stage import logs
from pipeline.stage.logs import StdoutHandler


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_rounds_are_a_line_now_and_then_and_at_the_end(clock, capsys):
    with Progress("train", total=3, unit="round") as bar:
        for seconds in (6, 1, 1):
            clock[0] += seconds
            bar.advance(loss=1.5)
    assert capsys.readouterr().out == "train: round 1/3  loss 1.5\ntrain: round 3/3  loss 1.5\n"


def test_a_long_line_breaks_between_words_in_a_terminal_and_nowhere_else(monkeypatch, capsys):
    line = "disk: 290.0 MB while it trains, whole snapshots of at most sha-256 numbers each"
    logs.say(line)
    assert capsys.readouterr().out == f"{line}\n"
    terminal = Terminal()
    monkeypatch.setattr(progress.sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    logs.say(line)
    shown = terminal.getvalue().splitlines()
    assert len(shown) > 1 and all(len(one) <= 30 for one in shown)
    assert " ".join(map(str.strip, shown)) == line


def test_bytes_are_a_line_in_larger_units_with_their_rate(clock, capsys):
    with Progress("convert", total=3_400_000_000, unit="byte") as bar:
        clock[0] += 4
        bar.advance(1_000_000_000)
        clock[0] += 2
        bar.advance(200_000_000)
        clock[0] += 2
        bar.advance(2_200_000_000)
    assert capsys.readouterr().out == (
        "convert: 1.2/3.4 GB  200 MB/s\nconvert: 3.4/3.4 GB  425 MB/s\n"
    )


@pytest.mark.parametrize("unit, total", [("byte", 3_000_000), ("round", 4)])
def test_a_terminal_has_a_bar(monkeypatch, unit, total):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(progress, "BRIEF_SECONDS", 0)
    with Progress("convert", total=total, unit=unit) as bar:
        bar.advance(total // 2)
        bar.advance(total // 2)
    said = terminal.getvalue()
    assert "convert" in said
    assert ("3.0/3.0 MB" if unit == "byte" else "4/4") in said


def test_in_a_narrow_terminal_the_bar_stays_and_the_fields_take_more_lines(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setattr("rich._console", None)  # which an earlier test may have made, in its width
    with Progress("train", total=2, unit="round") as bar:
        bar.advance(loss=1.5, sent_per_peer="19.3 kB", train="0-3 5-9", late="4")
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.getvalue()).splitlines()
    bar, *fields = map(str.strip, shown[-3:])
    assert bar.startswith("train") and "1/2 round" in bar
    assert fields == ["loss 1.5  sent per peer 19.3 kB  train 0-3 5-9", "late 4"]


def test_a_logged_line_is_above_the_bar(monkeypatch):
    terminal, logger = Terminal(), logging.Logger("of a stage")
    logger.addHandler(StdoutHandler())
    monkeypatch.setattr("sys.stdout", terminal)
    with Progress("train", total=2, unit="round") as bar:
        bar.advance(loss=1.5)
        logger.info("a line")
    assert re.search(r"(\n|\r|\x1b\[2K)a line\n", terminal.getvalue())


@pytest.mark.parametrize("stdout", [io.StringIO, Terminal])
def test_bytes_that_take_no_time_are_not_shown(monkeypatch, stdout):
    printed = stdout()
    monkeypatch.setattr("sys.stdout", printed)
    with Progress("convert", total=10, unit="byte") as bar:
        bar.advance(10)
    assert printed.getvalue() == ""


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (999.4, "999 bytes"),
        (999.6, "1.0 kB"),
        (34_123, "34.1 kB"),
        (999_600, "1.0 MB"),
        (8_546_304, "8.5 MB"),
        (2.5e9, "2.5 GB"),
        (7e15, "7,000.0 TB"),
    ],
)
def test_sizes_are_in_powers_of_1000(count, said):
    assert size(count) == said
