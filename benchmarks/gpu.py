"""All that was promised for an accelerator, measured: `python -m benchmarks.gpu --work data/gpu`.

Prints JSON lines, each as soon as it is known, so that a command that was cut off still tells.
Sections run one after the other, each in a process of its own: one that crashes, or runs out of
memory, costs only itself. What is left of `--seconds` is shared by the sections to come; one that
takes longer than its share is ended. `--sections` runs some of them:

    machine        the devices, and FLOP per second of large matrix products
    gradient       FLOP per second of a gradient, 124M and 350M, as a share of what is published
    suspects       what a gradient waits for: its variants, and the kernels of two of them
    share          compress, exchange and apply of DisTrO, as shares of a round
    bits           a run taken twice: whether it has the same bits
    audit          that run audited in another process, bit for bit, and taken there again
    by_rules       a run with `bits = "everywhere"`
    by_rules_on_cpu  that run audited bit for bit on a CPU, and taken there again
    steps_by_rules a step of such a run, beside one as compiled
    layouts        rounds of layout each, and of shard_map
    memory         the most memory of rounds, beside what `lockstep plan` says
    learning       100 rounds of AdamW, DisTrO and DiLoCo, with held-out losses
    simulated      rounds of `simulate`
    writing        tokens per second of text
    tasks          requests per second of a task
    autotuned      the first gradient with XLA's autotuning and without deterministic operations

audit needs bits, by_rules_on_cpu needs by_rules. A line with `goal` has `met`: null
where a goal is not of this device, or its data sheet is not in benchmarks/measuring.py. A section's
last line has `ended`. The exit status is 0 if all of them ended well, and no line has an `error`.

Compiling takes most of the time: 15 to 70 seconds a program on an H200. A second run with the same
`--work` finds the programs compiled, and measures more.

It needs a checkout, Python 3.11 or later, and the packages in NEEDED, with a plugin of JAX for the
accelerator; no network, no DVC, no torch. `--check` lists what is missing. `--size toy` runs all of
it on a CPU in minutes; its figures mean nothing.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from threading import Thread, Timer
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
# Of the distributions in pyproject.toml; others of these are not imported by what runs here.
NEEDED = (
    "flax",
    "jax",
    "matplotlib",
    "ml_dtypes",
    "numpy",
    "optax",
    "pydantic",
    "pyyaml",
    "rich",
    "safetensors",
    "tokenizers",
    "tomlkit",
    "urllib3",
)
PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")  # one of them, for NVIDIA's GPUs
LEAST = 0.5  # seconds; with fewer no section begins


class Section(NamedTuple):
    """The module of benchmarks/accelerator with the function of its name, and its weight: about its
    seconds on a GPU, by which sections share what is left. `environment` is what its process sees
    besides."""

    module: str
    weight: float
    environment: dict[str, str] = {}


# Where operations have to be deterministic, XLA takes the first way of each, whatever the level.
TUNED = "--xla_gpu_deterministic_ops=false --xla_gpu_autotune_level=4"
SECTIONS = {
    "machine": Section("speed", 15),
    "gradient": Section("speed", 120),
    "suspects": Section("suspects", 300),
    "share": Section("speed", 70),
    "bits": Section("proof", 40),
    "audit": Section("proof", 30),
    "by_rules": Section("proof", 60),
    "by_rules_on_cpu": Section("proof", 60, {"JAX_PLATFORMS": "cpu"}),
    "steps_by_rules": Section("speed", 60),
    "layouts": Section("speed", 30),
    "memory": Section("speed", 30),
    "learning": Section("learning", 200),
    "simulated": Section("learning", 30),
    "writing": Section("learning", 20),
    "tasks": Section("learning", 20),
    "autotuned": Section("speed", 25, {"XLA_FLAGS": TUNED}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="list the packages that are missing")
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--sections", type=_names, default=list(SECTIONS), metavar="A,B")
    parser.add_argument("--seconds", type=float, default=480, help="of all sections together")
    parser.add_argument("--work", type=Path, help="a folder to keep; else one that is removed")
    parser.add_argument("--alone", choices=SECTIONS, help=argparse.SUPPRESS)  # for --seconds
    chosen = parser.parse_args()
    missing = list(lines_of_check())
    if chosen.check:
        print(*missing or [f"all {len(NEEDED)} packages are here"], sep="\n")
        print(_plugin())
    if chosen.check or missing:
        sys.exit("error: packages are missing; --check lists them" if missing else 0)
    if chosen.alone:
        sys.exit(alone(chosen.alone, chosen.size, chosen.work, chosen.seconds))
    with tempfile.TemporaryDirectory() as folder:
        work = chosen.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        lines = all_sections(chosen.sections, chosen.size, work.absolute(), chosen.seconds)
        sys.exit(sum([_print(line) for line in lines]) > 0)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        choices = ", ".join(SECTIONS)
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, expected of {choices}")
    return names


def _print(line: dict) -> bool:
    """Prints a line, and returns whether it reports that something went wrong."""
    print(json.dumps(line), flush=True)
    return "error" in line or line.get("ended", "well") != "well"


# ---- What is here ----


def lines_of_check() -> Iterator[str]:
    """A line for each package that is missing; older ones are tried as they are."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=!~\[; ]", requirement)[0]
        if name in NEEDED and _version(name) is None:
            yield f"{requirement}: missing"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plugin() -> str:
    plugins = [f"{name} {version}" for name in PLUGINS if (version := _version(name))]
    return (
        f"JAX {_version('jax')} with {', '.join(plugins) or 'no plugin of ' + ' or '.join(PLUGINS)}"
    )


# ---- All sections, each in a process ----


def all_sections(names: list[str], size: str, work: Path, seconds: float) -> Iterator[dict]:
    """The lines of sections that share so many seconds, and one at the end of each."""
    end = time.monotonic() + seconds
    for place, name in enumerate(names):
        left = end - time.monotonic()
        later = sum(SECTIONS[other].weight for other in names[place:])
        limit = left * SECTIONS[name].weight / later
        if limit < LEAST:
            yield {"section": name, "ended": "not begun", "limit": round(max(limit, 0.0), 1)}
        else:
            yield from one_section(name, size, work, limit)


def one_section(name: str, size: str, work: Path, limit: float) -> Iterator[dict]:
    """The lines of a section in a process of its own, which has `limit` seconds."""
    started, late = time.monotonic(), []
    options = ["--alone", name, "--size", size, "--work", str(work), "--seconds", str(limit)]
    flags = SECTIONS[name].environment
    if "XLA_FLAGS" in flags:  # the user's own come last, and win
        flags = flags | {"XLA_FLAGS": f"{flags['XLA_FLAGS']} {os.environ.get('XLA_FLAGS', '')}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=PROJECT,
        env=os.environ | flags,
        stdout=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        late.append(True)
        process.kill()

    timer = Timer(limit, end)
    timer.start()
    try:
        for text in process.stdout:
            if text.endswith("\n"):  # else it was ended in the middle of a line
                yield json.loads(text)
        status = process.wait()
    finally:
        timer.cancel()
        process.kill()
    took = round(time.monotonic() - started, 1)
    last = {"section": name, "ended": "well", "seconds": took, "limit": round(limit, 1)}
    if late:
        last["ended"] = "after its time"
    elif status:
        last["ended"] = f"with status {status}"
    yield last


# ---- One section, in this process ----


def alone(name: str, size: str, work: Path, seconds: float) -> int:
    """Prints a section's lines; returns the status to exit with."""
    from lockstep.machine import allocator

    allocator.tune()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is none of the lines
    Thread(target=partial(_end_with, os.getppid()), daemon=True).start()
    prepare(work)
    for line in lines_of(name, size, work, seconds):
        print(json.dumps(line), file=stdout, flush=True)
    return 0


def prepare(work: Path) -> None:
    """Sets devices up as for a run that leaves no core idle; all sections keep their programs."""
    from benchmarks import sizes
    from benchmarks.measuring import CORES
    from pipeline.stage import devices

    document = sizes.document(sizes.SIZES["toy"], CORES)
    document["peers"]["threads"] = max(CORES, document["peers"]["threads"])
    devices.prepare(sizes.load(document))
    devices.keep_compiled(work / "compiled")


def lines_of(name: str, size: str, work: Path, seconds: float) -> Iterator[dict]:
    """The lines of a section, and of the error that ended it; devices are prepared."""
    from benchmarks.accelerator.extent import EXTENTS, explained

    section, extent = SECTIONS[name], EXTENTS[size]._replace(seconds=seconds)
    try:
        module = import_module(f"benchmarks.accelerator.{section.module}")
        for line in getattr(module, name)(extent, work):
            yield {"section": name} | line
    except Exception as error:
        yield {"section": name, "error": explained(error)}


def _end_with(parent: int) -> None:
    """Ends this process as soon as its parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
