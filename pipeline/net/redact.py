"""What a server or a library said, made fit for a terminal and a log: one line, no credentials.

A server may put the request's own headers into its answer, and a library that answer into its
error; addresses may be signed.
"""

import re

HIDDEN = "..."
ADVICE = "For more information check"
MOST = 400  # characters; some servers answer with a page


def said(error: BaseException, *secrets: str | None) -> str:
    """The first two lines of an error, on one, without credentials; what follows is advice.

    Args:
      error: a library's.
      secrets: texts that must not be repeated; None is none.
    """
    text = str(error) or type(error).__name__
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    text = hide(text, *secrets)
    lines = [re.sub(r"(?<!\.)\.$", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(ADVICE)]
    line = "".join(c if c.isprintable() else "?" for c in ": ".join(lines[:2]))
    return line if len(line) <= MOST else f"{line[:MOST]}{HIDDEN}"


def hide(text: str, *secrets: str | None) -> str:
    """Text without these secrets, without what an Authorization header holds, and with addresses
    that have neither user and password nor a query."""
    for secret in filter(None, secrets):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"(?i)\b(bearer|basic)[ :]+\S+", rf"\1 {HIDDEN}", text)
    text = re.sub(r"(\w://)[^/\s@]*@", r"\1", text)
    return re.sub(r"(\w://[^\s?#]*[?#])\S+", rf"\1{HIDDEN}", text)
