"""A compiled program is run only by the name, and with the bytes, that it was kept with."""

import subprocess
import sys
from pathlib import Path

from pipeline.stage import compiled
from pipeline.stage.keys import PROJECT
from tests import tiny

KEEP = """
import sys
import jax
from pipeline.stage import devices
devices.keep_compiled(sys.argv[1])
more, double = jax.jit(lambda x: x + 1), jax.jit(lambda x: x * 2)
for device in jax.devices():
    x = jax.device_put(8.0, device)
    print(more(x), double(x), *more(x).devices())
"""


def keep(folder: Path) -> subprocess.CompletedProcess:
    """Run two small programs as a stage does, each on two devices."""
    return tiny.python("-c", KEEP, folder, JAX_NUM_CPU_DEVICES="2", JAX_COMPILATION_CACHE_DIR="")


def test_two_programs_that_changed_their_names_are_compiled_again(tmp_path):
    first = keep(tmp_path)
    assert (first.stdout, first.stderr) == ("9.0 16.0 cpu:0\n9.0 16.0 cpu:1\n", "")
    kept = {path: path.read_bytes() for path in tmp_path.iterdir()}
    (one, program), (other, another) = kept.items()  # and nothing else, of JAX's own say
    one.write_bytes(another)
    other.write_bytes(program)
    second = keep(tmp_path)
    assert second.stdout == first.stdout
    assert second.stderr.count("\n") == 1, second.stderr
    assert "the program differs from the one stored there; it is compiled again" in second.stderr
    assert all(compiled.CheckedCache(tmp_path).get(path.stem) for path in kept), "not kept anew"


def test_a_program_whose_file_is_cut_is_not_returned(tmp_path):
    cache = compiled.CheckedCache(tmp_path)
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"


OPTIONS = """
from pipeline.stage import devices
devices.prepare_alone()
import jax
from jax._src import compiler
devices.keep_compiled("unused")
options = compiler.get_compile_options(1, 1)  # each keeps a part of the one before
of_build = options.executable_build_options
flags = of_build.debug_options
print(jax.config.jax_compilation_cache_dir, flags.xla_gpu_per_fusion_autotune_cache_dir)
"""


def test_what_other_programs_tuned_in_the_users_own_cache_is_not_looked_up(tmp_path):
    done = tiny.python("-c", OPTIONS, JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert (done.stdout, done.stderr) == (f"{tmp_path} \n", "")


COMPILE = """
import sys, time
from pathlib import Path
from pipeline.stage.compiled import CheckedCache
cache, compiled = CheckedCache(sys.argv[1]), 0
print("ready", flush=True)
sys.stdin.readline()
for key in ("a", "b"):
    if cache.get(key) is None:
        compiled += 1
        time.sleep(0.3)
        cache.put(key, b"program")
print(compiled, flush=True)
"""
HANG = "import sys; from pipeline.stage.compiled import *; cache = CheckedCache(sys.argv[1])"
HANG += "; cache.get('a'); print('ready', flush=True); sys.stdin.readline()"


def start(program: str, folder: Path) -> subprocess.Popen:
    """Start a program that says when it is ready, and goes on at a line."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program, str(folder)]
    process = subprocess.Popen(command, cwd=PROJECT, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_need_a_program_at_once_compile_it_once(tmp_path):
    processes = [start(COMPILE, tmp_path) for _ in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    assert sum(int(process.communicate()[0]) for process in processes) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"a.program", "b.program"}


def test_a_killed_process_holds_up_nobody_and_a_hanging_one_not_for_ever(tmp_path, monkeypatch):
    hanging, cache = start(HANG, tmp_path), compiled.CheckedCache(tmp_path)
    monkeypatch.setattr(compiled, "PATIENCE", 0.1)
    assert cache.get("a") is None
    cache.put("a", b"other")  # it is the other's to store
    assert cache.get("a") is None
    monkeypatch.setattr(compiled, "PATIENCE", 60.0)
    hanging.kill()
    hanging.communicate()
    assert cache.get("a") is None
    cache.put("a", b"program")
    assert cache.get("a") == b"program"


def test_a_program_that_is_not_stored_holds_up_nobody_for_longer_than_it_takes(tmp_path):
    one, other = (compiled.CheckedCache(tmp_path) for _ in range(2))
    assert one.get("a") is None
    assert one.get("b") is None
    assert other.get("a") is None
    assert [path.name for path in tmp_path.iterdir() if "a" in path.name.split(".")] == [".a.part"]
    for cache, key in ((one, "b"), (other, "a")):
        cache.put(key, b"program")


def test_a_jax_whose_programs_cannot_be_checked_is_told_to_keep_none(monkeypatch):
    from jax._src import compilation_cache

    monkeypatch.delattr(compilation_cache, "get_file_cache")
    assert not compiled.check_programs()
