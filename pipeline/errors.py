"""The exception for everything a user can fix."""


class LockstepError(Exception):
    """A problem that the user can fix.

    Its message is one line: the file, key or tensor, the value found, and what was expected. The
    command line prints it without a traceback and exits with status 1.
    """
