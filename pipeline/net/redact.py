"""Errors of libraries as one line, without credentials."""

import re

from lockstep.errors import brief

ADVICE = "For more information check"
LONGEST = 400  # characters; some servers answer with a page


def message(error: BaseException) -> str:
    """Return the first two lines of an error as one, without secrets; what follows is advice."""
    text = str(error) or type(error).__name__
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    lines = [re.sub(r"(?<!\.)\.$", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(ADVICE)]
    return brief(": ".join(lines[:2]), LONGEST)
