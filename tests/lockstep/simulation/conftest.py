"""One device for simulations."""

import jax
import pytest


@pytest.fixture
def one_device(monkeypatch):
    """XLA compiles a program for each device anew."""
    first = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda *_: first)
