"""What a local step of a workload costs beside the same loop without us: `-m benchmarks.workload`.

Prints one JSON line: medians in milliseconds of steps on the same rows, in the same micro-batches,
of the same model (`workloads/hf_causal_lm.py`, a GPT-2) on as many threads. All take turns:

- `torch_gradient`, `torch_adamw`: torch alone, in a process of its own: a gradient; and with
  clipping and torch's AdamW.
- `gradient`: the same gradient by our worker: params and rows go there, gradients come back.
- `diloco`: a local step of a DiLoCo round: its AdamW, and the round's message by its local steps.
- `distro`: a whole round of DistrO, its message included.

`gradient_of_torch` is without optimizers on both sides, `diloco_of_torch` with AdamW on both, and
`distro_of_torch` is DistrO beside AdamW: medians of each turn's ratio.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

from lockstep.machine import allocator
from pipeline import runfile
from pipeline.stage import devices
from pipeline.stage.keys import PROJECT, RUN_FILE
from pipeline.toml_file import read_toml

FACTORY = "hf_causal_lm:CausalLM"
GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
SIZES = {
    "tiny": {"vocab_size": 64, "n_positions": 128, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "5m": {"vocab_size": 4096, "n_positions": 256, "n_embd": 256, "n_layer": 5, "n_head": 4},
    "124m": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
}
ADAMW = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="5m")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a local step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--local-steps", type=int, default=4, help="of a DiLoCo round")
    parser.add_argument("--python", default=sys.executable, help="that has torch and transformers")
    chosen = parser.parse_args()
    allocator.tune()
    devices.prepare(run_of(chosen, "Distro"))
    print(json.dumps(measure(chosen)))


def run_of(chosen: argparse.Namespace, optimizer: str) -> runfile.Run:
    """The default run of a workload, by DistrO as it stands there or by DiLoCo."""
    document = read_toml(PROJECT / RUN_FILE)
    llm = document["model"]["LLM"]
    llm |= {"architecture": "HfAuto", "checkpoint": "Ephemeral", "max_seq_len": chosen.length}
    del llm["optimizer"]["Distro"]["step_scale"]  # of groups that this model has not
    if optimizer == "DiLoCo":
        steps = {"inner_steps": chosen.local_steps, "inner": {"AdamW": ADAMW}}
        llm["optimizer"] = {"DiLoCo": {**steps, **OUTER}}
    document["workload"] = {"factory": FACTORY, "config": config_of(chosen)}
    plain = {"bits": "machine", "product_bits": 20}  # torch has no rules
    document["peers"] |= plain | {"threads": chosen.threads, "micro_batch": chosen.micro_batch}
    document["runtime"] |= {"worker_python": chosen.python}
    return runfile.parse(document, RUN_FILE)


def config_of(chosen: argparse.Namespace) -> dict:
    """What the workload is made with."""
    return {"model": {**GPT2, **NO_TOKENS, **SIZES[chosen.size]}}


def measure(chosen: argparse.Namespace) -> dict:
    """Steps of each kind in turn, after one of each that compiles."""
    import jax
    import numpy as np

    from parts.workload.worker import Worker
    from pipeline.subject import programs_of

    spec = {"kind": "tokens", "columns": ["inputs"], "length": chosen.length}
    runs = {name: run_of(chosen, name) for name in ("Distro", "DiLoCo")}
    rng, vocabulary = np.random.default_rng(0), SIZES[chosen.size]["vocab_size"]
    shape = chosen.rows, chosen.length
    rows_NT = rng.integers(vocabulary, size=shape, dtype=np.int32)
    worker = Worker(runs["Distro"], spec)
    with closing(worker), torch_alone(chosen, rows_NT) as alone:
        description = worker.describe()
        params = jax.device_put(worker.init())
        model = {"workload": description.model_dump(mode="json"), "rows": spec}

        def round_of(name: str) -> Callable[[], float]:
            programs = programs_of(runs[name], model)
            programs.steps.by = worker
            steps, taken = programs.optimizer.inner_steps, 0
            own, shared = programs.init(params)
            whole_NT = np.tile(rows_NT, (steps, 1))
            work = programs.work(whole_NT, len(whole_NT), chosen.micro_batch)

            def take() -> float:
                nonlocal own, taken
                taken += 1
                started = time.perf_counter()
                step = np.float32(taken)
                result = programs.peer_step(params, own, shared, *work, step)
                own = jax.block_until_ready(result).own
                return (time.perf_counter() - started) / steps

            return take

        def gradient() -> float:
            started = time.perf_counter()
            worker.gradient(params, rows_NT, seed=0)
            return time.perf_counter() - started

        kinds = {
            "torch_gradient": lambda: alone("gradient"),
            "gradient": gradient,
            "torch_adamw": lambda: alone("adamw"),
            "diloco": round_of("DiLoCo"),
            "distro": round_of("Distro"),
        }
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(chosen.repeats + 1):
            for name, take in kinds.items():
                seconds[name].append(take())

    def ratio(ours: str, others: str) -> float:
        pairs = zip(seconds[ours][1:], seconds[others][1:], strict=True)
        return round(median(one / other for one, other in pairs), 3)

    middle = {name: median(times[1:]) for name, times in seconds.items()}
    return {
        "benchmark": "workload",
        "size": chosen.size,
        "parameters": description.parameters,
        "tokens": chosen.rows * chosen.length,
        "micro_batch": chosen.micro_batch,
        "local_steps": chosen.local_steps,
        "threads": chosen.threads,
        "repeats": chosen.repeats,
        **{f"{name}_milliseconds": round(1000 * s, 1) for name, s in middle.items()},
        "gradient_of_torch": ratio("gradient", "torch_gradient"),
        "diloco_of_torch": ratio("diloco", "torch_adamw"),
        "distro_of_torch": ratio("distro", "torch_adamw"),
    }


@contextmanager
def torch_alone(chosen: argparse.Namespace, rows_NT):
    """Yield what takes a step of `benchmarks/torch_loop.py` and returns its seconds."""
    import numpy as np

    from parts.workload.description import SOURCE
    from parts.workload.process.worker_process import PYTHON
    from parts.workload.worker import THREADS

    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / "rows.npy", rows_NT)
        settings = {"factory": FACTORY, "config": config_of(chosen), "threads": chosen.threads}
        settings |= {"rows": f"{folder}/rows.npy", "micro_batch": chosen.micro_batch, "seed": 0}
        place = {"PYTHONPATH": os.pathsep.join(map(str, (*PYTHON, SOURCE)))}
        variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
        process = subprocess.Popen(
            [chosen.python, PROJECT / "benchmarks" / "torch_loop.py", json.dumps(settings)],
            env=variables | place | dict.fromkeys(THREADS, str(chosen.threads)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

        def step(kind: str) -> float:
            process.stdin.write(f"{kind}\n")
            process.stdin.flush()
            return float(process.stdout.readline())

        try:
            yield step
        finally:
            process.stdin.close()
            process.wait()


if __name__ == "__main__":
    main()
