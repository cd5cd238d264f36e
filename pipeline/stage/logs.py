"""Logging of stages: lines on standard output, without credentials."""

import logging
import shutil
import sys
import textwrap
from typing import TextIO

from lockstep.errors import shown

TALKATIVE = ("jax", "matplotlib", "httpx", "httpx2", "filelock", "urllib3", "fsspec")
MISTAKEN = ("absl", "asyncio")  # orbax warns without need, and logs what it raises


class StdoutHandler(logging.StreamHandler):
    """Writes to what `sys.stdout` is at the moment: a bar in a terminal puts lines above itself."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Standard output."""
        return sys.stdout


def say(line: str) -> None:
    """Print one line that reveals nothing; a terminal gets it broken between words."""
    print(_broken(shown(line)))


def _broken(line: str) -> str:
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(
        line,
        shutil.get_terminal_size().columns,
        subsequent_indent="    ",
        replace_whitespace=False,
        break_long_words=False,
        break_on_hyphens=False,
    )


def to_stdout(level: str) -> None:
    """Print what is logged from a level on, each message as one line that reveals nothing."""

    def one_line(record: logging.LogRecord) -> bool:
        record.msg, record.args = _broken(shown(record.getMessage())), ()
        return True

    handler = StdoutHandler()
    handler.addFilter(one_line)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    for names, least in ((TALKATIVE, logging.WARNING), (MISTAKEN, logging.CRITICAL)):
        for name in names:
            logging.getLogger(name).setLevel(least)
