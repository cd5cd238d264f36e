"""What pages show of a user's addresses and folders: nothing that may be a credential."""

import re
from typing import Any


def without_secrets(value: Any) -> Any:
    """Return a copy whose addresses have neither user and password nor a query, maybe signed."""
    match value:
        case dict():
            return {key: without_secrets(inner) for key, inner in value.items()}
        case list():
            return [without_secrets(inner) for inner in value]
        case str():
            value = re.sub(r"(\w://)[^/\s]*@", r"\1", value)
            return re.sub(r"(\w://[^\s?#]*[?#])\S+", r"\1...", value)
    return value


def without_folders(text: str) -> str:
    """Return text of the environment without absolute paths, as in --xla_dump_to=/home/me."""
    return re.sub(r"(?<![^\s='\":,])/[^\s'\",]+", "...", text)
