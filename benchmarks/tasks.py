"""Requests that tasks score, beside lm_eval's own `hf` backend: `python -m benchmarks.tasks`.

Prints one JSON line per model: the default run's export (`--export`) and a random Llama of 30 M
parameters. Both backends get the same requests as lm_eval gives them, texts, in one process and in
turns; the figures are medians. Ours takes `--batch-size` requests at once; the other one is
measured with 1, 8 and 32, and the best of these is what we are compared with. PyTorch's threads
wait for each other after every operation, so that other work slows it more than ours: where there
is some, compare with `--threads 1`, and by CPU time. A line has, for each kind of request, requests
per second (and per second of CPU time), the ratio, and the largest difference of a log-likelihood,
as |ours - theirs| / (1e-4 + 1e-5 |theirs|), of which 1 is the bound:

- choices: four choices of several tokens each, after lines of source code;
- letters: four choices of one token, which share a forward pass on both sides;
- rolling: whole texts, longer than the model.
"""

import argparse
import inspect
import io
import json
import logging
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median

from benchmarks import generate, sizes
from benchmarks.measuring import CORES
from benchmarks.sizes import SIZES
from lockstep.machine import allocator
from pipeline.stage import devices

THEIR_BATCHES = (1, 8, 32)
CONTEXT_LINES = 6
MODULES = (argparse, inspect, logging, tempfile)  # questions are about their source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--export", type=Path, default=Path("data/export"))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--model", choices=("default export", "30M"), nargs="+")
    chosen = parser.parse_args()
    allocator.tune()
    document = sizes.document(SIZES["30M"], chosen.threads)
    document["peers"]["threads"] = chosen.threads
    devices.prepare(sizes.load(document))
    logging.disable(logging.WARNING)  # lm_eval warns of each text that it cuts
    with tempfile.TemporaryDirectory() as folder:
        for name, export in (
            ("default export", chosen.export),
            ("30M", random_llama(Path(folder) / "30M", chosen.export)),
        ):
            if name in (chosen.model or name):
                line = {"benchmark": "tasks", "model": name} | measure(export, chosen)
                print(json.dumps(line), flush=True)


def measure(export: Path, chosen: argparse.Namespace) -> dict:
    import jax
    import torch
    from lm_eval.models.huggingface import HFLM

    from lockstep.programs.placement import device_groups
    from parts.tasks import task_model
    from parts.tasks.lm_eval import LmEvalModel
    from pipeline.weights import exported

    torch.set_num_threads(chosen.threads)
    read = exported.read(export)
    groups = device_groups(jax.devices(), 1)
    ours = LmEvalModel(task_model.from_folder(read, export, groups, chosen.batch_size))
    options = {"pretrained": str(export), "dtype": "float32", "device": "cpu"}
    backends = {"ours": ours} | {
        f"hf, batch {size}": HFLM(**options, batch_size=size) for size in THEIR_BATCHES
    }
    line = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(read.params)),
        "devices": len(groups),
        "threads": chosen.threads,
        "batch_size": chosen.batch_size,
    }
    for kind, (method, requests) in questions(chosen.documents).items():
        line[kind] = compare(backends, method, requests, chosen.repeats)
    return line


def compare(backends: dict, method: str, requests: list, repeats: int) -> dict:
    seconds, cpu_seconds, results = defaultdict(list), defaultdict(list), {}
    for repeat in range(repeats + 1):  # the first one compiles and warms up
        for name, backend in backends.items():
            results[name], *times = timed(lambda lm=backend: getattr(lm, method)(requests))
            if repeat:
                seconds[name].append(times[0])
                cpu_seconds[name].append(times[1])
    return {
        "requests": len(requests),
        "wall": speed(len(requests), seconds),
        "cpu": speed(len(requests), cpu_seconds),
        "difference": round(max(map(difference, results["ours"], results["hf, batch 1"])), 4),
        "other_greedy_flags": sum(map(other_flag, results["ours"], results["hf, batch 1"])),
    }


def speed(requests: int, seconds: dict[str, list[float]]) -> dict:
    rates = {name: requests / median(times) for name, times in seconds.items()}
    theirs = max(rate for name, rate in rates.items() if name != "ours")
    return {name: round(rate, 1) for name, rate in rates.items()} | {
        "times_hf": round(rates["ours"] / theirs, 2)
    }


def timed(work: Callable[[], list]) -> tuple[list, float, float]:
    """What `work` returns, and its seconds of wall and of CPU time; its bars are not shown."""
    bars = io.StringIO()
    started, cpu_started = time.perf_counter(), time.process_time()
    with redirect_stdout(bars), redirect_stderr(bars):
        result = work()
    return result, time.perf_counter() - started, time.process_time() - cpu_started


def difference(one: object, other: object) -> float:
    one, other = (x[0] if isinstance(x, tuple) else x for x in (one, other))
    return abs(one - other) / (1e-4 + 1e-5 * abs(other))


def other_flag(one: object, other: object) -> bool:
    return isinstance(one, tuple) and one[1] != other[1]


def questions(documents: int) -> dict[str, tuple[str, list]]:
    """Requests by kind, with lm_eval's method that takes them; source code of Python's library."""
    from lm_eval.api.instance import Instance

    def request(kind: str, *arguments: str) -> Instance:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    sources = [inspect.getsource(module) for module in MODULES]
    lines = [line for source in sources for line in source.splitlines() if line.strip()]
    places = [n * (len(lines) - 20) // documents + 10 for n in range(documents)]
    choices, letters = [], []
    for place in places:
        context = "\n".join(lines[place - CONTEXT_LINES : place])
        choices += [request("loglikelihood", context, f"\n{lines[place + n]}") for n in range(4)]
        letters += [request("loglikelihood", f"{context}\n#", letter) for letter in "ABCD"]
    parts = [n * len(sources[0]) // (documents // 4) for n in range(documents // 4)]
    texts = [request("loglikelihood_rolling", sources[0][n : n + 3000]) for n in parts]
    return {
        "choices": ("loglikelihood", choices),
        "letters": ("loglikelihood", letters),
        "rolling": ("loglikelihood_rolling", texts),
    }


def random_llama(folder: Path, export: Path) -> Path:
    """An exported folder of a 30 M Llama with random params, and the tokenizer of another."""
    folder.mkdir()
    generate.write_random(sizes.load(sizes.document(SIZES["30M"])), folder)
    for path in export.glob("*token*.json"):
        shutil.copy(path, folder)
    return folder


if __name__ == "__main__":
    main()
