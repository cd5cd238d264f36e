"""A model's forward and gradient, beside PyTorch's: `python -m benchmarks.model`.

Prints one JSON line per size; all figures of a line come from one process, medians of interleaved
repeats. Run it on an idle machine: PyTorch's threads wait for each other after every operation, so
that other work slows it more than ours. A line has tokens per second of

- forward: the loss of each sequence, and nothing kept;
- gradient: the loss and the gradient of every param, as a peer of a run takes them;

and their share of the measured matrix-multiplication peak of all devices. Ours run as peers do, one
on each device; a CPU has a device for each core. PyTorch's `LlamaForCausalLM`, not compiled, has
the same tokens as one batch, as many threads as there are cores, and each of its two attentions:
"sdpa", which it takes by default, and "eager". Where PyTorch is not installed, on an accelerator
and in bfloat16, its figures are null.

`--compile` prints the seconds that compiling the gradient takes instead, layers scanned: 4 of them
and 32, each in a process of its own, nothing kept of one before.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import get_args

from benchmarks import sizes
from benchmarks.peak import matrix_flops
from benchmarks.sizes import SIZES
from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
DEPTHS = (4, 32)
ATTENTIONS = ("sdpa", "eager")
REMAT = get_args(runfile.Peers.model_fields["remat"].annotation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["5M", "30M"])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=("matmul", "cudnn"), default="matmul")
    parser.add_argument("--scan", action="store_true", help="scan layers, as --compile does")
    parser.add_argument("--remat", choices=REMAT, default=REMAT[0], help="with --scan")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    allocator.tune()
    if chosen.compile and chosen.depth is None:
        for size in chosen.size:
            print(json.dumps(compiling(size, chosen)), flush=True)
        return
    devices.prepare(make_run(chosen.size[0], CORES, chosen))
    for size in chosen.size:
        case = compiled_once if chosen.compile else measure
        print(json.dumps(case(size, chosen)), flush=True)


def make_run(size: str, peers: int, chosen: argparse.Namespace) -> runfile.Run:
    """The default run with another model, and a whole batch for each peer."""
    document = sizes.document(SIZES[size], peers)
    if chosen.depth is not None:
        document["model"]["LLM"]["checkpoint"]["Init"]["config"]["num_hidden_layers"] = chosen.depth
    document["peers"] |= {
        "precision": chosen.precision,
        "attention": chosen.attention,
        "remat": chosen.remat,
        "scan_layers": chosen.scan or chosen.compile,
        "threads": max(CORES, document["peers"]["threads"]),  # no core is left idle
    }
    return sizes.load(document)


# ---- Speed ----


def measure(size: str, chosen: argparse.Namespace) -> dict:
    import jax

    from benchmarks.trial import Trial

    run = make_run(size, len(jax.devices()), chosen)
    trial = Trial(run)
    parts = {"forward": trial.forward, "gradient": trial.gradient}
    beside = jax.default_backend() == "cpu" and chosen.precision == "float32" and not chosen.alone
    if beside and importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        for attention in ATTENTIONS:
            parts |= pytorch(run, trial.tokens, attention)
    seconds, flops = defaultdict(list), []
    for repeat in range(chosen.repeats + 2):  # the first two compile and warm up
        flops.append(matrix_flops(chosen.precision))
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - began)

    line = {
        "benchmark": "model",
        "size": size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trial.params)),
        "tokens": trial.tokens,
        "precision": chosen.precision,
        "attention": chosen.attention,
        "scan": run.peers.scan_layers,
        "remat": run.peers.remat,
        "device": jax.devices()[0].device_kind,
        "devices": len(jax.devices()),
        "matrix_peak_gflops": round(max(flops) / 1e9, 1),
    }
    # a forward pass is a third of both: the backward pass makes two products for each of its own
    flop_per_token = {"forward": SIZES[size].flop_per_token / 3}
    flop_per_token["gradient"] = SIZES[size].flop_per_token
    for part, flop in flop_per_token.items():
        theirs = {name: seconds.get(f"{part}, pytorch {name}") for name in ATTENTIONS}
        fastest = min((median(times) for times in theirs.values() if times), default=None)
        ours = trial.tokens / median(seconds[part])
        line[part] = {
            "tokens_per_second": round(ours),
            "share_of_peak": round(ours * flop / max(flops), 3),
            "pytorch_tokens_per_second": {
                name: times and round(trial.tokens / median(times))
                for name, times in theirs.items()
            },
            "times_pytorch": fastest and round(fastest / median(seconds[part]), 3),
        }
    return line


def pytorch(run: runfile.Run, tokens: int, attention: str) -> dict[str, Callable[[], None]]:
    """The same model in PyTorch, with the tokens of all peers as one batch."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    hf_config = run.llm.checkpoint.config
    model = LlamaForCausalLM(LlamaConfig(**hf_config, attn_implementation=attention))
    length = run.llm.max_seq_len
    batch = torch.randint(hf_config["vocab_size"], (tokens // length, length))

    def forward() -> None:
        with torch.no_grad():
            model(batch, labels=batch, use_cache=False)

    def gradient() -> None:
        model.zero_grad(set_to_none=True)
        model(batch, labels=batch, use_cache=False).loss.backward()

    name = f"pytorch {attention}"
    return {f"forward, {name}": forward, f"gradient, {name}": gradient}


# ---- Compiling ----


def compiling(size: str, chosen: argparse.Namespace) -> dict:
    """Seconds to compile a shallow and a deep model: medians of three processes each, in turns."""
    seconds = defaultdict(list)
    for _ in range(3):
        for depth in DEPTHS:
            options = {"--size": size, "--depth": depth, "--precision": chosen.precision}
            options |= {"--attention": chosen.attention}
            arguments = [str(x) for pair in options.items() for x in pair]
            command = [sys.executable, "-m", "benchmarks.model", "--compile", *arguments]
            found = json.loads(subprocess.check_output(command, text=True))
            seconds[depth].append(found["seconds"])
    shallow, deep = (median(seconds[depth]) for depth in DEPTHS)
    return {
        "benchmark": "model compile",
        "size": size,
        "seconds": {f"{depth} layers": median(seconds[depth]) for depth in DEPTHS},
        "ratio": round(deep / shallow, 2),
    }


def compiled_once(size: str, chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from pipeline.language_model.language_model import programs_of

    jax.config.update("jax_enable_compilation_cache", False)
    run = make_run(size, 1, chosen)
    hf_config = run.llm.checkpoint.config
    programs = programs_of(run, hf_config)
    model_config = programs.task.model.Config.from_hf(hf_config)
    params = jax.eval_shape(lambda: programs.task.model.init(model_config, 0))
    shape = 1, SIZES[size].batch, SIZES[size].length
    began = time.perf_counter()
    tokens_MBT = jax.ShapeDtypeStruct(shape, np.int32)
    jax.jit(programs.steps.gradient).lower(
        params, tokens_MBT, jax.ShapeDtypeStruct((), np.int32)
    ).compile()
    return {"seconds": round(time.perf_counter() - began, 2)}


if __name__ == "__main__":
    main()
