"""The version of this code; between releases, with the commit of its checkout."""

import subprocess
from pathlib import Path

from lockstep import __version__

CHECKOUT = Path(__file__).parents[1]
SOURCE = ("constraints*.txt", "lockstep", "models", "parts", "pipeline", "workloads")


def with_commit() -> str:
    """Return the release; between releases, `0.3.0.dev0+COMMIT` in a checkout of git.

    With `.changed` the source is not that of the commit. No result and no key has the commit: the
    code that made a result is in its key, by content.
    """
    if ".dev" not in __version__ or not (CHECKOUT / ".git").exists():
        return __version__
    commit = _git("rev-parse", "--short=12", "HEAD")
    if commit is None:
        return __version__
    changed = _git("status", "--porcelain", "--", *SOURCE)
    return f"{__version__}+{commit}{'.changed' if changed else ''}"


def commit() -> str | None:
    """Return the commit that this source is of; None if it is in no checkout, or was changed."""
    if not (CHECKOUT / ".git").exists() or _git("status", "--porcelain", "--", *SOURCE) != "":
        return None
    return _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Return git's output for the version of this code, whosever it is; None if git is missing."""
    try:  # named, or git takes none of another user's, and in a hook the hook's
        command = ["git", "-C", str(CHECKOUT), "--git-dir=.git", "--work-tree=.", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
