"""Messages of servers and libraries, made safe for a terminal and a log: one line, no credentials.

A server may repeat a request's headers in its answer, and a library that answer in its error;
addresses may be signed.
"""

import re

HIDDEN = "..."
ADVICE = "For more information check"
LONGEST = 400  # characters; some servers answer with a page


def message(error: BaseException, *secrets: str | None) -> str:
    """Return the first two lines of an error as one, without secrets; what follows is advice."""
    text = str(error) or type(error).__name__
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    text = hide(text, *secrets)
    lines = [re.sub(r"(?<!\.)\.$", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(ADVICE)]
    line = "".join(c if c.isprintable() else "?" for c in ": ".join(lines[:2]))
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}{HIDDEN}"


def hide(text: str, *secrets: str | None) -> str:
    """Return a text without secrets.

    Hides these, the values of Authorization headers, and users, passwords and queries in addresses.
    """
    for secret in filter(None, secrets):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"(?i)\b(bearer|basic)[ :]+\S+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"(\w://)[^/\s@]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#]*[?#])\S+", rf"\1{HIDDEN}", text)
