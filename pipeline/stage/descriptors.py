"""The number of files that a process may have open at once."""

import resource
from contextlib import suppress

from lockstep.errors import LockstepError

LEAST_FILES = 128  # orbax, with a few devices; with fewer it ends in tracebacks of its event loops
ENOUGH_FILES = 2**16  # open files of a training with thousands of peers


def check() -> None:
    """Raise this process's limit of descriptors as far as it may, and check that it is enough."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH_FILES if most == resource.RLIM_INFINITY else min(most, ENOUGH_FILES)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        with suppress(OSError, ValueError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
            limit = wanted
    if limit != resource.RLIM_INFINITY and limit < LEAST_FILES:
        raise LockstepError(f"ulimit -n: {limit} open files, expected at least {LEAST_FILES}")
