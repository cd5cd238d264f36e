"""A compiled program is run only by the name, and with the bytes, that it was kept with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stage import compiled
from pipeline.stage.keys import PROJECT

KEEP = """
import sys
import jax
from pipeline.stage import devices
devices.keep_compiled(sys.argv[1])
x = jax.device_put(8.0)
print(jax.jit(lambda x: x + 1)(x), jax.jit(lambda x: x * 2)(x))
"""


def keep(folder: Path) -> subprocess.CompletedProcess:
    """Run two small programs as a stage does."""
    environment = os.environ.copy()
    del environment["JAX_COMPILATION_CACHE_DIR"]
    command = [sys.executable, "-c", KEEP, str(folder)]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, check=True, capture_output=True, text=True
    )


def test_two_programs_that_changed_their_names_are_compiled_again(tmp_path):
    first = keep(tmp_path)
    assert (first.stdout, first.stderr) == ("9.0 16.0\n", "")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    (one, program), (other, another) = kept.items()  # and nothing else, of JAX's own say
    one.write_bytes(another)
    other.write_bytes(program)
    second = keep(tmp_path)
    assert second.stdout == first.stdout
    assert second.stderr.count("\n") == 1, second.stderr
    assert "found another program than was kept there; it is compiled again" in second.stderr
    assert all(compiled.CheckedCache(tmp_path).get(path.stem) for path in kept), "not kept anew"


def changed(content: bytes) -> dict[str, bytes]:
    flipped = bytearray(content)
    flipped[-1] ^= 1
    return {"flipped": bytes(flipped), "cut": content[:-1], "longer": content + b"x", "empty": b""}


@pytest.mark.parametrize("how", changed(b"x"))
def test_a_program_whose_file_has_changed_is_not_returned(tmp_path, how):
    cache = compiled.CheckedCache(tmp_path)
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"
    (file,) = tmp_path.iterdir()
    file.write_bytes(changed(file.read_bytes())[how])
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"


def test_a_jax_whose_programs_cannot_be_checked_is_told_to_keep_none(monkeypatch):
    from jax._src import compilation_cache

    monkeypatch.delattr(compilation_cache, "get_file_cache")
    assert not compiled.check_programs()
