"""A new run of a user's own model: its class is asked for data, rows, batch and rate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import loads
from parts.new import run_tables
from parts.new.data_tables import HELD_OUT_PERCENT, SEEDED, NewData, data_named
from parts.new.run_tables import FEWEST_ROUNDS, NewRun
from pipeline import runfile
from pipeline.joints import Joint
from pipeline.preflight.model import StartingModel
from pipeline.runfile.derived_run import CALLED, Reasons, short
from pipeline.sources import dry_run
from pipeline.stage.artifacts import Paths

BATCH_ROWS, PASSES = 32, 10  # rows of a peer's local step, and passes over the data, by default
MEASURED_ROWS = 512  # held-out rows
MOST_WORDS = 2**32 - 1  # of a row


class Suggests(Protocol):
    """What suits a workload in a new run; None where it has no say."""

    learning_rate: float | None  # the highest one, of AdamW
    batch: int | None  # rows of a peer's local step
    passes: int | None  # over the data
    inner: str | None  # `workload.inner`


class FactsOfWorkload(Protocol):
    """What a workload says of itself for a new run."""

    model: dict[str, Any]  # as a transcript's header has it
    params: int  # that travel
    groups: tuple[str, ...]  # top-level names of them
    suggested: Suggests
    words: int  # of a row of its own data; 0 without data
    rows: int  # of its own data, to train on
    held_out: int  # rows of its own data that are held out
    inner: tuple[str, ...]  # what `workload.inner` can be


class OffersNewRun(Protocol):
    """Workloads, asked for a new run."""

    def ask(self, run: runfile.Run) -> FactsOfWorkload:
        """Start a run's worker once, and return what it says."""


RUNS_OF_WORKLOADS = Joint[OffersNewRun]("new_run")


def new_run(answers: Mapping[str, Any], root: Path) -> tuple[NewRun, dict[str, Any], Reasons]:
    """Return a new run of `--workload`, its tables, and why they are so.

    Raises:
      LockstepError: The class does not start, the data do not suffice, or an answer cannot be.
    """
    said = answers["config"] or "{}"
    with expecting(f"--config {brief(said)}", "a table", ValueError, RecursionError):
        answers = dict(answers, config=loads(said))
    if not isinstance(answers["config"], dict):
        raise LockstepError(f"--config {brief(said)}, expected a table")
    new = _one_round(answers)
    run = runfile.parse(_document(new), CALLED)
    (part,) = RUNS_OF_WORKLOADS  # whose tables the run has
    facts = part.ask(run)
    config = new.model.config | facts.model
    model = new.model._replace(params=facts.params, groups=facts.groups, config=config)
    new = new._replace(model=model, card=new.card.for_groups(facts.groups))
    new = _with_steps_of(new, answers, facts)
    words, rows = facts.words, facts.rows
    if "Workload" not in new.data.table:
        preview = dry_run.look(run, Paths("download", Path(CALLED), root))
        words, rows = preview.survey.row_words, preview.amount.most
        if rows != preview.amount.least:  # an estimate, of text
            rows = None
    elif not words:
        raise LockstepError(f"--data: expected some, since {answers['workload']} has no dataset")
    elif not facts.held_out:
        new.data.table["Workload"]["held_out_percent"] = HELD_OUT_PERCENT
        rows -= int(rows * HELD_OUT_PERCENT / 100)
    if words and answers["length"]:
        raise LockstepError(f"--length {answers['length']}: expected none, a row has {words} words")
    new = _sized(new, answers, words or answers["length"], rows, facts.suggested)
    return new, _document(new), _reasons(new, answers, rows, facts)


def _one_round(answers: Mapping[str, Any]) -> NewRun:
    """Return a run of one round, with which the workload's class is queried."""
    config, card = answers["config"], run_tables.card_named(answers["optimizer"])
    source = config.get("model")  # as workloads/hf_causal_lm.py has it, with its tokenizer
    vocabulary = (source if isinstance(source, dict) else config).get("vocab_size", 0)
    if type(vocabulary) is not int:
        raise LockstepError(f"--config: vocab_size is {vocabulary!r:.40}, expected a whole number")
    model_config = {
        "model_type": "workload",
        "num_hidden_layers": 0,
        "max_position_embeddings": MOST_WORDS,
        "vocab_size": vocabulary,
        "workload": {},
    }
    tokenizer = source if isinstance(source, str) else None
    label = f"workload {answers['workload']}"
    model = StartingModel("Ephemeral", model_config, tokenizer, 1, ("model",), label)
    data = NewData({"Workload": {"shuffle": SEEDED}}, f"those that {answers['workload']} gives")
    if answers["data"]:
        data = data_named(answers["data"], model)
    batch = answers["batch"] or answers["peers"] * card.local_steps
    options = answers | {"length": answers["length"] or 1, "batch": batch, "inner": None}
    return NewRun(model, data, card, batch * options["length"], answers["peers"], 0, options)


def _with_steps_of(new: NewRun, answers: Mapping[str, Any], facts: FactsOfWorkload) -> NewRun:
    """Return the run with local steps by the optimizer that --inner, or the class, names."""
    inner = answers["inner"] or facts.suggested.inner or facts.inner[0]
    if inner not in facts.inner:
        can = " or ".join(facts.inner)
        raise LockstepError(
            f"--inner {inner}: expected {can}, which {answers['workload']} supports"
        )
    card = new.card
    if inner == "worker":
        if "inner" not in card.settings:
            raise LockstepError(
                f"--optimizer {answers['optimizer']}: expected one with local steps, such as "
                f"diloco, since {answers['workload']} takes the local steps (inner = worker)"
            )
        card = card._replace(settings=card.settings | {"inner": "Workload"})
    return new._replace(card=card, options=new.options | {"inner": inner})


def _sized(
    new: NewRun,
    answers: Mapping[str, Any],
    length: int | None,
    rows: int | None,
    suggested: Suggests,
) -> NewRun:
    """Return the workload's run with as many whole rounds as fit its passes, or --tokens."""
    if not length or bool(rows) == bool(answers["tokens"]):
        raise LockstepError(
            "--tokens, --length: expected both for data whose number of rows is not known, such as "
            "text, and no --tokens for other data"
        )
    passes = answers["passes"] or ((suggested.passes or PASSES) if rows else 1)
    total = passes * rows if rows else run_tables.number(answers["tokens"]) // length
    together, batch = new.peers * new.card.local_steps, answers["batch"]
    if not batch:
        of_peer = suggested.batch or BATCH_ROWS
        while of_peer > 1 and total < FEWEST_ROUNDS * of_peer * together:
            of_peer //= 2
        batch = of_peer * together
    if total < batch:
        raise LockstepError(
            f"--passes {passes}: {total:,} rows, expected at least {batch:,}, one round of "
            f"{new.peers} peers with {new.card.local_steps} local steps"
        )
    inner = new.options["inner"]
    options = answers | {"length": length, "batch": batch, "passes": passes, "inner": inner}
    if suggested.learning_rate and not answers["learning_rate"]:
        over_adamw = new.card.rates[0].rate / run_tables.card_named("adamw").rates[0].rate
        options["learning_rate"] = short(suggested.learning_rate * over_adamw)
    return new._replace(tokens=total // batch * batch * length, options=options)


def _document(new: NewRun) -> dict[str, Any]:
    document, options, seed = run_tables.tables(new), new.options, new.seed or 0
    peers = {"count": new.peers, "seed": seed, "micro_batch": new.rows, "bits": "machine"}
    document["peers"] = peers | {"passes": options["passes"] or 1}
    table = {"factory": options["workload"], "config": options["config"], "seed": seed}
    if inner := options.get("inner"):
        table["inner"] = inner
    document["workload"] = table
    document["held_out"]["sequences"] = MEASURED_ROWS
    document["evaluate"] = {"tasks": []}
    document["runtime"]["worker_python"] = options["worker_python"] or ""
    return document


def _reasons(
    new: NewRun, answers: Mapping[str, Any], rows: int | None, facts: FactsOfWorkload
) -> Reasons:
    suits, passes = f"as {answers['workload']} suggests", new.options["passes"]
    suggested, why = facts.suggested, run_tables.reasons(new)
    why["workload.inner"] = _why_inner(new, answers, facts)
    why["model.LLM.max_seq_len"] = "words of 4 bytes of a row" if rows else "--length"
    why["peers.micro_batch"] = "a peer's local step at once"
    why["peers.bits"] = (
        "only a machine like the trainer's can audit it: a workload computes in a process of its "
        "own, without rules"
    )
    why["held_out.sequences"] = "rows of a measurement, or all that are held out"
    why["export.dtype"] = "as params travel"
    why["config.total_steps"] = f"whole rounds of {answers['tokens']} tokens"
    if not answers["batch"]:
        why["config.global_batch_size_end"] = (
            f"{new.peers} peers x {new.rows} rows x {new.card.local_steps} local steps, "
            f"{suits if suggested.batch else 'not tuned'}, for at least {FEWEST_ROUNDS} rounds"
        )
    if answers["passes"]:
        why["peers.passes"] = "--passes"
    elif rows:
        why["peers.passes"] = suits if suggested.passes else "not tuned"
    if rows:
        why["config.total_steps"] = f"rounds: {passes} x {rows:,} rows to train on"
    if suggested.learning_rate and not answers["learning_rate"]:
        why["model.LLM.lr_schedule.Cosine.base_lr"] = (
            f"{suits} for AdamW; another optimizer has its stated rate over AdamW's times that"
        )
    return why


def _why_inner(new: NewRun, answers: Mapping[str, Any], facts: FactsOfWorkload) -> str:
    if answers["inner"]:
        return "--inner"
    if facts.suggested.inner:
        return f"as {answers['workload']} suggests"
    if facts.inner == ("worker",):
        return f"{answers['workload']} takes steps of its own, and gives no gradients"
    if facts.inner == ("gradient",):
        return f"{answers['workload']} gives gradients, and takes no steps of its own"
    return f"{new.card.tag} takes the steps; with --inner worker {answers['workload']} does"
