"""A peer's answer, as the trainer reads it, for the table of tests/gate.

What peers may lie about, test_lying_peers.py has.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from parts.carrier import requests
from parts.carrier.requests import AnswerHeader, FrameError
from tests.gate.cases import (
    BOMB,
    BREAK,
    CASES,
    DEEP,
    DRIPPING,
    ENDLESS,
    SILENT,
    SURROGATE,
    Cells,
    No,
)

HEADER = {"number": 1, "process": "0" * 16, "arrays": [{"dtype": "float32", "shape": [3]}]}


@dataclass(frozen=True)
class PeerRow:
    """What reads an answer.

    Attributes:
      what: the operation.
      read: reads an answer that is wrong as a case says.
      error: what it raises.
      cells: what becomes of each case.
    """

    what: str
    read: Callable[[str], object]
    error: type[Exception]
    cells: Cells


def answer(case: str) -> list[bytes]:
    """The buffers of an answer that is wrong as a case says."""
    header = dict(HEADER)
    if case == SURROGATE:
        return [b'{"error": "\\ud800"}']
    if case == DEEP:
        return [b"[" * 10**5]
    if case == BOMB:
        header["arrays"] = [{"dtype": "float32", "shape": [2**50]}]
    if case == ENDLESS:
        header["error"] = "x" * 2**24
    return [json.dumps(header).encode(), bytes(8)]


CLOCK = No("each answer has a deadline, `[runtime] answer_seconds`")
ELSEWHERE = No("an answer is bytes, without files, pages or secrets")
PEERS = [
    PeerRow(
        "`train`, a peer's answer",
        lambda case: requests.decode(AnswerHeader, answer(case)),
        FrameError,
        dict.fromkeys(CASES, ELSEWHERE)
        | {SILENT: CLOCK, DRIPPING: CLOCK}
        | {SURROGATE: "expected a header", DEEP: "expected a header"}
        | {BOMB: "expected a header"}
        | {ENDLESS: "expected a header of at most ", BREAK: "8 bytes, expected 12 of float32"},
    )
]
