"""The one exception a user is meant to read."""


class LockstepError(Exception):
    """A problem the user can act on.

    Its message is one line: the file, key or tensor, the value found, and what was expected. The
    command line prints it without a traceback and exits with status 1.
    """
