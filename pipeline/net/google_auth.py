"""Credentials for Google's storage, from the environment, as Google's own tools find them.

Without credentials, requests are anonymous and read public buckets.
"""

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from lockstep.errors import LockstepError, keep_secret
from pipeline import extras
from pipeline.net import redact

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
KEY = "GOOGLE_APPLICATION_CREDENTIALS"
EMULATOR = "STORAGE_EMULATOR_HOST"
ENDPOINT = "https://storage.googleapis.com"


def endpoint() -> str:
    """Return the server's address; $STORAGE_EMULATOR_HOST replaces Google's."""
    address = os.environ.get(EMULATOR, ENDPOINT).rstrip("/")
    return address if "://" in address else f"http://{address}"


def credentials(name: str) -> "Credentials":
    """Return the environment's credentials, or anonymous ones; `name` is the bucket in errors.

    An emulator of Google's server only sees credentials that $GOOGLE_APPLICATION_CREDENTIALS names.

    Raises:
      LockstepError: the environment names invalid credentials.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    key = os.environ.get(KEY)
    if os.environ.get(EMULATOR) and not key:
        return AnonymousCredentials()
    try:
        return google.auth.default(scopes=[SCOPE])[0]
    except google.auth.exceptions.DefaultCredentialsError as error:
        if key:
            raise LockstepError(
                f"{name}: {KEY}: {redact.message(error)}, expected a file of credentials"
            ) from None
        return AnonymousCredentials()


def headers(name: str, *, pushes: bool = False) -> dict[str, str]:
    """Return the headers of a request to a bucket, with a fresh token if there are credentials.

    A push needs google-auth, and counts against the quota project that the credentials name.

    Raises:
      LockstepError: the environment names credentials that cannot be used, or google-auth is needed
        and not installed.
    """
    try:
        import google.auth.exceptions
        from google.auth.transport.requests import Request
    except ImportError:
        if pushes or os.environ.get(KEY):
            because = f": {KEY} is set" if os.environ.get(KEY) else ""
            raise extras.lacking(f"{name}{because}", "google.auth") from None
        return {}
    current = _cached(name, os.environ.get(KEY), os.environ.get(EMULATOR))
    try:
        if not current.valid:
            current.refresh(Request())
    except google.auth.exceptions.GoogleAuthError as error:
        keep_secret(current.token)
        message = redact.message(error)
        raise LockstepError(f"{name}: {message}, expected usable credentials") from None
    if not current.token:
        return {}
    project = getattr(current, "quota_project_id", None) if pushes else None
    quota = {"x-goog-user-project": project} if project else {}
    return {"Authorization": f"Bearer {current.token}"} | quota


@lru_cache(maxsize=4)
def _cached(name: str, key: str | None, emulator: str | None) -> "Credentials":
    return credentials(name)
