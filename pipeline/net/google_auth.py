"""Who asks Google's storage: the environment's credentials, as Google's own tools find them.

Without any, one is nobody, and reads what everybody may.
"""

import os
from functools import lru_cache
from typing import TYPE_CHECKING

from pipeline.errors import LockstepError
from pipeline.net import redact as secrets

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
KEY = "GOOGLE_APPLICATION_CREDENTIALS"
EMULATOR = "STORAGE_EMULATOR_HOST"
ENDPOINT = "https://storage.googleapis.com"


def endpoint() -> str:
    """The server's address; $STORAGE_EMULATOR_HOST stands in for Google's."""
    found = os.environ.get(EMULATOR, ENDPOINT).rstrip("/")
    return found if "://" in found else f"http://{found}"


def credentials(name: str) -> "Credentials":
    """Those of the environment; without any, one is nobody.

    A server that stands in for Google's is shown none but those that were named for it.

    Args:
      name: what errors call the bucket.

    Raises:
      LockstepError: the environment names credentials that are none.
    """
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    named = os.environ.get(KEY)
    if os.environ.get(EMULATOR) and not named:
        return AnonymousCredentials()
    try:
        return google.auth.default(scopes=[SCOPE])[0]
    except google.auth.exceptions.DefaultCredentialsError as error:
        if named:
            said = secrets.said(error)
            raise LockstepError(f"{name}: {KEY}: {said}, expected a file of credentials") from None
        return AnonymousCredentials()


def token(name: str) -> str | None:
    """A bearer token that is good now; None: nobody's, or the extra gcs is not installed.

    Raises:
      LockstepError: credentials are named and cannot be used.
    """
    try:
        import google.auth.exceptions
        from google.auth.transport.requests import Request
    except ImportError:
        if os.environ.get(KEY):
            raise LockstepError(
                f"{name}: {KEY} is set and google-auth is not installed, expected the extra gcs: "
                "pip install -c constraints.txt -e '.[gcs]'"
            ) from None
        return None
    found = _credentials(name, os.environ.get(KEY), os.environ.get(EMULATOR))
    if not hasattr(found, "refresh") or type(found).__name__ == "AnonymousCredentials":
        return None
    try:
        if not found.valid:
            found.refresh(Request())
    except google.auth.exceptions.GoogleAuthError as error:
        said = secrets.said(error, found.token)
        raise LockstepError(f"{name}: {said}, expected credentials that may be used") from None
    return found.token


@lru_cache(maxsize=4)
def _credentials(name: str, key: str | None, emulator: str | None) -> "Credentials":
    return credentials(name)
