"""What pages show of a user's addresses and folders: nothing that may be a credential."""

import re
from typing import Any

from lockstep.errors import without_credentials
from pipeline.audit import verdict_text


def without_secrets(value: Any) -> Any:
    """Return a copy whose addresses have neither user and password nor a query, maybe signed."""
    match value:
        case dict():
            return {key: without_secrets(inner) for key, inner in value.items()}
        case list():
            return [without_secrets(inner) for inner in value]
        case str():
            return without_credentials(value)
    return value


def without_folders(text: str) -> str:
    """Return text of the environment without absolute paths, as in --xla_dump_to=/home/me."""
    return re.sub(r"(?<![^\s='\":,])/[^\s'\",]+", "...", text)


def code(text: object) -> str:
    """Return a code span for a table cell, in which no text is markup."""
    shown = re.sub(r"[\n\t]", " ", verdict_text.printable(str(text)))
    longest = max(map(len, re.findall("`+", shown)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if shown[:1] in ("", "`") or shown[-1:] == "`" else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}".replace("|", r"\|")
