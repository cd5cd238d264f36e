"""What a round costs besides its gradient: `python -m benchmarks.host`.

Prints one JSON line per case, each measured in a process of its own: CPU milliseconds of a peer in
a round, medians over rounds, in `simulate` and in stage train's swarm with a transcript. The
gradient of each param is the param itself times the mean of some examples, which is nearly free.

With `--layout` it is `simulate` by rules in these layouts instead. Then figures are means over the
middle half of the rounds, since layout "rounds" plans a block of them at once.

`main` is of the main thread, `host` of all threads of Python, and `device` of all others, which are
XLA's. What XLA computes in the main thread, as it does small programs, counts there. `moved` is how
often the host reads or writes a byte of a message: where it fetches, codes and hashes them. Bounds
are of two idle cores.
"""

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measuring import alone
from benchmarks.simulate import OPTIMIZERS
from benchmarks.simulated import Lab
from benchmarks.sizes import default, load
from lockstep import simulate
from lockstep.machine import allocator
from lockstep.programs.train_step import Programs
from lockstep.protocol.driver import RunProgress
from lockstep.simulation.arguments import tagged
from lockstep.simulation.examples import data_of_peers
from lockstep.simulation.loss_task import LossTask, Nesting
from lockstep.swarm.training_loop import Start
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.state import State
from lockstep.wire import message as wire
from pipeline.runfile.method import optimizer_of_run
from pipeline.stage import devices

SHAPES = {"13k": (2, 16, 33), "5M": (4, 256, 416)}  # of 12 arrays, layers first
METHODS = {name: OPTIMIZERS[name] for name in ("adamw", "diloco", "sparseloco", "distro")}
METHODS["int8"] = {
    "DiLoCo": METHODS["diloco"]["DiLoCo"] | {"quantize": "int8", "quantize_block": 256}
}
PLACES = ("simulate", "stage")
HOST_MS = {  # bounds at 5M
    "simulate": {"adamw": 5, "diloco": 5, "int8": 4, "sparseloco": 4, "distro": 3},
    "stage": {"adamw": 20, "diloco": 20, "int8": 8, "sparseloco": 6, "distro": 4},
}
MAIN_MS = {4: 3, 64: 20}  # bounds at 13k, of a whole round of so many peers
ROWS = 2  # of a local step
WARM = 4  # rounds in which something is compiled, or runs for the first time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--method", choices=METHODS, nargs="+", default=list(METHODS))
    parser.add_argument("--place", choices=PLACES, nargs="+", default=PLACES)
    parser.add_argument("--layout", choices=("each", "vmap", "rounds"), nargs="+", default=[None])
    parser.add_argument("--peers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", type=int, default=1, help="that JAX makes of the CPU")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        if chosen.place == ["stage"]:
            allocator.tune()
        case = chosen.place[0], chosen.size[0], chosen.method[0], chosen.peers[0]
        print(json.dumps(measure(*case, chosen.rounds, chosen.layout[0])))
        return
    os.environ["JAX_NUM_CPU_DEVICES"] = str(chosen.devices)
    devices.prepare(load(default()))  # what the cases' processes read
    places = ["simulate"] if chosen.layout[0] else chosen.place
    cases = product(chosen.size, chosen.method, chosen.peers, places, chosen.layout)
    for size, method, peers, place, layout in cases:
        options = {"--place": place, "--size": size, "--method": method}
        options |= {"--peers": peers, "--rounds": chosen.rounds}
        options |= {"--layout": layout} if layout else {}
        print(json.dumps(alone("host", options, "--case")), flush=True)


def measure(
    place: str, size: str, method: str, peers: int, rounds: int, layout: str | None = None
) -> dict:
    """The line of a case."""
    params, table = params_of(size), METHODS[method]
    with moving() as moved:
        clock = Clock(moved)
        if place == "simulate":
            loss, sent = simulated(params, table, peers, rounds, lambda _: clock.tick(), layout)
        else:
            loss, sent = staged(params, table, peers, rounds, clock)
    main = MAIN_MS.get(peers)
    bounds = (
        {"host_ms": HOST_MS[place][method]} if size == "5M" else {"main_ms": main and main / peers}
    )
    if method in ("adamw", "diloco"):
        bounds["moved"] = 3 * (place == "stage")
    seconds = clock.means() if layout else clock.medians()
    of_messages = seconds.pop("moved") / (sent * peers)
    return {
        "benchmark": "host",
        "place": place,
        **({"layout": layout} if layout else {}),
        "parameters": sum(x.size for x in params.values()),
        "method": method,
        "peers": peers,
        **{f"{name}_ms": round(1000 * s / peers, 3) for name, s in seconds.items()},
        "moved": round(of_messages, 2),
        "bounds": bounds,
        "loss": loss,
        "bytes_up": sent,
    }


@contextmanager
def moving() -> Iterator[list[int]]:
    """The bytes that the host reads or writes of messages meanwhile."""
    moved: list[int] = []
    fetch, encode, fields = jax.device_get, wire.encode, wire.fields

    def counted(times: int, call: Callable, *arguments: Any) -> Any:
        result = call(*arguments)
        moved.extend(times * memoryview(x).nbytes for x in jax.tree.leaves(result))
        return result

    jax.device_get = partial(counted, 1, fetch)
    wire.encode = partial(counted, 2, encode)  # read, and written
    wire.fields = partial(counted, 1, lambda message: list(fields(message)))  # to be hashed
    try:
        yield moved
    finally:
        jax.device_get, wire.encode, wire.fields = fetch, encode, fields


class Clock(Observer):
    """CPU seconds when each round was kept, by kind of thread, and bytes that were moved."""

    def __init__(self, moved: list[int]) -> None:
        self.seconds, self.moved = list[dict[str, float]](), moved

    def tick(self) -> None:
        """A round is over."""
        clocks = [time.pthread_getcpuclockid(x.ident) for x in threading.enumerate()]
        host = sum(map(time.clock_gettime, clocks))
        device = time.process_time() - host
        row = {"main": time.thread_time(), "host": host, "device": device}
        self.seconds.append(row | {"moved": sum(self.moved)})

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Called by a training."""
        self.sent = sum(message.bytes for message in entry.evidence.messages.values())
        self.loss = entry.loss
        self.tick()

    def medians(self) -> dict[str, float]:
        """Seconds of a round, by name."""
        pairs = list(pairwise(self.seconds[WARM:]))
        return {name: median(b[name] - a[name] for a, b in pairs) for name in self.seconds[0]}

    def means(self) -> dict[str, float]:
        """Seconds of a round in the middle half, by name."""
        first, last = len(self.seconds) // 4, 3 * len(self.seconds) // 4
        ends = self.seconds[first - 1], self.seconds[last - 1]
        return {name: (ends[1][name] - ends[0][name]) / (last - first) for name in ends[0]}


def params_of(size: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"layers{i:02}": rng.normal(size=SHAPES[size]).astype(np.float32) for i in range(12)}


def loss_fn(params: dict, batch: jax.Array, rng: jax.Array | None) -> jax.Array:
    return batch.mean() * sum(jnp.vdot(x, x) for x in jax.tree.leaves(params)) / 2


def examples() -> np.ndarray:
    return np.random.default_rng(1).normal(1, 0.1, size=(4096, 8)).astype(np.float32)


def layers_of(table: Any, params: dict) -> tuple[str, ...]:
    """The names of params whose arrays stack layers, for a method that asks for them."""
    return tuple(params) if table in (METHODS["distro"], METHODS["sparseloco"]) else ()


def simulated(
    params: dict,
    table: Any,
    peers: int,
    rounds: int,
    on_round: Callable[[dict], None],
    layout: str | None,
) -> tuple[float, int]:
    """The last round's loss, and the bytes that a peer sent in it, of a simulation."""
    by_rules = {"bits": "everywhere", "layout": layout} if layout else {}
    result = simulate(
        loss_fn,
        params,
        examples(),
        optimizer=table,
        peers=peers,
        steps=rounds,
        batch_size=ROWS,
        micro_batch=ROWS,
        stacked=layers_of(table, params),
        on_round=on_round,
        show_progress=False,
        **by_rules,
    )
    sent = np.diff(result.train["bytes_up"], prepend=0)
    return float(result.train["loss"][-1]), round(sent[-1])


def staged(params: dict, table: Any, peers: int, rounds: int, clock: Clock) -> tuple[float, int]:
    """The same of stage train's swarm, with a transcript and at most 32 witnesses."""
    lab = NearlyFree(params, table, peers, rounds)
    with tempfile.TemporaryDirectory() as folder:
        lab.train(lab.run, Path(folder), observers=[clock])
    return clock.loss, round(clock.sent / peers)


class NearlyFree(Lab):
    """Runs like the default one, of the nearly free gradient."""

    def __init__(self, params: dict, table: Any, peers: int, rounds: int):
        layers = layers_of(table, params)
        tag, settings, _ = tagged(table, sorted(params), layers)
        document, batch = default(), peers * settings.get("inner_steps", 1) * ROWS
        document["model"]["LLM"]["optimizer"] = {tag: settings}
        document["config"] |= {"min_clients": 1, "init_min_clients": 1, "witness_nodes": 0}
        document["config"] |= {"global_batch_size_start": batch, "global_batch_size_end": batch}
        document["config"] |= {"total_steps": rounds}
        document["peers"] |= {"count": peers, "micro_batch": ROWS}
        document["witness"] |= {"snapshot_every": rounds}
        self.run, self.hf_config, self.devices = load(document), {}, jax.devices()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        task = LossTask(loss_fn, Nesting(params), shapes, jnp.dtype("float32"), 0, ROWS)
        optimizer = optimizer_of_run(self.run, sorted(params), layers)
        self.programs = Programs(task, optimizer, lot=self.run.rows_of_a_step)
        self.data = data_of_peers(examples(), peers, 0, shuffle=True)[0]
        own, shared = jax.device_get(self.programs.init(params))
        self.begin = Start(State(params, shared, (own,) * peers), 0, 0)


if __name__ == "__main__":
    main()
