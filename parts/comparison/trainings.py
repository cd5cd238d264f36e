"""The trainings of a comparison: which there are, and the run file of each.

A method is tuned with the first seed: a training at each of its rates. Its other seeds, and what
goes wrong, are trained at the rate that was best, which is known when those are done. So a training
is named for what it depends on, and its file exists when it is done.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import tomlkit

from lockstep.errors import LockstepError
from lockstep.methods import CARDS
from lockstep.methods.card import Card
from lockstep.tables.explain import dotted
from parts.comparison.compare_file import (
    NO_FAILURE,
    Compare,
    ComparedFault,
    Failure,
    Method,
)
from pipeline import runfile
from pipeline.runfile.like import at_rate, tables_like, with_tokens

MEASURES = 10  # of the held-out loss, in a run
BEST = "best"
AWAY = ("crash", "join")  # kinds of faults whose peer is away, and attests nothing


class PlannedTraining(NamedTuple):
    """A training of a comparison."""

    method: str
    rate: float | None  # its base learning rate; None for the best of its method's grid
    seed: int
    failure: str = NO_FAILURE  # name of what goes wrong, or `none`

    @classmethod
    def in_plan(cls, entry: Mapping[str, Any]) -> "PlannedTraining":
        """Return the training of a plan's entry, which has its fields."""
        return cls(*(entry[name] for name in cls._fields))

    @property
    def label(self) -> str:
        """The method's label for people."""
        rate = BEST if self.rate is None else f"{self.rate:g}"
        failure = "" if self.failure == NO_FAILURE else f" {self.failure}"
        return f"{self.method}{failure} rate {rate} seed {self.seed}"


def grid(compare: Compare, method: str) -> list[PlannedTraining]:
    """Return the trainings that tune a method."""
    return [
        PlannedTraining(method, rate, compare.seeds[0]) for rate in compare.methods[method].rates
    ]


def trainings(compare: Compare) -> Iterator[PlannedTraining]:
    """Yield all trainings of a comparison, those that tune a method before those that need it."""
    for method in compare.methods:
        yield from grid(compare, method)
    for method in compare.methods:
        for seed in compare.seeds[1:]:
            yield PlannedTraining(method, None, seed)
        for failure in compare.failures:
            for seed in compare.seeds:
                yield PlannedTraining(method, None, seed, failure)


def card_of_method(method: Method) -> Card:
    """Return a method's optimizer, with its settings."""
    card = CARDS[method.recipe]
    return card._replace(settings=card.settings | method.settings)


def document(compare: Compare, base: runfile.Run, training: PlannedTraining) -> dict[str, Any]:
    """Return the tables of the run file of a training of a known rate.

    `base` is the run of `compare.base`.
    """
    method = compare.methods[training.method]
    base = _with_peers(base, compare.peers)
    tables, _ = tables_like(with_tokens(base, compare.tokens), card_of_method(method), None)
    rounds = tables["config"]["total_steps"]
    assert training.rate is not None, "its method is tuned first"
    at_rate(tables, training.rate)
    tables["peers"]["aggregation"] = method.aggregation
    if method.liars is not None:
        tables["peers"]["liars"] = method.liars
    _seed(tables, training.seed)
    _fail(tables, base, compare.failures.get(training.failure, Failure()), rounds)
    tables["held_out"]["every"] = max(1, rounds // MEASURES)
    tables["witness"]["snapshot_every"] = rounds  # nobody audits: fewer snapshots, less disk
    tables["evaluate"] |= {"every": 0}
    runfile.parse(tables, dotted(("methods", training.method)))
    return tables


def text(tables: dict[str, Any]) -> str:
    """Return the run file of tables: the same bytes for the same tables."""
    return tomlkit.dumps(tables, sort_keys=True)


def digest(*parts: object) -> str:
    """Return a name for what a training depends on."""
    content = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _with_peers(base: runfile.Run, count: int | None) -> runfile.Run:
    """Return the run with so many peers, all of which it waits for."""
    if count is None:
        return base
    tables = base.model_dump(mode="json", exclude_none=True)
    tables["peers"]["count"] = tables["config"]["init_min_clients"] = count
    return runfile.parse(tables, dotted(("peers",)))


def _seed(tables: dict[str, Any], seed: int) -> None:
    """Draw other weights, another order of the data and another assignment."""
    llm = tables["model"]["LLM"]
    tables["peers"]["seed"] = seed
    if "Init" in llm["checkpoint"]:
        llm["checkpoint"]["Init"]["seed"] = seed
    for location in llm["data_location"].values():
        shuffle = location.get("shuffle") if isinstance(location, dict) else None
        if isinstance(shuffle, dict):
            shuffle["Seeded"][0] = seed


def _rounds_of(fault: ComparedFault, rounds: int) -> list[int]:
    """The first and the last round of a fault."""
    first = min(1 + round(fault.start * rounds), rounds)
    return [first, max(first, round(fault.end * rounds))]


def _fail(tables: dict[str, Any], base: runfile.Run, failure: Failure, rounds: int) -> None:
    count, speed = base.peers.count, base.links.tokens_per_second
    tables["faults"]["schedule"] = [
        {
            "kind": fault.kind,
            "peer": fault.peer,
            "rounds": _rounds_of(fault, rounds),
            **({"size": fault.size} if fault.size is not None else {}),
        }
        for fault in failure.faults
    ]
    if any(fault.kind in AWAY for fault in failure.faults):
        tables["config"]["witness_nodes"] = 0  # all peers
    if not failure.slower:
        return
    speeds = list(speed) if isinstance(speed, tuple) else [speed] * count
    for peer, factor in failure.slower.items():
        if int(peer) >= count:
            raise LockstepError(f"slower.{peer}: expected a peer from 0 to {count - 1}")
        speeds[int(peer)] /= factor
    tables["links"]["tokens_per_second"] = speeds
