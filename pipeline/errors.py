"""The exception for everything a user can fix, and what is shown of others' words.

A server, a file or a run file may say anything: credentials that were sent to it, codes that steer
a terminal, a line break and a line that looks like ours. `shown` makes one harmless line of it;
every error and every line of a log goes through it.
"""

import json
import re
from urllib.parse import quote

HIDDEN = "..."
LONGEST = 1200  # characters of an error: a file or a server may say more
LEAST = 4  # characters of a secret: a shorter one would hide half of every text
CERTAIN = 8  # characters of a secret that is in no text by chance
_secrets: set[str] = set()


class LockstepError(Exception):
    """A problem that the user can fix.

    Its message is one line: the file, key or tensor, the value found, and what was expected. The
    command line prints it without a traceback and exits with status 1.
    """

    def __str__(self) -> str:
        line = shown(super().__str__())
        if len(line) <= LONGEST:
            return line
        end = LONGEST // 4  # which says what was expected
        return f"{line[: LONGEST - end - 5]} {HIDDEN} {line[-end:]}"


def keep_secret(*secrets: str | None) -> None:
    """Hide these in whatever is shown from now on, also as an address or JSON would spell them."""
    for secret in secrets:
        if secret and len(secret) >= LEAST:
            _secrets.update(
                (secret, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
            )


def reveals(text: str) -> bool:
    """Return whether a text has one of the secrets that are kept, which is no chance."""
    return any(len(secret) >= CERTAIN and secret in text for secret in tuple(_secrets))


def hide(text: str) -> str:
    """Return a text without secrets.

    Hides those that are kept, and users, passwords and queries in addresses.
    """
    for secret in sorted(tuple(_secrets), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"(?i)\b(bearer|basic)[ :]+\S+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"(\w://)[^/\s@]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#]*[?#])\S+", rf"\1{HIDDEN}", text)


def shown(text: str) -> str:
    """Return a text as one line without secrets, in which nothing steers a terminal."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in hide(text))
    return "".join(escaped)


def brief(text: str, width: int = 60) -> str:
    """Return the beginning of `shown`: what is cut first could be no secret in full any more."""
    text = shown(text)
    return text if len(text) <= width else text[: width - len(HIDDEN)] + HIDDEN
