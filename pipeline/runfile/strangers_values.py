"""What a value of a stranger's key does, and how far it is taken: the kinds of answers to a key.

`strangers.py` has the answers to the core's keys; a part's are beside its tables.
"""

import re
from collections.abc import Callable, Collection
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.tables.validation import show
from pipeline.net import remote
from pipeline.runfile.tables import Evaluate

REPO_ID = r"\w[\w.-]*/\w[\w.-]*"
PRIVATE = "local|localhost|localdomain|internal|intranet|lan|home|corp|arpa"
# Of a name, no IP; without what one parser takes for the end of a host and another does not.
PUBLIC_URL = rf"https://(?:[\w-]+\.)+(?!(?:{PRIVATE})\b)[a-z][a-z0-9-]+(?::\d+)?(?:[/?][^\s\\]*)?"
MOST_IN_A_BATCH = 2**16  # rows or requests: no batch has more sequences
LONGEST_SIDE = 2**12  # of a block: its cosines take 32 bytes for each square of it, while made


class Use(IntEnum):
    """What a reader does with a stranger's run; each does what those before it do, and more.

    REPEATED: Steps are computed again, on rows that came with the run.
    FOLLOWED: Data and checkpoint are fetched, and every round is merged.
    JOINED: A peer of the reader's trains, and signs what it sends.
    """

    REPEATED = 1
    FOLLOWED = 2
    JOINED = 3


class KeyAnswer(NamedTuple):
    """What a stranger's value of a key does.

    Up to the use `until` any value is taken: nothing there acts on it, or it can do no harm. Beyond
    it `lacks` says what else is expected of a value, "" if nothing; by default, that it is the
    key's default.
    """

    until: int
    lacks: Callable[[Any], str] | None = None


def _lacks_hub_name(value: str) -> str:
    is_name = re.fullmatch(REPO_ID, value, re.ASCII) and not Path(value).exists()
    return "" if is_name else "owner/name on the hub, which is the name of no folder here"


def _lacks_https(value: str) -> str:
    if not re.fullmatch(PUBLIC_URL, value, re.ASCII | re.IGNORECASE):
        return "the https:// address of a server with a public name"
    return "a server that needs no password of ~/.netrc" * bool(remote.resolve_web(value).headers)


def _lacks_source(value: str) -> str:
    return _lacks_https(value) if "://" in value else _lacks_hub_name(value)


def _lacks_own_tasks(value: Collection[str]) -> str:
    own = Evaluate.model_fields["tasks"].default
    return "" if set(value) <= set(own) else f"{show(own)} or []"


FREE = KeyAnswer(Use.JOINED)
SAID = KeyAnswer(Use.REPEATED)  # fetched, pushed or consented to by nobody who repeats steps
LIE = KeyAnswer(Use.FOLLOWED)  # a peer of the reader's would sign it
NEVER = KeyAnswer(0)
BOUNDED = KeyAnswer(0, lambda value: f"at most {MOST_IN_A_BATCH}" * (value > MOST_IN_A_BATCH))
SIDE = KeyAnswer(0, lambda value: f"at most {LONGEST_SIDE}" * (value > LONGEST_SIDE))
HUB_NAME = KeyAnswer(Use.REPEATED, _lacks_hub_name)
HTTPS = KeyAnswer(Use.REPEATED, _lacks_https)
SOURCE = KeyAnswer(Use.REPEATED, _lacks_source)
NOWHERE = KeyAnswer(Use.REPEATED, lambda value: "[]" * bool(value))
OWN_TASKS = KeyAnswer(Use.REPEATED, _lacks_own_tasks)

AnswerRow = tuple[str, str, KeyAnswer]
"""Tables of the run file, with the kinds of an enum in them; their keys, and kinds; the answer."""
