"""The benchmark's run files and tables; the trainings themselves take an hour."""

import argparse

import pytest

from benchmarks import convergence, curves, sizes
from benchmarks.cases import CASES, MAIN

MADE = {"key": "0123abcd", "commit": "89ab", "bits_per_parameter": 0.08}


def trained(case: str, base_lr: float, seed: int, loss: float | None) -> convergence.Trained:
    curve = [] if loss is None else [(4096, 100, 8.0), (8192, 200, loss)]
    names = {"size": "2M", "case": case, "base_lr": base_lr, "seed": seed}
    return convergence.Trained(**names, **MADE, loss=loss, held_out=curve)


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_run_file_that_loads(name):
    document = convergence.run_document("2M", CASES[name], base_lr=0.004, seed=3, rounds=100)
    run = sizes.load(document)
    assert run.llm.optimizer.tag() == CASES[name].optimizer
    assert run.llm.lr_schedule.base_lr == 0.004
    steps = CASES[name].local_steps
    assert run.llm.lr_schedule.warmup_steps == 10 // steps
    assert run.config.total_steps == 100 // steps
    assert run.config.last_index(run.llm.max_seq_len) == 100 * 16  # equal tokens
    assert (run.llm.checkpoint.seed, run.peers.seed) == (3, 3)


def test_the_grid_grows_until_its_best_lies_inside(monkeypatch):
    asked = []

    def train(size, name, base_lr, seed, chosen):
        asked.append((base_lr, seed))
        return trained(name, base_lr, seed, loss=5 + abs(base_lr - 6e-3))

    monkeypatch.setattr(convergence, "train", train)
    convergence.tuned_and_repeated("2M", "adamw", argparse.Namespace(seeds=3))
    tuned = [7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2]
    assert asked == [(lr, 0) for lr in tuned] + [(6e-3, 1), (6e-3, 2)]


def test_a_rate_at_which_a_seed_diverges_is_not_the_best(monkeypatch):
    """Seed 0 alone would take it, and leave a mean of what happened to end."""

    def train(size, name, base_lr, seed, chosen):
        lost = base_lr > 8e-3 or (base_lr == 8e-3 and seed == 2)
        return trained(name, base_lr, seed, loss=None if lost else 5 - base_lr - seed / 100)

    monkeypatch.setattr(convergence, "train", train)
    found = convergence.tuned_and_repeated("2M", "distro", argparse.Namespace(seeds=3))
    (row,) = convergence.summary(found)
    assert row["grid"] == {
        "0.001": 4.999,
        "0.002": 4.998,
        "0.004": 4.996,
        "0.008": 4.992,
        "0.016": None,
    }
    assert row["diverged"] == {"0.008": "1 of 3", "0.016": "1 of 1"}
    assert (row["base_lr"], len(row["trainings"])) == (4e-3, 3)
    assert row["lowest"] == pytest.approx(4.976)


def test_the_summary_has_the_spread_over_seeds_at_the_best_rate_and_the_diverged():
    found = [
        trained("distro", 1e-3, 0, 6.0),
        trained("distro", 2e-3, 0, 5.0),
        trained("distro", 2e-3, 1, 5.4),
        trained("distro", 4e-3, 0, None),
        trained("rms", 2e-3, 0, None),
    ]
    row, diverged = convergence.summary(found)
    assert row["grid"] == {"0.001": 6.0, "0.002": 5.0, "0.004": None}
    assert (row["base_lr"], row["lowest"], row["highest"]) == (2e-3, 5.0, 5.4)
    assert row["mean"] == pytest.approx(5.2)
    assert diverged["mean"] is None and diverged["diverged"] == {"0.002": "1 of 1"}
    assert curves.draw([row, diverged]).startswith(b"\x89PNG")
    alone = convergence.summary([trained("distro", 2e-3, 0, 5.0)])
    assert curves.draw([*alone, diverged]).startswith(b"\x89PNG")


def test_rows_of_other_sizes_and_cases_stay_in_the_table():
    rows = [{"size": s, "case": c, "n": 1} for s in ("2M", "5M") for c in ("adamw", "distro")]
    dropped = {"size": "2M", "case": "a case of last year"}
    found = convergence.merged(
        [*rows, dropped], [{"size": "2M", "case": "muon"}, rows[3] | {"n": 2}]
    )
    assert [(row["size"], row["case"]) for row in found] == [
        ("2M", "adamw"), ("2M", "muon"), ("2M", "distro"), ("5M", "adamw"), ("5M", "distro"),
    ]  # fmt: skip
    assert [row.get("n") for row in found] == [1, None, 1, 1, 2]


def test_the_main_cases_differ_in_label_and_are_few():
    labels = [case.label for case in CASES.values()]
    assert len(set(labels)) == len(labels)
    assert set(MAIN) == {"adamw", "muon", "distro", "ada-distro"}
