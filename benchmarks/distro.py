"""What DisTrO costs beside a gradient: `python -m benchmarks.distro`.

Prints one JSON line per case of model size and number of peers; all figures of a line come from one
process, medians of interleaved repeats, so ratios hold on a noisy machine. A line has

- tokens per second of the bare gradient, of whole rounds with AdamW and with DisTrO, and of one
  peer alone with DisTrO;
- the share of a DisTrO round, as stage `train` takes it, that is not gradient: compress (the rest
  of `peer_step`), apply (`receive`, and params to every device), and exchange, all the rest: what
  no step hides of messages' way to the host and of their coding, and how peers agree on them;
- the measured matrix-multiplication peak of all devices, and the gradient's share of it. A token
  costs 6 FLOP per param of a matrix that multiplies, and 6 * layers * length * width for causal
  attention.

`--coding` prints instead what it takes to code a message of indices drawn at random: milliseconds
of one core's CPU time.
"""

import argparse
import json
import resource
import time

from benchmarks import sizes
from benchmarks.measuring import in_turns, matrix_flops
from benchmarks.sizes import SIZES
from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices

BOUNDS = {("5M", 8): 0.08}  # of `overhead` on two idle cores, by size and topk
CODING_MS = {8: 5, 32: 10}  # bounds of a message of 124M that is encoded and committed to, by topk
BESIDE = {"adamw": "adamw", "alone": "distro, one peer"}  # rounds, and what a line calls them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["2M", "5M"])
    parser.add_argument("--peers", type=int, nargs="+", default=[4])
    parser.add_argument("--topk", type=int, default=32)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--attention", choices=("matmul", "cudnn"), default="matmul")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--beside", choices=BESIDE, nargs="*", default=list(BESIDE))
    parser.add_argument("--coding", action="store_true")
    chosen = parser.parse_args()
    allocator.tune()
    for size in chosen.size:
        for peers in chosen.peers:
            run = make_run(size, peers, chosen)
            devices.prepare(run)
            case = coding if chosen.coding else measure
            print(json.dumps(case(size, run, chosen)), flush=True)


def make_run(size: str, peers: int, chosen: argparse.Namespace, adamw: bool = False) -> runfile.Run:
    """The default run with another model, other peers, and as many tokens for each."""
    document = sizes.document(SIZES[size], peers)
    llm = document["model"]["LLM"]
    document["peers"] |= {
        "precision": chosen.precision,
        "attention": chosen.attention,
        "scan_layers": chosen.attention == "cudnn",  # which needs it
    }
    llm["optimizer"]["Distro"]["compression_topk"] = chosen.topk
    if adamw:
        llm["optimizer"] = {"AdamW": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}}
    return sizes.load(document)


def _make_other(name: str, size: str, run: runfile.Run, chosen: argparse.Namespace) -> runfile.Run:
    if name == "alone":
        return make_run(size, 1, chosen)
    return make_run(size, run.peers.count, chosen, adamw=True)


def measure(size: str, run: runfile.Run, chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from benchmarks.trial import Trial

    distro = Trial(run)
    others = {name: Trial(_make_other(name, size, run, chosen)) for name in chosen.beside}
    flops: list[float] = []
    parts = {"matrix": lambda: flops.append(matrix_flops(run.peers.precision))}
    parts |= {part: getattr(distro, part) for part in ("gradient", "step", "apply")}
    rounds = {"distro": distro, **others}
    parts |= {name: trial.take_round for name, trial in rounds.items()}
    seconds = in_turns(parts, chosen.repeats, warm=2)
    median = {name: float(np.median(times)) for name, times in seconds.items()}
    of_round = {"apply": np.array(seconds["apply"])}
    of_round["compress"] = np.subtract(seconds["step"], seconds["gradient"])
    of_round["exchange"] = np.subtract(seconds["distro"], seconds["step"]) - of_round["apply"]
    share = {name: float(np.median(s)) / median["distro"] for name, s in of_round.items()}
    peak = max(flops)
    achieved = distro.tokens * SIZES[size].flop_per_token / median["gradient"]
    return {
        "benchmark": "distro",
        "size": size,
        "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(distro.params))),
        "peers": run.peers.count,
        "tokens_per_peer": distro.tokens // run.peers.count,
        "compression_topk": chosen.topk,
        "precision": run.peers.precision,
        "attention": run.peers.attention,
        "device": jax.devices()[0].device_kind,
        "devices": len(distro.peers.groups),
        "tokens_per_second": {
            "gradient": round(distro.tokens / median["gradient"]),
            "distro": round(distro.tokens / median["distro"]),
            **{BESIDE[name]: round(t.tokens / median[name]) for name, t in others.items()},
        },
        "share_of_round": {name: round(part, 4) for name, part in share.items()},
        "overhead": round(1 - median["gradient"] / median["distro"], 4),
        "overhead_bound": BOUNDS.get((size, chosen.topk)),
        "matrix_peak_gflops": round(peak / 1e9, 1),
        "gradient_share_of_peak": round(achieved / peak, 3),
        "bytes_up": distro.bytes_up,
        "peak_bytes": peak_memory(),
    }


def coding(size: str, run: runfile.Run, chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from lockstep.wire import exchange
    from lockstep.wire import message as wire
    from pipeline.language_model.language_model import programs_of

    form, rng = programs_of(run, run.llm.checkpoint.config).form, np.random.default_rng(0)
    nodes = []
    for leaf in form.leaves:
        order_NA = rng.random((leaf.row[0], leaf.area), np.float32)
        places_NK = np.sort(
            np.argpartition(order_NA, leaf.kept - 1, axis=1)[:, : leaf.kept], axis=1
        )
        nodes.append(leaf.at(places_NK, rng.random(places_NK.shape) < 0.5))
    message = jax.tree.unflatten(jax.tree.structure(form.areas), nodes)
    data = wire.encode(message, form)
    parts = {
        "encode": lambda: wire.encode(message, form),
        "decode": lambda: wire.decode(data, form),
        "commit": lambda: exchange.data_hash(1, 0, 0, wire.fields(message)),
    }
    seconds = in_turns(parts, chosen.repeats, clock=time.thread_time)
    return {
        "benchmark": "coding",
        "size": size,
        "parameters": form.size,
        "compression_topk": chosen.topk,
        "coefficients": sum(leaf.node.index_NK.size for leaf in form.leaves),
        "bytes": len(data),
        "bound_milliseconds": CODING_MS.get(chosen.topk) if size == "124M" else None,
        **{
            f"{part}_milliseconds": round(1000 * float(np.median(s)), 2)
            for part, s in seconds.items()
        },
    }


def peak_memory() -> int:
    """The most memory in use so far: of the accelerator, or of this process."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    of_process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    return stats.get("peak_bytes_in_use", of_process)


if __name__ == "__main__":
    main()
