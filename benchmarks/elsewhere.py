"""What an audit with other bits compares, accepts and finds: `python -m benchmarks.elsewhere`.

Trains a small Llama by each strategy and under several seeds, as this machine computes best and on
4 threads; then another process audits all of it with AVX instructions and 1 thread. Every window of
every peer is replayed within the tolerance that the auditor learns from honest windows of the first
seed. Prints a JSON line for each strategy: how many messages were compared, what honest ones are
apart, whom the audit accuses; and of lies that somebody could have sent in place of each message,
how many are beyond the tolerance, at which distance.

- scaled: all values times 1.01; of signs and codes, which have no size, the sizes beside them.
- layer: the first layer of one parameter of the model's layers, drawn for each message, negated.
- stale: the peer's message of the round before.
- rows: 1 % of the rows of each matrix, one at least, drawn for each message, by noise of its size.
- little_enough: the others' mean, less 0.5 standard deviations (docs/reference/run-file.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import small_runs
from pipeline import runfile
from pipeline.stage import devices

PEERS, ROUNDS, EVERY, BATCH = 4, 12, 6, 16
THREADS, FLAG = "1", "--xla_cpu_max_isa=AVX"  # of the auditor
MODEL = small_runs.llama(512, hidden=64, inner=176, heads=4, kv_heads=2, length=32)
ADAM = {"AdamW": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}}
LOCAL = {"inner_steps": 4, "inner": ADAM}
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}
SPARSE = {"compression_topk": 8, "compression_chunk": 16}
DISTRO = {"clip_grad_norm": 1.0, "compression_decay": 0.999, **SPARSE}
STRATEGIES: dict[str, dict[str, Any]] = {
    "AdamW": ADAM,
    "Muon": {"Muon": {**ADAM["AdamW"], "momentum": 0.95}},
    "SGD": {
        "SGD": {"clip_grad_norm": 1.0, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0}
    },
    "FedAvg": {"FedAvg": LOCAL},
    "DiLoCo": {"DiLoCo": {**LOCAL, **OUTER}},
    "DiLoCo, 8 bits": {
        "DiLoCo": {**LOCAL, **OUTER, "quantize": "int8", "quantize_block": 64,
                   "error_feedback": 0.9}
    },
    "Streaming DiLoCo": {
        "StreamingDiLoCo": {**LOCAL, **OUTER, "fragments": 2, "delay": 1, "mixing": 0.25}
    },
    "Decoupled DiLoCo": {
        "DecoupledDiLoCo": {
            **LOCAL, "fragments": 2, "delay": 1, "adopt": "carry", "quorum": 4,
            "grace_seconds": 0.1, "max_age": 2,
            "outer": {"Nesterov": {"learning_rate": 0.7, "momentum": 0.9}},
        }
    },
    "SPARTA-DiLoCo": {
        "SPARTADiLoCo": {**LOCAL, **OUTER, "share": 0.2, "seed": 0, "outer_every": 3}
    },
    "SPARTA": {"SPARTA": {**LOCAL, "share": 0.05, "seed": 0, "selector": "partitioned"}},
    "SparseLoCo": {
        "SparseLoCo": {**LOCAL, **SPARSE, "outer_learning_rate": 1.0, "error_feedback": 0.95}
    },
    "DisTrO, signs": {"Distro": {**DISTRO, "quantize_1bit": True}},
    "DisTrO, values": {"Distro": {**DISTRO, "quantize_1bit": False}},
    "AdaDistro": {
        "AdaDistro": {
            "compression_decay": 0.95, **SPARSE, "quantize_1bit": True,
            "second_moment_decay": 0.95, "update": "orthogonal", "step_scale": {"lm_head": 2.0},
        }
    },
}  # fmt: skip
HALVED = {"DiLoCo, in bfloat16": "DiLoCo", "DisTrO, values, in bfloat16": "DisTrO, values"}
NAMES = [*STRATEGIES, *HALVED]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strategies", nargs="*", choices=NAMES, default=NAMES)
    parser.add_argument("--auditor", type=Path, help="folder of what was trained; used internally")
    chosen = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
    devices.prepare(make_run("AdamW", 0))
    if chosen.auditor:
        os.environ["NPROC"] = THREADS
        for name in chosen.strategies:
            print(json.dumps(audit(name, chosen.seeds, chosen.auditor)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.strategies:
            train(name, chosen.seeds, Path(folder))
        subprocess.run(
            [sys.executable, "-m", "benchmarks.elsewhere", "--auditor", folder,
             "--seeds", str(chosen.seeds), "--strategies", *chosen.strategies],
            env={**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {FLAG}"},
            check=True,
        )  # fmt: skip


def make_run(name: str, seed: int) -> runfile.Run:
    """A run of a strategy: 12 rounds, 2 windows of each peer."""
    precision = "bfloat16" if name in HALVED else "float32"
    document = small_runs.document(
        MODEL,
        STRATEGIES[HALVED.get(name, name)],
        peers={"count": PEERS, "micro_batch": 1, "seed": seed, "precision": precision},
        rounds=ROUNDS,
        batch=BATCH,
        every=EVERY,
    )
    return runfile.parse(document, "elsewhere")


def train(name: str, seeds: int, folder: Path) -> None:
    """Train a strategy under each seed."""
    from benchmarks.simulated import Lab

    lab = Lab(make_run(name, 0), MODEL, devices=1)
    for seed in range(seeds):
        lab.train(make_run(name, seed), _place(folder, name, seed))


def audit(name: str, seeds: int, folder: Path) -> dict:
    """Audit what was trained, and see how many of some lies would be found."""
    from benchmarks.simulated import Lab
    from lockstep.transcript.transcript import Transcript
    from pipeline.audit import rounding
    from pipeline.audit.audit import audit as audit_all
    from pipeline.audit.replay import Replay

    lab = Lab(make_run(name, 0), MODEL, devices=1)
    form, findings, varied, params = lab.programs.form, [], None, {"none": [0.0]}
    totals = {"messages": 0, "message_bytes": 0, "kept_bytes": 0}
    distances: dict[str, list[float]] = {}
    owned: dict[str, list[float]] = {}
    for seed in range(seeds):
        run, transcript = make_run(name, seed), Transcript(_place(folder, name, seed))
        lab.begin_as(transcript)
        setup = lab.setup(run)
        work = [(window, range(PEERS)) for window in run.snapshots().windows]
        if varied is None:
            varied = rounding.measure(setup, transcript, work)
        findings += audit_all(setup, transcript)
        replay = Replay(setup, transcript, "other bits", work, varied)
        for pair in work:
            findings += replay.window(*pair, lambda: None)
            if not form.kept:
                for lie, distance in _params(setup, transcript, *pair, seed).items():
                    params.setdefault(lie, []).append(distance)
            honest_window = rounding.HonestWindow(setup, transcript, *pair)
            for lie, distance in _lies(honest_window, seed):
                distances.setdefault(lie, []).append(distance)
            for kind, distance in _states(honest_window):
                owned.setdefault(kind, []).append(distance)
        for entry in transcript.rounds:
            for message in entry.evidence.messages.values():
                totals["messages"] += 1
                totals["message_bytes"] += message.bytes
                totals["kept_bytes"] += message.held
    limit, honest = replay.how.limit, distances.pop("none")
    honest_params = params.pop("none")
    return {
        "benchmark": "elsewhere",
        "strategy": name,
        "seeds": seeds,
        "kept": form.kept,
        **totals,
        "pieces": None if form.kept else form.pieces.count,
        "drawn": None if form.kept else form.pieces.drawn,
        "compared": len(honest),
        "honest_elsewhere": max(honest),
        "honest_learnt": varied and varied.distance,
        "limit": limit,
        "params_elsewhere": max(honest_params),
        "params_learnt": varied and varied.params,
        "params_limit": replay.how.params_limit,
        "own_elsewhere": {kind: max(values) for kind, values in owned.items()},
        "own_learnt": varied and varied.own,
        "own_limits": replay.how.own_limits,
        "findings": [f"{f.round} {f.peer} {f.kind}: {f.detail}" for f in findings],
        "lies": {lie: _summary(values, limit) for lie, values in distances.items()},
        "lies_in_params": {
            lie: _summary(values, replay.how.params_limit) for lie, values in params.items()
        },
    }


def _summary(distances: list[float], limit: float) -> dict[str, float]:
    return {
        "found": round(sum(not d <= limit for d in distances) / len(distances), 3),
        "least": min(distances),
        "median": sorted(distances)[len(distances) // 2],
    }


def _place(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{NAMES.index(name):02}-{seed}"


# ---- Lies ----


def _lies(window: Any, seed: int) -> Iterator[tuple[str, float]]:
    """Each lie about each message of a window with its distance; "none" is the true message.

    The pieces of a message that is not kept are drawn anew for each lie.
    """
    import numpy as np

    from lockstep.wire import message as wire
    from pipeline.audit.replay import sketch_distances

    form, rng = window.setup.programs.form, np.random.default_rng(seed)
    before: dict[int, Any] = {}
    now: dict[int, Any] = {}
    for entry, peer, message in window.messages():
        if form.kept:
            now = {p: window.sent(entry, p) for p in entry.evidence.messages}

            def far(false: Any, entry=entry, peer=peer) -> float:
                work, own = window.work(entry, peer), window.own[peer]
                return float(window.replica.compare(own, work, entry.round.step, false)[0])

            yield "none", far(now[peer])
            for name, false in _false(now, peer, before.get(peer), form, rng):
                yield name, far(false)
            before[peer] = now[peer]
            continue
        now[peer] = message
        if len(now) < PEERS:
            continue
        yield from (
            ("none", distance)
            for distance in sketch_distances(window.setup, window.transcript, entry, now).values()
        )
        pieces = form.pieces
        for p in now:
            for name, false in _false(now, p, before.get(p), form, rng):
                drawn = sorted(rng.choice(pieces.count, pieces.drawn, replace=False).tolist())
                sent = pieces.split(pieces.chosen(wire.fields(false), drawn), drawn)
                yield name, pieces.distance(wire.fields(now[p]), sent)
        before, now = now, {}


def _states(window: Any) -> Iterator[tuple[str, float]]:
    """How far what each peer owns after a window is from what the transcript has, by its kind."""
    import jax

    from pipeline.audit.tolerance import distances_by_kind

    template = window.setup.start.state
    for peer, own in window.own.items():
        opening, closing = (
            window.transcript.own(step, peer, template.own[peer])
            for step in (window.window.opening, window.window.last)
        )
        distances = distances_by_kind(closing, jax.device_get(own), opening, template.params)
        yield from distances.items()


def _params(setup: Any, transcript: Any, window: Any, peers: range, seed: int) -> dict[str, float]:
    """How far the params after a window are from those that the transcript has, by lie.

    "none" is the window as it was; each lie takes the place of one message, whose peer and round
    are drawn, whatever its pieces show.
    """
    import jax
    import numpy as np

    from pipeline.audit import rounding
    from pipeline.audit.tolerance import distance_of_update

    rng = np.random.default_rng([seed, window.first])

    class Lying(rounding.HonestWindow):
        lie, liar, before = "none", 0, None
        step = window.last

        def receive(self, entry: Any, replayed: dict[int, Any]) -> None:
            if entry.round.step == self.step and self.lie != "none":
                lies = _false(replayed, self.liar, self.before, setup.programs.form, rng)
                replayed = replayed | {self.liar: dict(lies)[self.lie]}
            self.before = replayed[self.liar]
            super().receive(entry, replayed)

    def after(lie: str) -> float:
        lying = Lying(setup, transcript, window, peers)
        lying.lie, lying.liar = lie, int(rng.integers(PEERS))
        lying.step = int(rng.integers(window.first + 1, window.last + 1))
        for _ in lying.messages():
            pass
        opening, closing = (
            transcript.agreed(step, setup.start.state)[0] for step in (window.opening, window.last)
        )
        return distance_of_update(jax.device_get(lying.replica.params), closing, opening)

    return {
        lie: after(lie) for lie in ("none", "scaled", "layer", "rows", "stale", "little_enough")
    }


def _false(
    messages: dict[int, Any], peer: int, before: Any, form: Any, rng: Any
) -> Iterator[tuple[str, Any]]:
    """Lies that could be sent in place of a peer's message."""
    import jax
    import numpy as np

    from lockstep.swarm.lies import lie
    from lockstep.wire.leaves import leaves_by

    leaves, structure = leaves_by(form.areas, messages[peer]), jax.tree.structure(form.areas)

    def sent(change: Any) -> Any:
        return structure.unflatten([change(n, leaf).node for n, leaf in enumerate(leaves)])

    def scaled(_: int, leaf: Any) -> Any:
        return leaf.with_values(1.01 * leaf.values)

    chosen = int(rng.integers(len(leaves)))

    def layer(number: int, leaf: Any) -> Any:
        if number != chosen:
            return leaf
        flat = leaf.values.copy().reshape(-1)
        flat[: -(-flat.size // MODEL["num_hidden_layers"])] *= -1
        return leaf.with_values(flat.reshape(leaf.values.shape))

    def rows(_: int, leaf: Any) -> Any:
        x = leaf.values
        flat = x.copy().reshape(-1)
        count = flat.size // MODEL["hidden_size"]
        if count < 100:
            return leaf
        size = float(np.sqrt(np.mean(np.square(flat))))
        for row in rng.choice(count, max(1, count // 100), replace=False):
            part = slice(row * MODEL["hidden_size"], (row + 1) * MODEL["hidden_size"])
            flat[part] = size * rng.standard_normal(MODEL["hidden_size"])
        return leaf.with_values(flat.reshape(x.shape))

    yield "scaled", sent(scaled)
    yield "layer", sent(layer)
    yield "rows", sent(rows)
    if before is not None:
        yield "stale", before
    others = [messages[p] for p in messages if p != peer]
    yield "little_enough", lie("little_enough", 0.5, messages[peer], others, form.areas, rng)


if __name__ == "__main__":
    main()
