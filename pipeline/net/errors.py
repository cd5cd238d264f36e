"""Errors, and what they show of others' words; the package around this one may bring its own.

It does so by having names of `OWN`. Alone, this package has the plain ones below.
"""

import re
import sys

HIDDEN = "..."
NAME_BYTES, DEEPEST = 1024, 64  # at most, of a path in a folder, as in S3
ADVICE = "For more information check"
LONGEST_ERROR = 400  # characters of a library's error; some servers answer with a page
OWN = ("AGENT", "NetError", "BadRequestError", "brief", "hide", "keep_secret", "lacking", "reveals")
AGENT = "net"  # of requests

_secrets: set[str] = set()


class NetError(Exception):
    """The error of files and requests that the user can fix: one line, found and expected."""

    def __str__(self) -> str:
        return hide(super().__str__())


class BadRequestError(NetError):
    """The error of a network request that cannot be met, though its target is well."""


def keep_secret(*secrets: str | None) -> None:
    """Hide these secrets in whatever errors of the network show from now on."""
    _secrets.update(secret for secret in secrets if secret)


def reveals(text: str) -> bool:
    """Return whether an error's text of the network has one of the secrets that are kept."""
    return any(secret in text for secret in _secrets)


def hide(text: str) -> str:
    """Return a network error's text without secrets, and addresses without user and query."""
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    text = re.sub(r"(\w://)[^/\s?#]*@", r"\1", text)
    # the query is optional, so that no two attempts begin in one stretch: the time stays linear
    return re.sub(r"(\w://[^\s?#]*)([?#]\S+)?", _without_query, text)


def _without_query(address: re.Match[str]) -> str:
    return f"{address[1]}?{HIDDEN}" if address[2] else address[1]


def brief(text: str, width: int = 60) -> str:
    """Return the beginning of an error's text as one printable line without secrets."""
    line = "".join(c if c.isprintable() else HIDDEN for c in hide(text))
    return line if len(line) <= width else line[: width - len(HIDDEN)] + HIDDEN


def lacking(where: str, module: str) -> NetError:
    """Return the error for a package that is not installed; `where` says what needs it."""
    return NetError(f"{where}: {module} is not installed, expected it")


_around = sys.modules.get(__package__.rpartition(".")[0])
globals().update({name: getattr(_around, name) for name in OWN if hasattr(_around, name)})


def message(error: BaseException) -> str:
    """Return the first two lines of a library's error as one; what follows is advice."""
    text = str(error) or type(error).__name__
    if error.__cause__ is not None and str(error.__cause__) not in text:
        text += f"\n{error.__cause__}"
    lines = [re.sub(r"(?<!\.)\.$", "", line.strip()) for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(ADVICE)]
    return brief(": ".join(lines[:2]), LONGEST_ERROR)


def is_path(name: str) -> bool:
    """Return whether a name can only be a path on this machine, and no name on the hub."""
    return name in (".", "..") or name.startswith(("/", "./", "../", "~"))


def check_name(name: str, where: str) -> str:
    """Return a name if it can be a path in a folder.

    Nothing is ever written under such a name, but a server that gives another is not to be trusted.

    Raises:
      NetError: it is absolute, leads out of the folder, is not printable, is too long or too deep,
        or has a secret.
    """
    parts = name.split("/")
    is_inside = "\\" not in name and not {"", ".", ".."} & set(parts)
    fits = len(parts) <= DEEPEST and name.isprintable() and len(name.encode()) <= NAME_BYTES
    if not (is_inside and fits) or reveals(name):
        raise NetError(
            f"{where}: lists a file named {brief(repr(name), 80)}, expected a path inside it"
        )
    return name
