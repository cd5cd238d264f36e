"""What a gradient waits for: the same gradient with one suspect cured at a time, and its kernels.

A variant takes the place of functions of the model and the loss while its program is traced. Its
line has the distance of its gradient from the first one's, so a cure that computes something else
shows itself.

Shapes in names: N tokens, D width, V vocabulary.
"""

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import Primitive
from jax.stages import Compiled

from benchmarks import sizes
from benchmarks.accelerator.extent import Extent, Gradient, attempt, judged
from benchmarks.measuring import CORES, in_turns, published_flops
from benchmarks.sizes import SIZES
from lockstep.programs.train_step import Programs
from models import parts
from pipeline.language_model import language_model

MFU = 0.45  # the goal
LISTED = 25  # kernels of a trace, those that take longest
TRACED = 2  # gradients of a trace
SAVED = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
FUSED_ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")


class Variant(NamedTuple):
    """A way to compute the gradient of `case`; by default as the library has it.

    Attributes:
      in_order: Whether the embedding's gradient is summed in order, as a run as compiled has it on
        a GPU; else it is a scatter.
      head_tokens: Tokens that have logits at a time, as `[peers] head_tokens`.
      attention_saved: Whether the backward pass is given what cuDNN's attention returned.
      traced: Whether its kernels are listed.
    """

    name: str
    case: Gradient
    in_order: bool = True
    head_tokens: int | None = None
    attention_saved: bool = False
    traced: bool = False


def variants(cases: tuple[Gradient, ...]) -> Iterator[Variant]:
    """The variants of the first case, those that decide most first; of others the cures."""
    first, *others = cases
    whole = SIZES[first.size].batch * SIZES[first.size].length
    cured = partial(Variant, head_tokens=whole)
    yield Variant("as it is", first, traced=True)
    yield cured("cured: logits whole", first, traced=True)
    yield Variant("scatter", first, in_order=False)
    for case in cases:
        yield cured("cured, attention saved", case, attention_saved=True)
    yield Variant("logits in 2 parts", first, head_tokens=whole // 2)
    for case in others:
        yield Variant("as it is", case)


def suspects(extent: Extent, work: Path) -> Iterator[dict]:
    """The time of a gradient by each variant, and the kernels of some of them."""
    expected: dict[str, jax.Array] = {}  # by size, the gradient of its first variant, flat
    for variant in extent.mine(list(variants(extent.suspects))):
        names = {"variant": variant.name}
        program: list[tuple[Compiled, tuple]] = []
        case = partial(_measure, variant, extent, expected, program)
        yield attempt(names | variant.case._asdict(), case)
        if variant.traced and program and extent.measures:
            kernels = attempt(names, lambda program=program: {"of": kernels_of(*program[0], work)})
            yield from (names | kernel for kernel in kernels.pop("of", [kernels]))


def _measure(variant: Variant, extent: Extent, expected: dict, program: list) -> dict:
    size = SIZES[variant.case.size]
    programs = _programs(variant.case, variant.head_tokens)
    arguments = _arguments(variant.case.size)
    started = perf_counter()
    with ExitStack() as patches:
        for target, name, replacement in _replaced(variant):
            patches.enter_context(mock.patch.object(target, name, replacement))
        compiled = jax.jit(programs.steps.gradient).lower(*arguments).compile()
    compiling = perf_counter() - started
    program.append((compiled, arguments))
    result = compiled(*arguments)
    line = _distance(result[1], variant.case.size, expected)
    del result
    seconds = median(
        in_turns({"it": lambda: jax.block_until_ready(compiled(*arguments))}, extent.repeats)["it"]
    )
    flops = size.batch * size.length * size.flop_per_token
    published = published_flops()
    mfu = published and round(flops / seconds / published, 4)
    memory = compiled.memory_analysis()
    return {
        "milliseconds": round(1000 * seconds, 3),
        "mfu": mfu,
        **judged(f"MFU, {variant.case.size}: {variant.name}", mfu, MFU, mfu and mfu >= MFU),
        **line,
        "temporary_bytes": memory and memory.temp_size_in_bytes,
        "compiling_seconds": round(compiling, 1),
    }


def _programs(case: Gradient, head_tokens: int | None = None) -> Programs:
    """The programs of a run in bfloat16 with one peer."""
    document = sizes.document(SIZES[case.size], 1)
    document["peers"] |= {
        "precision": "bfloat16",
        "attention": case.attention,
        "remat": case.remat,
        "scan_layers": case.scan,
        "threads": max(CORES, document["peers"]["threads"]),
        **({} if head_tokens is None else {"head_tokens": head_tokens}),
    }
    run = sizes.load(document)
    return language_model.programs_of(run, run.llm.checkpoint.config)


@cache
def _arguments(name: str) -> tuple:
    """Random params of a size, a micro-batch of its rows, and how many these are; on the device."""
    size, rng = SIZES[name], np.random.default_rng(0)

    def drawn(path: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if path.endswith("scale"):
            return np.ones(like.shape, like.dtype)
        return 0.02 * rng.standard_normal(like.shape, like.dtype)

    case = Gradient(name, "matmul", scan=True, remat="nothing_saveable")
    shapes = flatten_dict(_programs(case).task.shapes, sep="/")
    params = unflatten_dict({path: drawn(path, like) for path, like in shapes.items()}, sep="/")
    rows_MBT = rng.integers(size.vocabulary, size=(1, size.batch, size.length), dtype=np.int32)
    return jax.device_put((params, rows_MBT, np.int32(size.batch)))


@jax.jit
def _flat(gradient: dict) -> jax.Array:
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(gradient)])


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)


def _distance(gradient: dict, size: str, expected: dict[str, jax.Array]) -> dict:
    """How far a gradient is from the first of its size, by the norm of the first."""
    flat = _flat(gradient)
    return {"distance": float(_relative(flat, expected.setdefault(size, flat)))}


# ---- What takes the place of what ----


def _replaced(variant: Variant) -> Iterator[tuple[object, str, object]]:
    """What a variant replaces: (module or class, name, replacement)."""
    yield language_model.LanguageModel, "embedding_in_order", True  # on a CPU, too
    if not variant.in_order:
        yield parts, "rows_of_table", _scattered
    if variant.attention_saved:
        yield jax.checkpoint_policies, variant.case.remat, _saved


def _scattered(table_VD: jax.Array, tokens_N: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    return table_VD[tokens_N].astype(dtype)


def _saved(primitive: Primitive, *avals: object, **params: object) -> bool:
    return primitive.name in FUSED_ATTENTION or SAVED(primitive, *avals, **params)


# ---- What a trace says ----


def kernels_of(compiled: Compiled, arguments: tuple, work: Path) -> list[dict]:
    """The kernels of a program that take longest, of some runs that `jax.profiler` traced.

    Each with what it takes of one run, and what it computes, by XLA's text of the program. The
    last line has the sum of all, and how long the device had nothing to do between them.
    """
    folder = work / "trace"
    shutil.rmtree(folder, ignore_errors=True)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(TRACED):
            jax.block_until_ready(compiled(*arguments))
    (file,) = folder.rglob("*.trace.json.gz")
    events = list(_of_devices(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]))
    found: dict[tuple[str, str], list[float]] = {}
    for event in events:
        operation = event.get("args", {}).get("hlo_op", "")
        found.setdefault((event["name"], operation), []).append(event["dur"])
    computed = _computed(compiled.as_text())
    lines = []
    for key in sorted(found, key=lambda key: -sum(found[key]))[:LISTED]:
        kernel, operation = key
        lines.append(
            {
                "kernel": kernel[:120],
                "computes": computed.get(operation) or computed.get(kernel.replace("_", ".")),
                "milliseconds": round(sum(found[key]) / 1000 / TRACED, 4),
                "calls": round(len(found[key]) / TRACED, 1),
            }
            | ({} if operation == kernel else {"operation": operation})
        )
    total = {
        "kernels": len(found),
        "milliseconds": round(sum(map(sum, found.values())) / 1000 / TRACED, 3),
        "idle_milliseconds": round(_idle(events) / 1000 / TRACED, 3),
    }
    return [*lines, total]


def _of_devices(events: list[dict]) -> Iterator[dict]:
    """The events of kernels and copies: those of a device's streams; of a CPU, XLA's own."""
    processes, threads = {}, {}
    for event in events:
        if event.get("name") == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event.get("name") == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    on_gpu = any("GPU" in name for name in processes.values())
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            process = processes.get(event["pid"], "")
            stream = "Stream" in threads.get((event["pid"], event["tid"]), "")
            own = "hlo_op" in event.get("args", {})
            if ("GPU" in process and stream) if on_gpu else own:
                yield event


def _idle(events: list[dict]) -> float:
    """How long nothing ran between the first event and the last, in microseconds."""
    idle, end = 0.0, None
    for event in sorted(events, key=lambda event: event["ts"]):
        first, last = event["ts"], event["ts"] + event["dur"]
        idle += 0.0 if end is None else max(0.0, first - end)
        end = last if end is None else max(end, last)
    return idle


def _computed(text: str) -> dict[str, str]:
    """What each operation of a program computes, by its name: type, and where it stands in JAX.

    A fusion that does not say so computes what the last of its parts does.
    """
    computed, inside, later = {}, "", []
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(", line):
            inside = opened[1]
        named = re.match(r" +(?:ROOT )?%?([\w.-]+) = ([(\w\[\],]+)", line)
        if named is None:
            continue
        if place := re.search(r'op_name="([^"]*)"', line):
            computed[named[1]] = computed[inside] = f"{named[2]} {place[1][-160:]}"
        elif calls := re.search(r"calls=%?([\w.-]+)", line):
            later.append((named[1], calls[1]))
    return {name: computed[called] for name, called in later if called in computed} | computed
