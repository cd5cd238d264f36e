"""`simulate`'s speed and memory by optimizer and number of peers: `python -m benchmarks.simulate`.

Prints one JSON line per case, each measured in a process of its own, in which two things take turns
and medians are taken:

- a round of `simulate`, every local step of it, with everything between two rounds;
- the gradient alone of as many tokens, in the same micro-batches and on the same devices: what
  training costs without optimizer, messages and coordinator. `of_gradient` is its seconds by the
  round's. Of more than 64 micro-batches, 64 are timed.

`bound` is that of `of_gradient` on two idle cores. `of_4_peers` is a peer's cost by that beside 4
peers, of 1.1 at the most. Peak memory is what the process held at the most until its rounds ended,
libraries included.
"""

import argparse
import json
import resource
import time
from functools import partial
from itertools import product
from statistics import median

from benchmarks.measuring import CORES, alone
from benchmarks.sizes import SIZES

ADAMW = {"AdamW": {"clip_grad_norm": 1.0}}
LOCAL = {"inner_steps": 10, "inner": ADAMW}
OPTIMIZERS = {
    "adamw": ADAMW,
    "sgd": "sgd",
    "fedavg": {"FedAvg": LOCAL},
    "diloco": {"DiLoCo": LOCAL},
    "streaming": {"StreamingDiLoCo": LOCAL | {"fragments": 2}},
    "sparseloco": {"SparseLoCo": LOCAL},
    "sparta": {"SPARTA": LOCAL | {"inner_steps": 1}},
    "sparta_diloco": {"SPARTADiLoCo": LOCAL | {"inner_steps": 1, "outer_every": 20}},
    "demo": "demo",
    "distro": "distro",
}
OF_GRADIENT = {  # bounds, by size
    "0.9M": {"adamw": 0.97, "demo": 0.88, "distro": 0.88, "diloco": 1.3},
    "5M": {"distro": 0.93, "diloco": 1.25},
}
TIMED = 64  # gradients at the most, between two rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["0.9M"])
    parser.add_argument("--optimizer", choices=OPTIMIZERS, nargs="+", default=list(OPTIMIZERS))
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--devices", type=int, default=CORES, help="that JAX makes of the CPU")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.case:
        case = chosen.size[0], chosen.optimizer[0], chosen.peers[0]
        import jax

        jax.config.update("jax_num_cpu_devices", chosen.devices)
        print(json.dumps(measure(*case, chosen.repeats)))
        return
    of_4 = None
    for size, optimizer, peers in product(chosen.size, chosen.optimizer, chosen.peers):
        options = {"--size": size, "--optimizer": optimizer, "--peers": peers}
        options |= {"--devices": chosen.devices, "--repeats": chosen.repeats}
        line = alone("simulate", options, "--case")
        of_4 = line["seconds_per_peer"] if peers == 4 else of_4
        line["of_4_peers"] = of_4 and round(line["seconds_per_peer"] / of_4, 3)
        print(json.dumps(line), flush=True)


def measure(size: str, optimizer: str, peers: int, repeats: int) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from lockstep import simulate
    from lockstep.programs.loss import cross_entropy
    from models.llama import llama

    model = SIZES[size]
    config = llama.Config.from_hf({"model_type": "llama"} | model.config)
    features = partial(llama.features, config, scan=False, dtype=jnp.float32)

    def loss_fn(params: dict, tokens_BT: jax.Array, rng: jax.Array | None) -> jax.Array:
        head = llama.head(config, params)
        return cross_entropy(features(params, tokens_BT), head, tokens_BT).mean()

    params = jax.device_get(llama.init(config, 0))
    count, shape = peers * 64 * model.batch, (model.batch, model.length)
    rng = np.random.default_rng(0)
    tokens_NT = rng.integers(model.vocabulary, size=(count, model.length), dtype=np.int32)
    gradient = jax.jit(jax.grad(loss_fn), static_argnums=2)
    table = OPTIMIZERS[optimizer]
    settings = next(iter(table.values())) if isinstance(table, dict) else {}
    steps = settings.get("inner_steps", 1) // settings.get("fragments", 1)  # of a peer in a round
    tokens_BT = rng.integers(model.vocabulary, size=shape, dtype=np.int32)
    places = [jax.device_put((params, tokens_BT), device) for device in jax.devices()]
    seconds: dict[str, list[float]] = {"round": [], "gradient": []}
    peak = 0

    def beside(row: dict[str, float]) -> None:
        """After a round, the gradient of as many tokens."""
        nonlocal peak
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds["round"].append(row["seconds"] - sum(seconds["round"]))
        started = time.perf_counter()
        timed = min(peers * steps, TIMED)
        for done in range(0, timed, len(places)):  # as many at once as there are devices
            batch = places[: timed - done]
            jax.block_until_ready([gradient(*place, None) for place in batch])
        per_micro_batch = (time.perf_counter() - started) / timed
        seconds["gradient"].append(per_micro_batch * peers * steps)

    simulate(
        loss_fn,
        params,
        tokens_NT,
        optimizer=table,
        peers=peers,
        steps=repeats + 2,  # the first two compile and warm up
        batch_size=model.batch,
        micro_batch=model.batch,
        on_round=beside,
        show_progress=False,
    )
    of_round, of_gradient = (median(seconds[name][2:]) for name in ("round", "gradient"))
    tokens = peers * steps * model.batch * model.length
    return {
        "benchmark": "simulate",
        "size": size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "optimizer": optimizer,
        "peers": peers,
        "devices": len(jax.devices()),
        "tokens_of_a_round": tokens,
        "tokens_per_second": round(tokens / of_round),
        "gradient_tokens_per_second": round(tokens / of_gradient),
        "of_gradient": round(of_gradient / of_round, 3),
        "bound": OF_GRADIENT.get(size, {}).get(optimizer),
        "seconds_per_peer": round(of_round / peers, 5),
        "peak_mb": round(peak / 1e6),
    }


if __name__ == "__main__":
    main()
