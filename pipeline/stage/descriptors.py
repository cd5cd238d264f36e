"""The number of files that a process may have open at once."""

import resource

from pipeline.errors import LockstepError

LEAST = 128  # orbax, with a few devices; with fewer it ends in tracebacks of its event loops


def check() -> None:
    """Check the limit of this process.

    Raises:
      LockstepError: It is too low.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < LEAST:
        raise LockstepError(f"ulimit -n: {limit} open files, expected at least {LEAST}")
