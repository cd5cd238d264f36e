"""What it costs that merges have the same bits everywhere: `python -m benchmarks.merges`.

Prints one JSON line per method: CPU milliseconds of a round's update of all peers (`receive`), as
programs compile it, by rules, and as JAX would compile it; medians of interleaved repeats in one
process, after as many rounds as `--rounds`. And of what differs: the share of params whose update
has another sign, and the largest difference of an update, as a share of the largest update.
"""

import argparse
import json
import time

from benchmarks import sizes
from benchmarks.measuring import in_turns
from lockstep.machine import allocator
from lockstep.methods import CARDS
from pipeline.stage import devices


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sizes.SIZES, default="5M")
    parser.add_argument("--methods", choices=CARDS, nargs="+", default=list(CARDS))
    parser.add_argument("--rounds", type=int, default=2, help="before an update is looked at")
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    allocator.tune()
    for name in chosen.methods:
        run = sizes.load(sizes.document_of(chosen.size, name, rounds=100))
        devices.prepare(run)
        print(json.dumps(measure(name, run, chosen)), flush=True)


def measure(name: str, run, chosen: argparse.Namespace) -> dict:
    import jax
    import numpy as np

    from benchmarks.trial import Trial
    from lockstep.optim.optimizer import RoundPeers

    trial = Trial(run)
    for _ in range(chosen.rounds):
        trial.take_round()
    trial.step()
    trial.exchange()
    programs = trial.programs
    params, shared = trial.peers.params_on[trial.peers.groups[0]], trial.peers.shared
    messages = [trial.received[peer] for peer in sorted(trial.received)]
    stacked = jax.device_put(jax.tree.map(lambda *leaves: np.stack(leaves), *messages))
    weights = jax.numpy.full(len(messages), 4, np.int32)
    peers = RoundPeers.synchronous(weights, programs.optimizer.inner_steps)
    step = np.int32(trial.rounds)
    arguments = (stacked, peers, params, shared, step)
    kinds = {"by_rules": programs.receive, "as_compiled": jax.jit(programs.update_of_all)}
    before = _flat(params)
    moves = {kind: _flat(program(*arguments)[0]) - before for kind, program in kinds.items()}
    parts = {
        kind: lambda program=program: jax.block_until_ready(program(*arguments))
        for kind, program in kinds.items()
    }
    seconds = in_turns(parts, chosen.repeats, warm=0, clock=time.process_time)
    median = {kind: 1e3 * float(np.median(times)) for kind, times in seconds.items()}
    ours, theirs = moves["by_rules"], moves["as_compiled"]
    return {
        "benchmark": "merges",
        "method": name,
        "size": chosen.size,
        "parameters": int(ours.size),
        "peers": len(messages),
        "messages_kept": programs.form.kept,
        "cpu_ms": {kind: round(ms, 1) for kind, ms in median.items()},
        "ratio": round(median["by_rules"] / median["as_compiled"], 2),
        "signs_that_differ": float(np.mean(np.sign(ours) != np.sign(theirs))),
        "largest_difference": float(np.abs(ours - theirs).max() / np.abs(theirs).max()),
        "device": jax.devices()[0].device_kind,
    }


def _flat(tree: dict):
    import jax
    import numpy as np

    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


if __name__ == "__main__":
    main()
