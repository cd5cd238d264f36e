"""How fast a gradient and a round are, and what they take of memory."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax

import lockstep
from benchmarks import distro, everywhere, model
from benchmarks.accelerator.extent import NOTHING, Extent, Gradient, attempt, judged
from benchmarks.measuring import matrix_flops, published_flops
from benchmarks.sizes import SIZES
from benchmarks.trial import Trial, rounds_of
from pipeline.preflight.plan import run_memory
from pipeline.stage import devices

# Goals; PLANNED is how far memory may be from its plan.
MFU, OVERHEAD, PLANNED, BY_RULES = 0.45, 0.05, 0.15, 1.5


def machine(extent: Extent, work: Path) -> Iterator[dict]:
    """The devices, and how fast their matrix products are."""
    del work
    first = jax.devices()[0]
    published = published_flops()
    yield {
        "lockstep": lockstep.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        **devices.describe(),
        "devices": len(jax.devices()),
        "bytes_of_device": (first.memory_stats() or {}).get("bytes_limit"),
        "published_tflops": published and published / 1e12,
    }
    for precision in ("bfloat16", "float32"):
        flops = [matrix_flops(precision) for _ in range(extent.repeats)]
        yield {"precision": precision, "matrix_tflops": round(max(flops) / 1e12, 3)}


def gradient(extent: Extent, work: Path) -> Iterator[dict]:
    """A gradient's FLOP per second, as a share of the devices' published figure."""
    del work
    for case in extent.gradients:
        yield attempt(case._asdict(), partial(_gradient, case, extent))


def _gradient(case: Gradient, extent: Extent) -> dict:
    options = {"precision": "bfloat16", "repeats": extent.repeats, "alone": True}
    chosen = argparse.Namespace(**case._asdict(), **options)
    line = model.measure(case.size, chosen)
    flops = line["gradient"]["tokens_per_second"] * SIZES[case.size].flop_per_token
    published = published_flops()
    mfu = published and round(flops / published, 4)
    return line | {
        "tflops": round(flops / 1e12, 3),
        "published_tflops": published and published / 1e12,
        "mfu": mfu,
        "goal": MFU,
        "met": mfu and mfu >= MFU,
    }


def share(extent: Extent, work: Path) -> Iterator[dict]:
    """What DisTrO adds to a gradient: compress, exchange and apply, as shares of a round."""
    del work
    for topk in extent.topk:
        yield attempt({"size": extent.share, "topk": topk}, partial(_share, extent, topk))


def _share(extent: Extent, topk: int) -> dict:
    chosen = _chosen(extent, topk)
    run = distro.make_run(extent.share, extent.peers, chosen)
    line = distro.measure(extent.share, run, chosen)
    return line | {"goal": OVERHEAD, "met": _on_accelerator(line["overhead"] <= OVERHEAD)}


def steps_by_rules(extent: Extent, work: Path) -> Iterator[dict]:
    """A peer's step by rules, beside the same step as compiled: in float32, and in bfloat16.

    Layers are scanned, and nothing of them is kept for the backward pass: it has to fit.
    """
    del work
    alike = {"scan_layers": True, "remat": NOTHING}
    attention = extent.attention("bfloat16")
    kinds = {
        everywhere.AS_COMPILED: alike,
        "8 bits": alike | everywhere.KINDS["8 bits"],
        "bfloat16": alike | {"precision": "bfloat16", "attention": attention},
    }
    cases = extent.mine([(size, kind) for size in extent.steps for kind in kinds])
    for size in extent.steps:
        chosen = {kind: kinds[kind] for of, kind in cases if of == size}
        if chosen:
            yield attempt({"size": size}, partial(_step_by_rules, extent, size, chosen))


def _step_by_rules(extent: Extent, size: str, kinds: dict[str, dict]) -> dict:
    line = everywhere.measure(size, extent.repeats, kinds)
    ratio = line["ratio"].get("8 bits")
    what = f"a step by rules, {size}, 8 bits: times as long as in float32"
    return line | judged(what, ratio, BY_RULES, _on_accelerator(ratio and ratio <= BY_RULES))


def layouts(extent: Extent, work: Path) -> Iterator[dict]:
    """Rounds of layout `each`, and of `shard_map`: one fused program."""
    del work
    run = distro.make_run(extent.run, extent.peers, _chosen(extent, extent.topk[0]))
    for layout in ("each", "shard_map"):
        names = {"size": extent.run, "layout": layout, "precision": run.peers.precision}
        yield attempt(names, partial(rounds_of, run, layout, 2 * extent.repeats))


def memory(extent: Extent, work: Path) -> Iterator[dict]:
    """The most memory of some rounds beside what `lockstep plan` says.

    On a CPU that is memory of the process, and counts a checkpoint that nobody saves here.
    """
    del work
    for size in extent.memory:  # the largest last: a process knows the peak of all it did
        yield attempt({"size": size}, partial(_memory, extent, size))


def _memory(extent: Extent, size: str) -> dict:
    run = distro.make_run(size, extent.peers, _chosen(extent, extent.topk[0]))
    trial = Trial(run)
    plan = run_memory(run, trial.programs)
    for _ in range(extent.repeats):
        trial.take_round()
        trial.forward()
    measured = distro.peak_memory()
    planned = plan and (plan.whole_process if plan.in_one else plan.on_each_device)
    ratio = planned and round(measured / planned, 3)
    near = ratio and abs(ratio - 1) <= PLANNED
    return {
        "peers": run.peers.count,
        "planned_bytes": planned,
        "measured_bytes": measured,
        "ratio": ratio,
        "goal": PLANNED,
        "met": _on_accelerator(near),
    }


def _chosen(extent: Extent, topk: int) -> argparse.Namespace:
    return argparse.Namespace(
        topk=topk,
        precision="bfloat16",
        attention=extent.attention("bfloat16"),
        repeats=extent.repeats,
        beside=extent.beside,
    )


def _on_accelerator(met: bool | None) -> bool | None:
    """Whether a goal is met; None on a CPU, for which none of these was set."""
    return None if jax.default_backend() == "cpu" else met
