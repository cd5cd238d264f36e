"""What optimizers learn from equal tokens and equal bytes: `python -m benchmarks.convergence`.

Trains every case at every size on the default run's corpus, by the stages download, convert and
train themselves. A case's base learning rate is tuned with seed 0, on a grid by factors of two that
grows while its best lies at an edge; further seeds (other weights, another order of the data,
another assignment) train with that best one. Cases and keys of the run file that they change stand
in cases.py.

Prints a line for each training as it ends, and writes convergence.json and convergence.png to
`--out`: held-out loss by tokens and by bytes, with the spread over seeds. What convergence.json has
of other sizes and cases stays. Finished trainings are kept by their key in `--root`, so one that is
killed goes on, and one that is repeated ends at once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import tomlkit

from benchmarks import curves, sizes
from benchmarks.cases import CASES, MAIN, VARIANTS, Case
from pipeline.stage.artifacts import read_json, write_bytes, write_json
from pipeline.stage.keys import Keys

STAGES = ("download", "convert", "train")


class Trained(NamedTuple):
    """What one training came to; `held_out` has a row (tokens, bytes_up, loss) for each measure."""

    size: str
    case: str
    base_lr: float
    seed: int
    key: str
    commit: str  # of the code that trained; the key says whether another would have done the same
    loss: float | None  # None where it diverged
    bits_per_parameter: float | None
    held_out: list[tuple[int, int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sizes.SIZES, nargs="+", default=["2M", "5M"])
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(MAIN))
    parser.add_argument("--variants", action="store_true", help="too, at the first size")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--root", type=Path, default=Path("data/convergence"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    chosen = parser.parse_args()

    found: list[Trained] = []
    for size in chosen.size:
        for name in chosen.case:
            found += tuned_and_repeated(size, name, chosen)
    if chosen.variants:
        size = chosen.size[0]
        found += [train(size, name, case.base_lr, 0, chosen) for name, case in VARIANTS.items()]
    chosen.out.mkdir(parents=True, exist_ok=True)
    table = chosen.out / "convergence.json"
    rows = merged(read_json(table)["cases"] if table.is_file() else [], summary(found))
    today = datetime.now(UTC).date().isoformat()
    write_json(table, {"date": today, "cases": rows})
    write_bytes(chosen.out / "convergence.png", curves.draw(rows))
    print(*map(_line, rows), sep="\n")


def tuned_and_repeated(size: str, name: str, chosen: argparse.Namespace) -> list[Trained]:
    """Trainings with seed 0 at learning rates by factors of two, the best of them inside, and with
    the other seeds at the best one. A rate at which any seed diverges is not the best one."""
    middle = CASES[name].base_lr
    tried = {lr: train(size, name, lr, 0, chosen) for lr in (middle / 2, middle, 2 * middle)}
    repeated: dict[float, list[Trained]] = {}
    while True:
        best = best_rate([*tried.values(), *sum(repeated.values(), [])])
        if best is None:
            raise SystemExit(f"{size} {name}: diverged at every learning rate of {sorted(tried)}")
        if best in (min(tried), max(tried)):
            further = best / 2 if best == min(tried) else best * 2
            tried[further] = train(size, name, further, 0, chosen)
        elif best in repeated:
            return [*tried.values(), *sum(repeated.values(), [])]
        else:
            seeds = range(1, chosen.seeds)
            repeated[best] = [train(size, name, best, seed, chosen) for seed in seeds]


def best_rate(found: list[Trained]) -> float | None:
    """The learning rate with the lowest loss of seed 0, of those at which no seed diverged."""
    diverged = {t.base_lr for t in found if t.loss is None}
    stable = [t for t in found if t.seed == 0 and t.base_lr not in diverged]
    return min(stable, key=lambda t: t.loss).base_lr if stable else None


def run_document(size: str, case: Case, base_lr: float, seed: int, rounds: int) -> dict:
    """The run file of one training: the default one but for what the arguments say."""
    document = sizes.document(sizes.SIZES[size])
    llm = document["model"]["LLM"]
    kept = llm["optimizer"]["Distro"] if case.optimizer in ("Distro", "AdaDistro") else {}
    llm["optimizer"] = {case.optimizer: kept | case.settings}
    rounds //= case.local_steps
    for key in ("global_batch_size_start", "global_batch_size_end"):
        document["config"][key] *= case.local_steps
    warm_up = round(rounds * llm["lr_schedule"]["Cosine"]["warmup_steps"] / 200)
    llm["lr_schedule"]["Cosine"] |= {
        "base_lr": base_lr,
        "final_lr": base_lr / 10,
        "total_steps": rounds,
        "warmup_steps": warm_up,
    }
    llm["checkpoint"]["Init"]["seed"] = seed
    llm["data_location"]["Corpus"]["shuffle"]["Seeded"][0] = seed
    document["config"]["total_steps"] = rounds
    document["peers"]["seed"] = seed
    document["held_out"]["every"] = max(1, rounds // 10)
    document["witness"]["snapshot_every"] = rounds  # nobody audits: fewer snapshots, less disk
    return document


def train(size: str, name: str, base_lr: float, seed: int, chosen: argparse.Namespace) -> Trained:
    """One training, unless its result is kept already."""
    root = chosen.root / f"seed-{seed}"  # each has its own order of data, downloaded once
    root.mkdir(parents=True, exist_ok=True)
    run_file = root / "run.toml"
    document = run_document(size, CASES[name], base_lr, seed, chosen.rounds)
    run_file.write_text(tomlkit.dumps(document), encoding="utf-8")
    key = Keys(run_file).key("train")
    kept = chosen.root / "done" / f"{key}.json"
    if not kept.is_file():
        made = {"key": key, "commit": _commit()}
        write_json(kept, _train(run_file, root, chosen.root / "compiled")._asdict() | made)
    read = read_json(kept)
    names = {"size": size, "case": name, "base_lr": base_lr, "seed": seed}
    trained = Trained(**names, **{k: read[k] for k in Trained._fields if k not in names})
    print(json.dumps(names | {"key": key, "loss": trained.loss}), flush=True)
    return trained


class _Outcome(NamedTuple):
    loss: float | None
    bits_per_parameter: float | None
    held_out: list[tuple[int, int, float]]


def _train(run_file: Path, root: Path, compiled: Path) -> _Outcome:
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(compiled.absolute())}
    for stage in STAGES:
        command = [sys.executable, "-m", "pipeline", stage, "--run", run_file, "--root", root]
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode and "diverged" in done.stderr:
            return _Outcome(None, None, [])
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    metrics = read_json(root / "metrics/train.json")
    # the second line is before the first round: no bytes, which a logarithmic axis has no place for
    header, _, *lines = (root / "metrics/held_out.tsv").read_text().splitlines()
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    curve = [(int(r["tokens"]), int(r["bytes_up"]), float(r["held_out_loss"])) for r in rows]
    return _Outcome(metrics["held_out_loss"], metrics["bits_per_parameter_and_round"], curve)


def summary(found: list[Trained]) -> list[dict]:
    """A row for each case at each size: its grid (seed 0; None where it diverged), how many of how
    many seeds diverged at a rate, where any did, and its seeds at the best rate."""
    rows = []
    for size, name in dict.fromkeys((t.size, t.case) for t in found):
        here = sorted((t for t in found if (t.size, t.case) == (size, name)), key=_place)
        best = best_rate(here)
        seeds = [t for t in here if t.base_lr == best]
        losses = [t.loss for t in seeds]
        rows.append(
            {
                "size": size,
                "case": name,
                "label": CASES[name].label,
                "optimizer": {CASES[name].optimizer: CASES[name].settings},
                "grid": {f"{t.base_lr:g}": t.loss for t in here if t.seed == 0},
                "diverged": _diverged(here),
                "base_lr": best,
                "bits_per_parameter": seeds[0].bits_per_parameter if seeds else None,
                "mean": statistics.mean(losses) if losses else None,
                "lowest": min(losses, default=None),
                "highest": max(losses, default=None),
                "trainings": [t._asdict() for t in seeds],
            }
        )
    return rows


def _place(trained: Trained) -> tuple[float, int]:
    return trained.base_lr, trained.seed


def _diverged(found: list[Trained]) -> dict[str, str]:
    """By learning rate, as in {"0.032": "2 of 3"} seeds."""
    count = {}
    for rate in sorted({t.base_lr for t in found if t.loss is None}):
        losses = [t.loss for t in found if t.base_lr == rate]
        count[f"{rate:g}"] = f"{losses.count(None)} of {len(losses)}"
    return count


def merged(earlier: list[dict], rows: list[dict]) -> list[dict]:
    """The rows, and those of other sizes and cases that were there; in the order of `--size` and
    cases.py, which may have dropped some."""
    place = {
        (size, name): (i, j) for i, size in enumerate(sizes.SIZES) for j, name in enumerate(CASES)
    }
    known = [row for row in [*earlier, *rows] if (row["size"], row["case"]) in place]
    by_place = {place[row["size"], row["case"]]: row for row in known}
    return [by_place[at] for at in sorted(by_place)]


def _commit() -> str:
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    return subprocess.check_output(command, text=True).strip()


def _line(row: dict) -> str:
    names = f"{row['size']:5} {row['label']:45}"
    if row["mean"] is None:
        return f"{names} diverged"
    names += f" lr {row['base_lr']:<7g}"
    return f"{names} {row['mean']:.3f} ({row['lowest']:.3f} to {row['highest']:.3f})"


if __name__ == "__main__":
    main()
