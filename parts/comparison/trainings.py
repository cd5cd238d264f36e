"""The trainings of a comparison: which there are, by what names, and the run file of each.

A method is tuned by the trainings of a search, each of which needs the ones before it; those left
when its best is bracketed are not done. Its seeds are trained at the best of them, and what goes
wrong is measured by what a round took without it.
So a training is named for what it depends on, and its file exists when it is done.
"""

import copy
import hashlib
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from lockstep.errors import LockstepError, expecting
from lockstep.methods import CARDS
from lockstep.methods.card import Card
from lockstep.tables.validation import dotted, validate
from parts.comparison import plan_file, search, training_result
from parts.comparison.compare_file import NO_FAILURE, Compare, Failure, load
from pipeline import runfile
from pipeline.runfile.derived_run import at_rate, tables_like, with_tokens
from pipeline.stage.keys import Keys

CURVE_MEASURES = 10  # of the held-out loss, for curves, which rows without failures have
NO_STOP = 1e6  # times the first loss: a training counts by its end, as those of the search do
AWAY_FAULTS = ("crash", "join")  # kinds of faults whose peer is away, and attests nothing
Ended = Mapping[str, Any]  # the result of a training
TrainKeys = dict[tuple[object, ...], str]  # of stage train, by what of a training decides it


class PlannedTraining(NamedTuple):
    """A training of a comparison, with what it is of."""

    method: str
    trial: int | None  # its number in the search, from 0; None of a seed that is scored
    seed: int
    failure: str = NO_FAILURE  # name of what goes wrong, or `none`

    @classmethod
    def in_plan(cls, entry: Mapping[str, Any]) -> "PlannedTraining":
        """Return the compared training of a plan's entry, which has its fields."""
        return cls(*(entry[name] for name in cls._fields))

    @property
    def label(self) -> str:
        """What people call the comparison's training."""
        if self.trial is not None:
            return f"{self.method}, training {self.trial + 1} of its search"
        failure = "" if self.failure == NO_FAILURE else f", {self.failure}"
        return f"{self.method}, seed {self.seed}{failure}"


def trials(compare: Compare, method: str) -> list[PlannedTraining]:
    """Return the comparison's trainings that tune a method."""
    count = compare.tuning.trainings if compare.tuning.trainings > 1 else 0
    return [PlannedTraining(method, number, compare.tuning.seed) for number in range(count)]


def trainings(compare: Compare) -> Iterator[PlannedTraining]:
    """Yield all trainings of a comparison, each after those that it needs."""
    for method in compare.methods:
        yield from trials(compare, method)
    for failure in (NO_FAILURE, *compare.failures):
        for method in compare.methods:
            for seed in compare.seeds:
                yield PlannedTraining(method, None, seed, failure)


def needed(compare: Compare, training: PlannedTraining) -> list[PlannedTraining]:
    """Return the trainings whose results one of a comparison follows from, in their order."""
    before = trials(compare, training.method)
    if training.trial is not None:
        return before[: training.trial]
    if training.failure == NO_FAILURE:
        return before
    return [*before, PlannedTraining(training.method, None, compare.seeds[0])]


class Decided(NamedTuple):
    """What the results before a comparison's training decided for it."""

    values: dict[str, float]  # of the keys that are searched
    round_seconds: float | None = None  # of a round without failures, where one is to be


def tried(
    compare: Compare, method: str, results: Sequence[Ended]
) -> dict[search.Point, float | None]:
    """Return what a method's search tried, by the trainings' results that begin with trials."""
    count = min(len(trials(compare, method)), len(results))
    losses = [result["loss"] for result in results[:count]]
    return search.searched(compare.methods[method].search, losses)


def decided(
    compare: Compare, training: PlannedTraining, results: Sequence[Ended]
) -> Decided | None:
    """Return what the results of the trainings that a training needs, in order, decide.

    None: the search is over before this training of it.
    """
    start = compare.methods[training.method].search
    before = tried(compare, training.method, results)
    values = search.found(start, before).values
    if training.trial is not None:
        if (point := search.next_point(start, before)) is None:
            return None
        values = search.values(start, point)
    plain = results[-1] if training.failure != NO_FAILURE else None
    seconds = plain["train_seconds"] / plain["rounds"] if plain and plain["loss"] else None
    return Decided({**values}, seconds)


def card_of_method(compare: Compare, name: str, values: Mapping[str, float]) -> Card:
    """Return a compared method's optimizer, with its settings and searched keys' values.

    Raises:
      LockstepError: They make no table of this optimizer.
    """
    method, place = compare.methods[name], dotted(("methods", name))
    card = CARDS[method.recipe]
    settings = copy.deepcopy(card.settings | method.settings)
    for key, value in values.items():
        if key != search.RATE:
            *tables, last = key.split(".")
            table = settings
            for part in tables:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    raise LockstepError(f"{place}.search.{key}: {part} is no table, expected one")
            table[last] = value
    validate(card.table, settings, place)  # before rounds are counted by it
    return card._replace(settings=settings)


def document(
    compare: Compare, base: runfile.Run, training: PlannedTraining, decision: Decided
) -> dict[str, Any]:
    """Return the tables of a compared training's run file, with the values that were decided.

    `base` is the run of `compare.base`.
    """
    method = compare.methods[training.method]
    base = changed(base, compare)
    card = card_of_method(compare, training.method, decision.values)
    tables, _ = tables_like(with_tokens(base, compare.tokens), card, None)
    rounds = tables["config"]["total_steps"]
    at_rate(tables, decision.values[search.RATE])
    tables["peers"] |= method.peers
    _seed(tables, training.seed)
    _fail(tables, base, compare.failures.get(training.failure, Failure()), rounds)
    if decision.round_seconds is not None:
        seconds = math.ceil(compare.timeout * decision.round_seconds)
        tables["config"]["max_round_train_time"] = seconds
        if method.grace is not None:
            (settings,) = tables["model"]["LLM"]["optimizer"].values()
            settings["grace_seconds"] = method.grace * decision.round_seconds
    has_curve = training.trial is None and training.failure == NO_FAILURE
    every = max(1, rounds // CURVE_MEASURES) if has_curve else rounds
    rows = "scoring" if training.trial is None else "tuning"
    tables["held_out"] |= {"every": every, "rows": rows, "stop_above": NO_STOP}
    tables["witness"]["snapshot_every"] = rounds  # nobody audits: fewer snapshots, less disk
    tables["evaluate"] |= {"every": 0}
    runfile.parse(tables, dotted(("methods", training.method)))
    return tables


def by_seed(base: runfile.Run, split_size: int) -> str:
    """Return in words what a compared seed draws in runs, on a split, or half, of so many rows."""
    llm = base.llm.model_dump(mode="json")
    shuffles = [x.get("shuffle") for x in llm["data_location"].values() if isinstance(x, dict)]
    drawn = ["weights"] if "Init" in llm["checkpoint"] else []
    drawn += ["order of the data"] if any(isinstance(x, dict) for x in shuffles) else []
    if split_size > base.held_out.sequences:
        return ", ".join([*drawn, "assignment", "held-out rows"])
    same = "; all are measured on the same rows, so intervals do not include the choice of text"
    return ", ".join([*drawn, "assignment"]) + same


def text(tables: dict[str, Any]) -> str:
    """Return a training's run file of tables: the same bytes for the same tables."""
    return tomlkit.dumps(tables, sort_keys=True)


def digest(*parts: object) -> str:
    """Return a name for what a comparison's training depends on."""
    content = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def changed(base: runfile.Run, compare: Compare) -> runfile.Run:
    """Return a compared training's run with the comparison's peers and model.

    Fresh weights are not pinned in it, since each seed draws its own.
    """
    if not base.held_out.sequences:
        raise LockstepError(f"{compare.base}: held_out.sequences is 0, expected at least 1")
    tables = base.model_dump(mode="json", exclude_none=True)
    tables["peers"] |= compare.peers
    if "Init" in tables["model"]["LLM"]["checkpoint"]:
        tables["pins"]["checkpoint"] = ""
    if "count" in compare.peers:
        tables["config"]["init_min_clients"] = tables["peers"]["count"]
    if compare.config:
        start = tables["model"]["LLM"]["checkpoint"]
        known = start["Init"]["config"] if "Init" in start else {}
        if unknown := compare.config.keys() - known.keys():
            raise LockstepError(
                f"config.{min(unknown)}: no key of the config of fresh weights in {compare.base}, "
                f"expected one of {', '.join(known) or 'none'}"
            )
        known |= compare.config
    return runfile.parse(tables, f"{compare.base}, with the comparison's peers and config")


def loaded(file: Path) -> tuple[Compare, runfile.Run]:
    """Return a comparison, and the run that its trainings are made of."""
    compare = load(file)
    return compare, runfile.load(Path(compare.base))


def plan_of(compare: Compare, base: runfile.Run) -> dict[str, dict[str, Any]]:
    """Return a comparison's list of trainings, by their names, each after those that it needs."""
    names: dict[PlannedTraining, str] = {}
    plan: dict[str, dict[str, Any]] = {}
    keys: TrainKeys = {}
    for job in trainings(compare):
        needs = [names[other] for other in needed(compare, job)]
        names[job] = name = name_of(compare, base, job, needs, keys)
        plan[name] = {**job._asdict(), "needs": needs}
    return plan


def checked_plan(compare: Compare, path: Path) -> dict[str, dict[str, Any]]:
    """Return the plan of a comparison, which has all of its trainings and nothing else."""
    plan, due = plan_file.planned(path), {}
    with expecting(path, plan_file.A_PLAN, KeyError, TypeError, AttributeError):
        names = {PlannedTraining.in_plan(entry): name for name, entry in plan.items()}
        for job in trainings(compare):
            needs = [names[other] for other in needed(compare, job)]
            due[names[job]] = {**job._asdict(), "needs": needs}
    if plan != due:
        raise LockstepError(f"{path}: has others, expected {plan_file.A_PLAN}")
    return plan


def name_of(
    compare: Compare, base: runfile.Run, job: PlannedTraining, needs: list[str], keys: TrainKeys
) -> str:
    """Return the name of a comparison's training, by all that its result depends on; adds a key."""
    method, shared = compare.methods[job.method], (*job[:1], job.trial is None, *job[2:])
    if shared not in keys:  # trainings of a search begin as one
        tables = document(compare, base, job, Decided(method.search))
        (keys[shared],) = keys_of(text(tables), "train")
    limits = (compare.timeout, method.grace) if job.failure != NO_FAILURE else ()
    order = list(method.search.items())  # as its steps
    return f"{job.method}-{job.seed}-{digest(keys[shared], needs, job.trial, order, *limits)}"


def tables_of(compare: Compare, base: runfile.Run, entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the run file of a comparison's training, decided by the results that it needs.

    None: the search is over before it.
    """
    training = PlannedTraining.in_plan(entry)
    before = [training_result.read(plan_file.result_path(need)) for need in entry["needs"]]
    found = decided(compare, training, before)
    return None if found is None else document(compare, base, training, found)


def keys_of(content: str, *stages: str) -> list[str]:
    """Return the stages' keys for a comparison's training whose run file is not written yet."""
    with tempfile.TemporaryDirectory() as folder:
        run_file = Path(folder, "run.toml")
        run_file.write_text(content, encoding="utf-8")
        keys = Keys(run_file)
        return [keys.key(stage) for stage in stages]


def _seed(tables: dict[str, Any], seed: int) -> None:
    """Set a training's seed: of the weights, of the data's order and of the assignment."""
    llm = tables["model"]["LLM"]
    tables["peers"]["seed"] = seed
    if "Init" in llm["checkpoint"]:
        llm["checkpoint"]["Init"]["seed"] = seed
    for location in llm["data_location"].values():
        shuffle = location.get("shuffle") if isinstance(location, dict) else None
        if isinstance(shuffle, dict):
            shuffle["Seeded"][0] = seed


def _fail(tables: dict[str, Any], base: runfile.Run, failure: Failure, rounds: int) -> None:
    count, speed = base.peers.count, base.links.tokens_per_second
    tables["faults"]["schedule"] = [
        {
            "kind": fault.kind,
            "peer": fault.peer,
            "rounds": [first, max(first, round(fault.end * rounds))],
            **({"size": fault.size} if fault.size is not None else {}),
        }
        for fault in failure.faults
        for first in [min(1 + round(fault.start * rounds), rounds)]
    ]
    if any(fault.kind in AWAY_FAULTS for fault in failure.faults):
        tables["config"]["witness_nodes"] = 0  # all peers
    if not failure.slower:
        return
    speeds = list(speed) if isinstance(speed, tuple) else [speed] * count
    for peer, factor in failure.slower.items():
        if int(peer) >= count:
            raise LockstepError(f"slower.{peer}: expected a peer from 0 to {count - 1}")
        speeds[int(peer)] /= factor
    tables["links"]["tokens_per_second"] = speeds
