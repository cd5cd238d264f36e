"""All that was promised for an accelerator, measured: `python -m benchmarks.gpu --work data/gpu`.

Prints JSON lines, each as soon as it is known, so that a command that was cut off still tells.
Sections run one after the other, each in a process of its own: one that crashes, or runs out of
memory, costs only itself. What is left of `--seconds` is shared by the sections to come; one that
takes longer than its share is ended. `--sections` runs some of them:

    machine        the devices, and FLOP per second of large matrix products
    gradient       FLOP per second of a gradient, 124M and 350M, as a share of what is published
    share          compress, exchange and apply of DisTrO, as shares of a round
    bits           a run taken twice: whether it has the same bits
    audit          that run audited in another process, bit for bit, and taken there again
    by_rules       a run with `bits = "everywhere"`
    by_rules_on_cpu  that run audited bit for bit on a CPU, and taken there again
    layouts        rounds of layout each, and of shard_map
    memory         the most memory of rounds, beside what `lockstep plan` says
    learning       100 rounds of AdamW, DisTrO and DiLoCo, with held-out losses
    writing        tokens per second of text
    tasks          requests per second of a task

and these, which alone are what `--visit` runs, in the order of what they decide:

    simulated      rounds of `simulate`, beside plain training in one scanned loop
    suspects       what a gradient waits for: its variants, and the kernels of two of them
    untuned        a gradient as a run has it: XLA takes the first way of each product
    tuned          the same, autotuned and not deterministic; what XLA chose is left in a file
    reloaded       the same as untuned, but by the choices of that file; and once more:
    reloaded_again
    default_run    200 rounds by rules of params/run.toml, whose params a CPU's are held to
    steps_by_rules a step by rules, beside one as compiled in float32 and in bfloat16

audit needs bits, by_rules_on_cpu needs by_rules, reloaded needs tuned. A line with `goal` has
`met`: null where a goal is not of this device, or its data sheet is not in benchmarks/measuring.py.
A section's last line has `ended`. The exit status is 0 if all of them ended well, and no line has
an `error`.

Compiling takes most of the time: 15 to 70 seconds a program on an H200. `--visit` compiles for all
its sections at once, before the first of them is measured, and ends with a page, on stderr: each
figure beside its goal. A second run with the same `--work` finds the programs compiled, and
measures more.

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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
    seconds on a GPU, by which sections share what is left.

    Attributes:
      environment: What its process sees besides.
      flags: XLA's, besides those of a run; with a folder of compiled programs of their own.
      parts: Processes that compile its cases before a visit.
      after: The section that leaves what this one compiles by.
    """

    module: str
    weight: float
    environment: dict[str, str] = {}
    flags: str = ""
    parts: int = 1
    after: str = ""


# What XLA chose for a GPU, in the folder of work: as it writes it, and as it reads it.
FRESH, CHOICES = "tuning/fresh.textproto", "tuning/choices.textproto"
# Where operations have to be deterministic, XLA takes the first way of each, whatever the level,
# but for those that it finds among the choices; it could not use Triton's.
LEVEL = "--xla_gpu_autotune_level=4 --xla_gpu_enable_triton_gemm=false"
WRITES = (
    f"{LEVEL} --xla_gpu_deterministic_ops=false --xla_gpu_dump_autotune_results_to={{}}/{FRESH}"
)
READS = (
    f"{LEVEL} --xla_gpu_load_autotune_results_from={{}}/{CHOICES} "
    "--xla_gpu_require_complete_aot_autotune_results=true "
    "--xla_gpu_experimental_autotune_cache_mode=AUTOTUNE_CACHE_MODE_READ"
)
VISIT = {  # those that decide most first
    "simulated": Section("simulated", 130, parts=10),
    "suspects": Section("suspects", 90, parts=6),
    "untuned": Section("tuning", 12),
    "tuned": Section("tuning", 12, flags=WRITES),
    "reloaded": Section("tuning", 12, flags=READS, after="tuned"),
    "reloaded_again": Section("tuning", 12, flags=READS, after="tuned"),
    "default_run": Section("proof", 25),
    "steps_by_rules": Section("speed", 40, parts=6),
}
SECTIONS = VISIT | {
    "machine": Section("speed", 15),
    "gradient": Section("speed", 120),
    "share": Section("speed", 70),
    "bits": Section("proof", 40),
    "audit": Section("proof", 30),
    "by_rules": Section("proof", 60),
    "by_rules_on_cpu": Section("proof", 60, {"JAX_PLATFORMS": "cpu"}),
    "layouts": Section("speed", 30),
    "memory": Section("speed", 30),
    "learning": Section("learning", 200),
    "writing": Section("learning", 20),
    "tasks": Section("learning", 20),
}
COMPILING = 0.5  # of a visit's seconds, at most
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # a GPU for several processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="list the packages that are missing")
    parser.add_argument("--size", choices=("full", "toy"), default="full")
    parser.add_argument("--sections", type=_names, default=list(SECTIONS), metavar="A,B")
    parser.add_argument("--visit", action="store_true", help="what decides most, and a page of it")
    parser.add_argument("--seconds", type=float, default=480, help="of all sections together")
    parser.add_argument("--work", type=Path, help="a folder to keep; else one that is removed")
    parser.add_argument("--alone", choices=SECTIONS, help=argparse.SUPPRESS)  # for --seconds
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of its cases, to compile
    chosen = parser.parse_args()
    missing = list(lines_of_check())
    if chosen.check:
        print(*missing or [f"all {len(NEEDED)} packages are here"], sep="\n")
        print(_plugin())
    if chosen.check or missing:
        sys.exit("error: packages are missing; --check lists them" if missing else 0)
    if chosen.alone:
        sys.exit(alone(chosen.alone, chosen.size, chosen.work, chosen.seconds, chosen.part))
    with tempfile.TemporaryDirectory() as folder:
        work = chosen.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        arguments = chosen.size, work.absolute(), chosen.seconds
        if chosen.visit:
            sys.exit(_print_all(visit(tuple(VISIT), *arguments), with_page=True))
        sys.exit(_print_all(all_sections(chosen.sections, *arguments), with_page=False))


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(SECTIONS)):
        choices = ", ".join(SECTIONS)
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, expected of {choices}")
    return names


def _print_all(lines: Iterable[dict], with_page: bool) -> bool:
    """Prints lines, and a page of them; returns whether one reports that something went wrong."""
    printed = []
    for line in lines:
        print(json.dumps(line), flush=True)
        printed.append(line)
    if with_page:
        print(*page(printed), sep="\n", file=sys.stderr)
    return any("error" in line or line.get("ended", "well") != "well" for line in printed)


def page(lines: list[dict]) -> Iterator[str]:
    """Each figure beside its goal, and what went wrong."""
    for line in lines:
        if "what" in line:
            met = {None: "", True: "met", False: "MISSED"}[line["met"]]
            goal = "" if line["goal"] is None else line["goal"]
            yield f"{line['what']:<78} {line['value']!s:>8} {goal!s:>6}  {met}".rstrip()
    for line in lines:
        if "error" in line:
            yield f"{line['section']}: error: {line['error']}"
        if line.get("ended", "well") != "well":
            yield f"{line['section']}: {line['ended']}"


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


# ---- A visit: all compile at once, then each is measured ----


def visit(names: Sequence[str], size: str, work: Path, seconds: float) -> Iterator[dict]:
    """The lines of sections whose programs are compiled before the first of them begins."""
    from lockstep.machine import cores

    end = time.monotonic() + seconds
    compiled = time.monotonic() + COMPILING * seconds
    begun: list[tuple[str, Future]] = []

    def compile(name: str, part: int) -> dict:
        wait([future for earlier, future in begun if earlier == SECTIONS[name].after])
        limit = max(LEAST, compiled - time.monotonic())
        *_, last = one_section(name, size, work, limit, part)
        return {"compiled": name, "part": part, "how": last["ended"], "seconds": last["seconds"]}

    workers = 2 * cores.count()  # a compilation has one thread most of its time
    with ThreadPoolExecutor(workers) as pool:  # begun in order, so what others wait for is first
        for name in names:
            for part in range(SECTIONS[name].parts):
                begun.append((name, pool.submit(compile, name, part)))
        yield from (future.result() for _, future in begun)
    yield from all_sections(names, size, work, end - time.monotonic())


# ---- All sections, each in a process ----


def all_sections(names: Sequence[str], size: str, work: Path, seconds: float) -> Iterator[dict]:
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


def one_section(
    name: str, size: str, work: Path, limit: float, part: int | None = None
) -> Iterator[dict]:
    """The lines of a section in a process of its own, which has `limit` seconds.

    A part of it is there to compile: of these there are several at once.
    """
    started, late = time.monotonic(), []
    options = ["--alone", name, "--size", size, "--work", str(work), "--seconds", str(limit)]
    if part is not None:
        options += ["--part", str(part)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", *options],
        cwd=PROJECT,
        env=os.environ | SECTIONS[name].environment | ({} if part is None else SHARED),
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


def alone(name: str, size: str, work: Path, seconds: float, part: int | None) -> int:
    """Prints a section's lines; returns the status to exit with."""
    from lockstep.machine import allocator

    allocator.tune()
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is none of the lines
    Thread(target=partial(_end_with, os.getppid()), daemon=True).start()
    prepare(work, name)
    for line in lines_of(name, size, work, seconds, part):
        print(json.dumps(line), file=stdout, flush=True)
    return 0


def prepare(work: Path, name: str) -> None:
    """Sets devices up as for a run that leaves no core idle; sections share their programs, but for
    those with flags of their own, which no run may have."""
    from benchmarks import sizes
    from benchmarks.measuring import CORES
    from pipeline.stage import devices

    document = sizes.document(sizes.SIZES["toy"], CORES)
    document["peers"]["threads"] = max(CORES, document["peers"]["threads"])
    devices.prepare(sizes.load(document))
    flags = SECTIONS[name].flags.format(work)
    if flags:
        (work / FRESH).parent.mkdir(parents=True, exist_ok=True)
        os.environ["XLA_FLAGS"] += f" {flags}"  # the last ones win
    devices.keep_compiled(work / (f"compiled_{name}" if flags else "compiled"))


def lines_of(
    name: str, size: str, work: Path, seconds: float, part: int | None = None
) -> Iterator[dict]:
    """The lines of a section, and of the error that ended it; devices are prepared."""
    from benchmarks.accelerator.extent import EXTENTS, explained

    section, extent = SECTIONS[name], EXTENTS[size]._replace(seconds=seconds)
    if part is not None:
        extent = extent.to_compile(part, section.parts)
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
