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
"""

import argparse
import importlib.util
import json
from collections.abc import Callable
from statistics import median
from typing import get_args

from benchmarks import sizes
from benchmarks.measuring import CORES, in_turns, matrix_flops
from benchmarks.sizes import SIZES
from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices

ATTENTIONS = ("sdpa", "eager")
REMAT = get_args(runfile.Peers.model_fields["remat"].annotation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["5M", "30M"])
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=("matmul", "cudnn"), default="matmul")
    parser.add_argument("--scan", action="store_true", help="scan layers")
    parser.add_argument("--remat", choices=REMAT, default=REMAT[0], help="with --scan")
    parser.add_argument("--alone", action="store_true", help="without PyTorch")
    parser.add_argument("--repeats", type=int, default=9)
    chosen = parser.parse_args()
    allocator.tune()
    devices.prepare(make_run(chosen.size[0], CORES, chosen))
    for size in chosen.size:
        print(json.dumps(measure(size, chosen)), flush=True)


def make_run(size: str, peers: int, chosen: argparse.Namespace) -> runfile.Run:
    """The default run with another model, and a whole batch for each peer."""
    document = sizes.document(SIZES[size], peers)
    document["peers"] |= {
        "precision": chosen.precision,
        "attention": chosen.attention,
        "remat": chosen.remat,
        "scan_layers": chosen.scan,
        "threads": max(CORES, document["peers"]["threads"]),  # no core is left idle
    }
    return sizes.load(document)


def measure(size: str, chosen: argparse.Namespace) -> dict:
    import jax

    from benchmarks.trial import Trial

    run = make_run(size, len(jax.devices()), chosen)
    trial = Trial(run)
    parts = {"forward": trial.forward, "gradient": trial.gradient}
    compares = jax.default_backend() == "cpu" and chosen.precision == "float32" and not chosen.alone
    if compares and importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        for attention in ATTENTIONS:
            parts |= pytorch(run, trial.tokens, attention)
    flops: list[float] = []
    parts |= {"matrix": lambda: flops.append(matrix_flops(chosen.precision))}
    seconds = in_turns(parts, chosen.repeats, warm=2)
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


if __name__ == "__main__":
    main()
