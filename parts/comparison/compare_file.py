"""params/compare.toml: the methods, seeds, searches and failures of a comparison."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from lockstep.methods import CARDS
from lockstep.tables.faults import KINDS, Fault
from lockstep.tables.table import (
    U8,
    AsTuple,
    Count,
    Distinct,
    Fraction,
    NotNegative,
    Positive,
    Table,
    text,
    wrong,
)
from lockstep.tables.validation import validate
from parts.comparison.search import RATE, limit
from pipeline.toml_file import read_toml

MethodName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,39}$")]
ChangedPeers = dict[str, JsonValue]
NO_FAILURE = "none"
if TYPE_CHECKING:
    RecipeName = KindName = str
    FaultyPeers = int | tuple[int, ...]
else:
    FaultyPeers = Fault.model_fields["peer"].annotation
    RecipeName, KindName = Literal[tuple(CARDS)], Literal[tuple(KINDS)]


class Method(Table):
    """An optimizer with its settings, and where its search begins."""

    recipe: RecipeName
    """Optimizer whose table the settings change, by the name of its card (lockstep/methods)."""
    settings: dict[str, Any] = {}
    """Keys of its table in a run file, with other values than the card's."""
    peers: ChangedPeers = {}
    """Keys of [peers] with other values than the comparison's, as `aggregation` or `bits`, but for
    `seed` and `count`."""
    label: Annotated[str, text(80)] | None = None
    """What tables and plots call it; by default its name."""
    grace: NotNegative | None = None
    """With a failure, `grace_seconds` as a multiple of what a round takes without one."""
    search: Annotated[dict[str, NotNegative], Field(min_length=1)]
    """What is tuned, one key after the other, and the value to begin with: `rate`, the base
    learning rate, and keys of the settings, as `outer_momentum` or `step_scale.layers`."""

    @model_validator(mode="after")
    def _can_be_compared(self) -> "Method":
        if RATE not in self.search:
            raise wrong("search", f"{RATE}, the base learning rate")
        if off := [key for key, start in self.search.items() if not 0.0 < start < limit(key)]:
            below = f"above 0 and below {limit(off[0]):g}".removesuffix(" and below inf")
            raise wrong(("search", off[0]), f"{below}; what is not tuned belongs in settings")
        if alike := self.peers.keys() & {"seed", "count"}:
            raise wrong(("peers", min(alike)), "no such key: it is the same for all methods")
        return self


class ComparedFault(Table):
    """A fault of a run, during a share of its rounds."""

    kind: KindName
    """Kind of the fault, as in [faults]."""
    peer: FaultyPeers
    """The faulty peer, or a list of them."""
    start: Fraction = 0.0
    """Share of the rounds before it."""
    end: Fraction = 1.0
    """Share of the rounds after which it is over."""
    size: Positive | None = None
    """Strength of the fault, as in [faults]."""

    @model_validator(mode="after")
    def _lasts(self) -> "ComparedFault":
        if self.start >= self.end:
            raise wrong("end", f"more than start ({self.start:g})")
        return self


class Failure(Table):
    """The faults in all runs of one column of the table."""

    faults: Annotated[tuple[ComparedFault, ...], AsTuple] = ()
    """Faults that peers commit."""
    slower: dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[float, Field(gt=1)]] = {}
    """How many times slower than [links] says a peer trains, by its number."""


class Tuning(Table):
    """The search that every method gets."""

    seed: U8
    """Seed of its trainings, which is not scored."""
    trainings: Count = 1
    """Trainings of each method at most; with 1 its values are stated, and nothing is trained."""


class Compare(Table):
    """A comparison."""

    base: str
    """Run file whose model, data, peers, links and schedule every run has."""
    peers: ChangedPeers = {}
    """Keys of [peers] with other values than the run file's, but for `seed`."""
    tokens: Count
    """Tokens of each run, over all peers."""
    seeds: Annotated[tuple[U8, ...], Field(min_length=1), Distinct, AsTuple]
    """Seeds that are scored, 0 to 255: of the initial weights, the order of the data and the
    assignment."""
    tuning: Tuning
    """The search that every method gets, on another seed and on other held-out rows."""
    config: dict[str, JsonValue] = {}
    """Keys of the model's config with other values than the run file's, where it has fresh
    weights."""
    timeout: Annotated[float, Field(gt=1)] = 2.0
    """With a failure, `max_round_train_time` as a multiple of what a round of the method takes
    without one, in whole seconds."""
    methods: Annotated[dict[MethodName, Method], Field(min_length=1)]
    """The methods, by name."""
    pairs: Annotated[tuple[Annotated[tuple[str, str], Distinct, AsTuple], ...], AsTuple] = ()
    """Pairs of methods whose difference is tested, named before anything is trained; by default
    each two."""
    failures: dict[MethodName, Failure] = {}
    """What goes wrong, by name, beside the runs in which nothing does."""

    @model_validator(mode="after")
    def _names_are_free(self) -> "Compare":
        if self.tuning.seed in self.seeds:
            raise wrong(("tuning", "seed"), "a seed that is not scored")
        if NO_FAILURE in self.failures:
            raise wrong(("failures", NO_FAILURE), "another name: this one stands for no failure")
        if unknown := {name for pair in self.pairs for name in pair} - self.methods.keys():
            raise wrong(("pairs",), f"names of methods: there is no {min(unknown)}")
        if len({frozenset(pair) for pair in self.pairs}) < len(self.pairs):
            raise wrong(("pairs",), "each pair once")
        if "seed" in self.peers:
            raise wrong(("peers", "seed"), "no such key: `seeds` has the seeds")
        return self


def load(path: Path) -> Compare:
    """Read a file of a comparison, such as params/compare.toml."""
    return validate(Compare, read_toml(path), str(path))
