"""The exception for everything a user can fix, and what is shown of others' words.

A server, a file or a run file may say anything: credentials that were sent to it, codes that steer
a terminal, a line break and a line that looks like ours. `shown` makes one harmless line of it;
every error and every line of a log goes through it.
"""

import json
import re
from functools import lru_cache
from urllib.parse import quote

HIDDEN = "..."
LEAST = 4  # characters of a secret: a shorter one would hide half of every text
CERTAIN = 8  # characters of a secret that is in no text by chance
LONGEST, END = 1200, 400  # characters of an error, and of its end, which says what was expected
_secrets: set[str] = set()


class LockstepError(Exception):
    """A problem that the user can fix.

    Its message is one line: the file, key or tensor, the value found, and what was expected. The
    command line prints it without a traceback and exits with status 1.
    """

    def __str__(self) -> str:
        line = shown(super().__str__())
        if len(line) > LONGEST:  # it echoes a value whole
            line = line[: LONGEST - END - len(HIDDEN)] + HIDDEN + line[-END:]
        return line


def keep_secret(*secrets: str | None) -> None:
    """Hide these in whatever is shown from now on, also as an address or JSON would spell them."""
    for secret in secrets:
        if secret and len(secret) >= LEAST:
            bare = secret.rstrip("=")  # base64, as some write it
            spelled = (bare, quote(secret, safe=""), json.dumps(secret)[1:-1], repr(secret)[1:-1])
            _secrets.update(text for text in (secret, *spelled) if len(text) >= LEAST)


def reveals(text: str) -> bool:
    """Return whether a text has one of the secrets that are kept, which is no chance."""
    certain = tuple(secret for secret in tuple(_secrets) if len(secret) >= CERTAIN)
    return _any_of(certain).search(text) is not None


def hide(text: str) -> str:
    """Return a text without secrets, in whatever case their letters are.

    Hides those that are kept, users, passwords and queries in addresses, and what signs a request.
    """
    text = _any_of(tuple(_secrets)).sub(HIDDEN, text)
    text = re.sub(r"(?i)\b(bearer|basic)[ :]+\S+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"(?i)\b(credential|signature)=[^\s,;&]+", rf"\1={HIDDEN}", text)
    text = re.sub(r"(\w://)[^/\s@]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#]*[?#])\S+", rf"\1{HIDDEN}", text)


@lru_cache(maxsize=4)
def _any_of(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of any of these texts, the longest first; of nothing, if there are none."""
    longest = sorted(secrets, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)", re.IGNORECASE)


def shown(text: str) -> str:
    """Return a text as one line without secrets, in which nothing steers a terminal."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in hide(text))
    return "".join(escaped)


def brief(text: str, width: int = 60) -> str:
    """Return the beginning of `shown`: what is cut first could be no secret in full any more."""
    text = shown(text)
    return text if len(text) <= width else text[: width - len(HIDDEN)] + HIDDEN
