"""What finds which lie, how surely, and what a lie costs: `python -m benchmarks.detection`.

A tiny model, trained by ten peers for twelve rounds, four windows each; in rounds 4 to 9 (two
windows) one of them lies. Each kind of fault runs under many seeds, which choose who lies, who
trains on what, who verifies and who witnesses:

- with verifiers: is the liar ejected while training, by the witnesses' quorum or by a verifier;
- without: does the audit find it, replaying everything, and replaying a tenth.

`--by-rules` does so with `[peers] bits = "everywhere"`, replays everything by other programs as
well, and has lies at their smallest.

`--part honest` trains runs without faults and audits them; `--part damage` lets
three of the ten peers lie for a longer run, and measures the loss at its end. `--part reader` has a
liar that has read the run file: it lies in every round but those in which that says that it is
verified, which is none, and so in all. Prints one JSON line for each kind.
"""

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import small_runs
from lockstep.tables.faults import KINDS
from pipeline import runfile
from pipeline.audit.verdict_text import chance
from pipeline.stage import devices

if TYPE_CHECKING:
    from benchmarks.simulated import Lab, Trained
    from lockstep.programs.train_step import Programs

PEERS, ROUNDS, EVERY, PERCENT = 10, 12, 3, 20
LIES = (4, 9)  # first and last round
MODEL = small_runs.llama(64, hidden=16, inner=32, heads=2, kv_heads=1, length=16)
BY_QUORUM = ("no message", "two messages", "false witness")
DRAWS = 2000  # samples of a tenth, drawn for each transcript
RULES = {"bits": "everywhere", "product_bits": 8}
SMALLEST = {  # that change a value in bfloat16, a sign, a row
    "scale_up": 1 + 2.0**-7, "scale_down": 1 - 2.0**-8, "noise": 0.02, "drift": 1e-6,
            "stale": 1.0, "lazy": 0.99}  # fmt: skip
ELSEWHERE = ("elsewhere", "honest_accused_elsewhere")  # what other programs find
by_rules = False
PARTS = ("kinds", "honest", "damage", "reader")
DAMAGE = {"rounds": 120, "liars": [1, 4, 7], "held_out": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, default="kinds")
    parser.add_argument("--seeds", type=int, default=20, help="of each kind")
    parser.add_argument("--runs", type=int, default=200, help="without faults")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--by-rules", action="store_true")
    chosen = parser.parse_args()
    global by_rules  # noqa: PLW0603 - of the whole program
    by_rules = chosen.by_rules
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # a program is compiled for each
    devices.prepare(make_run())
    if chosen.part == "honest":
        print(json.dumps(honest(chosen.runs)), flush=True)
    elif chosen.part == "reader":
        for rounds in (LIES, (1, ROUNDS)):
            print(json.dumps(lies_of(rounds, chosen.seeds)), flush=True)
    elif chosen.part == "damage":
        for line in damage(chosen.kinds, chosen.seeds):
            print(json.dumps(line), flush=True)
    else:
        for kind in chosen.kinds:
            print(json.dumps(detect(kind, chosen.seeds)), flush=True)


def make_run(
    kind: str = "",
    seed: int = 0,
    *,
    percent: int = 0,
    rounds: int = ROUNDS,
    schedule: tuple[dict, ...] = (),
) -> runfile.Run:
    """A run in the form that `kind` needs."""
    needs = form_for(kind) if kind else ""
    distro = {
        "clip_grad_norm": 1.0, "compression_decay": 0.999, "compression_chunk": 8,
        "compression_topk": 4, "quantize_1bit": needs != "values",
    }  # fmt: skip
    wire = "psyche" if needs == "plain" else "lockstep"
    document = small_runs.document(
        MODEL,
        {"Distro": distro},
        peers={"count": PEERS, "micro_batch": 2, "seed": seed, "wire": wire}
        | (RULES if by_rules or needs == "rules" else {}),
        rounds=rounds,
        batch=2 * PEERS,
        every=EVERY,
        epoch_time=8 if kind in ("crash", "join") else 100_000,
        max_round_train_time=5,
        verification_percent=percent,
        witness_nodes=4,
    )
    return runfile.parse(document | {"faults": {"schedule": list(schedule)}}, "detection")


def scheduled(kind: str, rng: random.Random) -> tuple[int, list[dict]]:
    """A liar, and the schedule of its fault, and of another that gives it an occasion."""
    liar, *others = rng.sample(range(PEERS), PEERS)
    first, last = LIES
    fault = {"kind": kind, "peer": [liar], "rounds": [first, last]}
    if by_rules and kind in SMALLEST:
        fault["size"] = SMALLEST[kind]
    if kind == "collude":
        fault["peer"].append(others[0])
    if kind == "join":
        fault["rounds"] = [1, first]
    schedule = [fault]
    if kind == "false_witness":  # there is nothing to attest wrongly where everything arrives
        schedule.append({"kind": "dropped", "peer": others[0], "rounds": [first, last]})
    return liar, schedule


def form_for(kind: str) -> str:
    """The form of messages or steps that a kind needs, as "values"; "" if any will do."""
    return KINDS[kind].needs if KINDS[kind].needs in ("values", "plain", "rules") else ""


@cache
def lab_for(needs: str) -> "Lab":
    """Programs of runs in the form of messages that a kind needs."""
    from benchmarks.simulated import Lab

    return Lab(make_run(next(kind for kind in KINDS if form_for(kind) == needs)), MODEL)


@cache
def elsewhere_for(needs: str) -> "Programs":
    """Other programs of the same runs, as another machine has them: scanned layers."""
    from pipeline.language_model.language_model import programs_of

    lab = lab_for(needs)
    peers = lab.run.peers.model_copy(update={"scan_layers": True})
    return programs_of(lab.run.model_copy(update={"peers": peers}), MODEL)


def detect(kind: str, seeds: int) -> dict:
    """How often a kind is detected, and by what."""
    lab = lab_for(form_for(kind))
    count: Counter[str] = Counter()
    drawn, expected, windows_cheated, rounds_until = [], [], [], []
    for seed in range(seeds):
        liar, schedule = scheduled(kind, random.Random(f"{kind}:{seed}"))
        liars = set(schedule[0]["peer"])
        run = make_run(kind, seed, percent=PERCENT, schedule=schedule)
        with tempfile.TemporaryDirectory() as folder:
            trained = lab.train(run, Path(folder))
            ejected = {
                peer: (entry.round.step, why)
                for entry in trained.transcript.rounds
                for peer, why in entry.decision.ejected.items()
            }
            if kind == "false_verifier":  # which needs verifiers
                audited = _audit(kind, run, trained)
        count["fired_with_verifiers"] += trained.fired[kind] > 0
        for peer, (step, why) in ejected.items():
            count["honest_ejected"] += peer not in liars
            if peer == liar:
                count["quorum" if why in BY_QUORUM else "verifier"] += 1
                rounds_until.append(step - LIES[0] + 1)

        if kind != "false_verifier":
            run = make_run(kind, seed, schedule=schedule)
            with tempfile.TemporaryDirectory() as folder:
                trained = lab.train(run, Path(folder))
                audited = _audit(kind, run, trained)
        cheap, accused, near, sampled = audited
        count["fired"] += trained.fired[kind] > 0
        count["times_fired"] += trained.fired[kind]
        named = {peer for _, peer in accused} | {f.peer for f in cheap}
        count["honest_accused"] += len(named - liars)
        count["cheap"] += any(f.peer in liars for f in cheap)
        count["all"] += bool(named & liars)
        count["elsewhere"] += bool({f.peer for f in near} & liars)
        count["honest_accused_elsewhere"] += len({f.peer for f in near} - liars)
        cheated = {pair for pair in accused if pair[1] in liars}
        windows_cheated.append(len(cheated))
        share, formula = sampled(cheated)
        drawn.append(share)
        expected.append(formula)
    fired = max(1, count["fired"])
    return {
        "benchmark": "detection",
        "kind": kind,
        "seeds": seeds,
        "fired": count["fired"],
        "times_fired": count["times_fired"],
        "fired_with_verifiers": count["fired_with_verifiers"],
        "ejected_by_quorum": count["quorum"],
        "ejected_by_verifier": count["verifier"],
        "rounds_until_ejected": _mean(rounds_until),
        "audit_without_replay": count["cheap"],
        "audit_all": count["all"],
        "share_detected": count["all"] / fired,
        "windows_cheated": _mean(windows_cheated),
        "audit_tenth": _mean(drawn),
        "audit_tenth_formula": _mean(expected),
        "honest_ejected": count["honest_ejected"],
        "honest_accused": count["honest_accused"],
    } | ({name: count[name] for name in ELSEWHERE} if by_rules else {})


def _audit(kind: str, run: runfile.Run, trained: "Trained") -> tuple:
    """The audit without replay, the windows in which a full replay finds something, what one by
    other programs finds where both go by rules, and what a sample of a tenth would have found.

    A replay of a window does not depend on the others that were sampled, so a sample finds
    those of its windows in which the full replay finds something; one sample of each transcript
    is replayed to check that.
    """
    lab = lab_for(form_for(kind))
    transcript = trained.transcript
    cheap = lab.audit(run, transcript, sample=set())
    full = lab.audit(run, transcript)
    near = lab.audit(run, transcript, elsewhere=elsewhere_for(form_for(kind))) if by_rules else []
    by_replay = [f for f in full if f.kind in ("message", "state", "check")]
    accused = {((f.round - 1) // EVERY, f.peer) for f in by_replay}
    pairs = [(w, p) for w in range(ROUNDS // EVERY) for p in range(PEERS)]
    tenth = len(pairs) // 10
    rng = random.Random(transcript.hash)

    sample = set(rng.sample(pairs, tenth))
    seen = lab.audit(run, transcript, sample=sample)
    again = {((f.round - 1) // EVERY, f.peer) for f in seen if f.kind in ("message", "state")}
    messages = {((f.round - 1) // EVERY, f.peer) for f in full if f.kind in ("message", "state")}
    if again != messages & sample:
        raise AssertionError(f"a sample found {again}, expected {messages & sample}")

    def sampled(cheated: set) -> tuple[float, float]:
        hits = sum(bool(cheated & set(rng.sample(pairs, tenth))) for _ in range(DRAWS))
        return hits / DRAWS, chance(tenth / len(pairs), len(cheated))

    return cheap, accused, near, sampled


def lies_of(rounds: tuple[int, int], seeds: int) -> dict:
    """How many lies are applied of one peer that lies in all of these rounds."""
    lab, count, until = lab_for(""), Counter(), []
    for seed in range(seeds):
        liar, (fault, *_) = scheduled("sign_flip", random.Random(f"sign_flip:{seed}"))
        run = make_run("", seed, percent=PERCENT, schedule=(fault | {"rounds": [*rounds]},))
        with tempfile.TemporaryDirectory() as folder:
            trained = lab.train(run, Path(folder))
            entries = trained.transcript.rounds[rounds[0] - 1 : rounds[1]]
        count["sent"] += trained.fired["sign_flip"]
        count["applied"] += sum(liar in entry.decision.applied for entry in entries)
        out = [entry.round.step for entry in entries if liar in entry.decision.ejected]
        count["ejected"] += len(out)
        until += [step - rounds[0] + 1 for step in out]
    line = {"benchmark": "detection", "kind": "reader", "rounds": rounds, "seeds": seeds}
    return line | count | {"rounds_until_ejected": _mean(until)}


def honest(runs: int) -> dict:
    """How often honest peers are accused or ejected: runs with verifiers, every window replayed."""
    lab, count = lab_for(""), Counter()
    for seed in range(runs):
        run = make_run(seed=1000 + seed, percent=PERCENT)
        with tempfile.TemporaryDirectory() as folder:
            trained = lab.train(run, Path(folder))
            count["accused"] += bool(lab.audit(run, trained.transcript))
            if by_rules:
                near = lab.audit(run, trained.transcript, elsewhere=elsewhere_for(""))
                count["accused_elsewhere"] += bool(near)
            count["ejected"] += any(e.decision.ejected for e in trained.transcript.rounds)
            count["checks"] += sum(len(e.evidence.checks) for e in trained.transcript.rounds)
    windows = runs * PEERS * ROUNDS // EVERY
    return {"benchmark": "detection", "kind": "honest", "runs": runs, "windows": windows} | count


def damage(kinds: list[str], seeds: int) -> Iterator[dict]:
    """The loss after a longer run: honest, with three liars of ten, and with verifiers."""
    import numpy as np

    for needs in ("", "values", "plain", "rules"):
        subset = [kind for kind in kinds if form_for(kind) == needs]
        if not subset:
            continue
        lab = lab_for(needs)
        held_out = lab.data.take(10**9 + np.arange(DAMAGE["held_out"]))

        def loss(run: runfile.Run, lab=lab, held_out=held_out) -> tuple[float, int]:
            with tempfile.TemporaryDirectory() as folder:
                trained = lab.train(run, Path(folder))
                out = {p for entry in trained.transcript.rounds for p in entry.decision.ejected}
            return float(np.mean(lab.programs.steps.measure(trained.params, held_out))), len(out)

        for kind in ("", *subset):
            liars, rounds = DAMAGE["liars"], DAMAGE["rounds"]
            fault = {"kind": kind, "peer": liars, "rounds": [1, rounds]}
            schedule = [fault] if kind else []
            if kind in ("join", "crash"):
                fault["rounds"] = [1, rounds // 2]
            rows = {"unseen": [], "ejected": []}
            caught = []
            for seed in range(seeds):
                for name, percent in (("unseen", 0), ("ejected", PERCENT)):
                    if kind == "false_verifier" and not percent:
                        continue
                    run = make_run(
                        kind or subset[0], seed, percent=percent, rounds=rounds, schedule=schedule
                    )
                    value, out = loss(run)
                    rows[name].append(value)
                    if percent:
                        caught.append(out)
            yield {
                "benchmark": "damage",
                "kind": kind or f"honest ({needs or 'signs'})",
                "loss_unseen": _mean(rows["unseen"]),
                "loss_with_verifiers": _mean(rows["ejected"]),
                "ejected": _mean(caught),
            }


def _mean(values: list[float]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


if __name__ == "__main__":
    main()
