"""The allocator's settings reach the process, once, and a user's own stand."""

import os
import platform
import resource
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from lockstep.machine import allocator
from pipeline.stage.keys import PROJECT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")
PROGRAM = """
import os, sys
from lockstep.machine import allocator
print("begins", flush=True)
allocator.tune()
print(os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


def said(**changes: str) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", PROGRAM, "--option", "a b"]
    done = subprocess.run(
        command, cwd=PROJECT, env=environment | changes, capture_output=True, text=True, check=True
    )
    assert not done.stderr  # glibc complains there of a setting that it does not know
    return done.stdout.splitlines()


def test_a_process_starts_over_once_with_its_arguments_and_the_settings():
    first, second, last = said()
    assert first == second == "begins"
    assert "glibc.malloc.hugetlb=1" in last and last.endswith("['--option', 'a b']")


def test_a_users_own_settings_stand():
    assert said(GLIBC_TUNABLES="glibc.malloc.arena_max=3") == [
        "begins",
        "glibc.malloc.arena_max=3 ['--option', 'a b']",
    ]
    assert said(GLIBC_TUNABLES="")[1] == " ['--option', 'a b']"


def test_each_compilation_ends_with_a_trim_where_the_settings_are_ours(monkeypatch):
    trims: list[int] = []
    libc = SimpleNamespace(malloc_trim=trims.append)
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=3")
    allocator.trim_after_compiling()  # does nothing
    monkeypatch.setenv("GLIBC_TUNABLES", allocator.GLIBC_SETTINGS)
    allocator.trim_after_compiling()
    try:
        double = jax.jit(lambda x: 2 * x)
        double(1.0)
        assert trims == [0]
        double(2.0)  # compiled already
        assert trims == [0]
    finally:
        jax.monitoring.unregister_event_duration_listener(allocator._trim)


def test_within_a_block_freed_memory_is_used_again_and_returns_at_the_end(monkeypatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX"):
        monkeypatch.delenv(name, raising=False)

    def faults() -> int:
        """Pages that the kernel grants while 64 MB are filled, which were freed before."""
        np.ones(2**23)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        np.ones(2**23)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    asked = faults()
    with allocator.keeping():
        assert 10 * faults() < asked
    assert 2 * faults() > asked
    monkeypatch.setenv("MALLOC_ARENA_MAX", "3")
    with allocator.keeping():
        assert 2 * faults() > asked


def test_within_a_block_each_compilation_ends_with_a_trim(monkeypatch):
    trims: list[int] = []
    libc = SimpleNamespace(malloc_trim=trims.append)
    monkeypatch.setattr(allocator, "ctypes", SimpleNamespace(CDLL=lambda name: libc))
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setenv("GLIBC_TUNABLES", allocator.GLIBC_SETTINGS)
    with allocator.keeping():
        jax.jit(lambda x: 3 * x)(1.0)
    assert trims == [0]
    jax.jit(lambda x: 4 * x)(1.0)
    assert trims == [0]
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    with allocator.keeping():
        jax.jit(lambda x: 5 * x)(1.0)
    assert trims == [0]
