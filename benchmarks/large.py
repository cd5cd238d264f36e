"""What rounds of a large model add to memory, and how long their parts take: `benchmarks.large`.

    python -m benchmarks.large --size 134M --optimizer distro diloco

Prints a JSON line for each optimizer, measured in a process of its own. `added_copies` is the most
memory that was resident in a round, less that before its training and less what XLA's step needs
while it runs (a gradient and activations), in copies of the params; on a CPU host and device are
one memory. Linux only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import methods, resident, sizes
from lockstep.methods import CARDS
from pipeline import runfile
from pipeline.stage import devices

# of glibc: what is freed is the system's at once, so that what is resident is what is needed
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}
FAST = {"upload_mbps": 1e6, "download_mbps": 1e6, "tokens_per_second": 1e7}  # nobody is late


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sizes.SIZES, default="134M")
    parser.add_argument("--optimizer", nargs="+", choices=CARDS, default=["distro", "diloco"])
    parser.add_argument("--rounds", type=int, default=3, help="after two that are not measured")
    parser.add_argument("--local-steps", type=int, default=2, help="of optimizers that take some")
    parser.add_argument("--devices", type=int, help="of a CPU; by default two")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(measure(chosen.size, chosen.optimizer[0], chosen)))
        return
    for name in chosen.optimizer:
        options = ["--size", chosen.size, "--optimizer", name, "--rounds", str(chosen.rounds)]
        options += ["--local-steps", str(chosen.local_steps), "--alone"]
        options += ["--devices", str(chosen.devices)] if chosen.devices else []
        command = [sys.executable, "-m", "benchmarks.large", *options]
        subprocess.run(command, check=True, env=os.environ | AT_ONCE)


def run_of(size: str, name: str, local_steps: int) -> runfile.Run:
    """A run of four peers, each with the size's batch in every round, whatever its local steps."""
    steps = local_steps if CARDS[name].local_steps > 1 else 1
    document = methods.document(size, name, 100, steps)
    batch = sizes.SIZES[size].batch
    total = 4 * batch
    document["config"] |= {"global_batch_size_start": total, "global_batch_size_end": total}
    document["config"] |= {"epoch_time": 10**6}
    document["peers"] |= {"micro_batch": batch // steps}
    document["links"] |= FAST
    return sizes.load(document)


def measure(size: str, name: str, chosen: argparse.Namespace) -> dict:
    """Takes rounds, and measures all but the first two."""
    run = run_of(size, name, chosen.local_steps)
    devices.prepare(run)
    import jax

    from benchmarks.simulated import Lab
    from lockstep.swarm.faults import FaultSchedule
    from lockstep.swarm.fused_peers import make_peers
    from lockstep.swarm.swarm import Swarm
    from pipeline.preflight.plan import run_memory
    from pipeline.start.round_settings import round_settings

    lab = Lab(run, run.llm.checkpoint.config, chosen.devices)
    planned = run_memory(run, lab.programs)
    settings = round_settings(run)
    seconds: dict[str, float] = defaultdict(float)
    peaks: dict[str, int] = defaultdict(int)  # of resident memory, by phase
    at_rest: dict[str, int] = {}  # the least when it begins

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        began = time.perf_counter()
        resident.forget_peak()
        at_rest[phase] = min(at_rest.get(phase, 10**15), resident.status("VmRSS"))
        yield
        seconds[phase] += time.perf_counter() - began
        peaks[phase] = max(peaks[phase], resident.status("VmHWM"))

    with tempfile.TemporaryDirectory() as spool:
        begin = lab.begin
        peers = make_peers(lab.programs, "each", begin.state, lab.devices)
        faults = FaultSchedule((), run.peers.seed, lab.programs.form)
        swarm = Swarm(settings, peers, lambda _: lab.data, faults, timed=timed, spool=Path(spool))
        progress = begin.progress(settings)
        for _ in range(2):  # the first compiles, and in it arrays of the start are still there
            progress, _ = swarm.take_round(progress)
        jax.block_until_ready(list(peers.params_on.values()))
        seconds.clear()
        peaks.clear()
        at_rest.clear()
        began, losses = time.perf_counter(), []
        for _ in range(chosen.rounds):
            progress, taken = swarm.take_round(progress)
            losses.append(taken.entry.loss)
        took = time.perf_counter() - began
    step = planned.step.temporary * len(peers.groups)
    before = at_rest["train"]
    peak = max(peaks.values()) - before
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(begin.state.params))
    return {
        "benchmark": "large",
        "size": size,
        "optimizer": name,
        "peers": run.peers.count,
        "tokens_of_a_round": run.config.global_batch_size_end * run.llm.max_seq_len,
        "device": jax.devices()[0].device_kind,
        "devices": len(peers.groups),
        "params_mb": round(params / 1e6),
        "state_mb": round((planned.agreed + planned.peers * planned.own) / 1e6),
        "message_mb": round(lab.programs.form.bytes_about / 1e6, 1),
        "step_mb": round(step / 1e6),
        "peak_mb": round(peak / 1e6),
        "peak_mb_of_phase": {name: round((p - before) / 1e6) for name, p in peaks.items()},
        "added_copies": round((peak - step) / params, 2),
        "seconds_of_a_round": round(took / chosen.rounds, 2),
        "seconds": {name: round(s / chosen.rounds, 3) for name, s in seconds.items()},
        "losses": losses,
    }


if __name__ == "__main__":
    main()
