"""Credentials of Google's kind, whose tokens a server on the loopback interface gives out."""

import json
from functools import lru_cache
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from pipeline.net import google


@lru_cache
def private_key() -> str:
    """One for all, since to make one takes a while."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, *form).decode()


def use(file: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a service account, and names it in the environment.

    Args:
      file: where to.
      address: of the server that gives out its tokens.
      monkeypatch: takes it back.
    """
    # the library asks another server of Google's where the account may be used
    monkeypatch.setattr(
        "google.auth._regional_access_boundary_utils._RegionalAccessBoundaryManager"
        ".maybe_start_refresh",
        lambda *_: None,
    )
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": private_key(),
        "client_email": "us@example.org",
        "client_id": "1",
        "token_uri": f"{address}/token",
    }
    file.write_text(json.dumps(account))
    monkeypatch.setenv(google.KEY_VARIABLE, str(file))
