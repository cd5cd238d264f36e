"""A new run of a user's own model: its class is asked for data, rows, batch and rate."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from parts.new import fresh
from parts.new.data_tables import HELD_OUT_PERCENT, SEEDED, NewData, data_named
from parts.new.fresh import FEWEST_ROUNDS, NewRun
from pipeline import runfile
from pipeline.joints import offered
from pipeline.preflight.model import StartingModel
from pipeline.runfile.like import CALLED, Choice
from pipeline.sources import dry_run
from pipeline.stage.artifacts import Paths

BATCH, PASSES = 32, 10  # rows of a peer's local step, and passes over the data, by default
MEASURED = 512  # held-out rows
MOST_WORDS = 2**32 - 1  # of a row


def new_run(answers: Mapping[str, Any], root: Path) -> tuple[NewRun, dict[str, Any], list[Choice]]:
    """Return a run of `--workload`, its tables, and why they are so.

    Raises:
      LockstepError: The class does not start, the data do not suffice, or an answer cannot be.
    """
    new, config = _unknown(answers), _config(answers)
    parts = offered("new_run")
    if not parts:
        raise LockstepError("--workload: expected none, since parts/workload is not here")
    said = parts[0].ask(_parsed(new, config))
    model = new.model._replace(
        params=said.params, groups=said.groups, config=new.model.config | said.model
    )
    new = new._replace(model=model, card=new.card.for_groups(said.groups))
    words, rows = said.words, said.rows
    if "Workload" not in new.data.table:
        words, rows = _surveyed(_parsed(new, config), root)
    elif not words:
        raise LockstepError(f"--data: expected some, since {answers['workload']} has no dataset")
    elif not said.held_out:
        new.data.table["Workload"]["held_out_percent"] = HELD_OUT_PERCENT
        rows -= int(rows * HELD_OUT_PERCENT / 100)
    new = _sized(new, answers, words, rows, said.suggested)
    return new, _document(new, config), _choices(new, answers, rows, said.suggested)


def _config(answers: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(answers["config"] or "{}")
    except json.JSONDecodeError as error:
        raise LockstepError(f"--config {answers['config']}: {error}, expected JSON") from error


def _unknown(answers: Mapping[str, Any]) -> NewRun:
    """Return a run of one round, with which the class is asked."""
    config, card = _config(answers), fresh.card_named(answers["optimizer"])
    source = config.get("model")  # as workloads/hf_causal_lm.py has it, with its tokenizer
    known = {
        "model_type": "workload",
        "num_hidden_layers": 0,
        "max_position_embeddings": MOST_WORDS,
        "vocab_size": config.get("vocab_size", 0),
        "workload": {},
    }
    said = f"workload {answers['workload']}"
    tokenizer = source if isinstance(source, str) else None
    model = StartingModel("Ephemeral", known, tokenizer, 1, ("model",), said)
    own = NewData({"Workload": {"shuffle": SEEDED}}, f"those that {answers['workload']} gives")
    data = data_named(answers["data"], model) if answers["data"] else own
    length = answers["length"] or 1
    batch = answers["batch"] or answers["peers"] * card.local_steps
    wanted = dict(answers) | {"length": length, "batch": batch}
    return NewRun(model, data, card, batch * length, answers["peers"], 0, wanted)


def _parsed(new: NewRun, config: dict[str, Any]) -> runfile.Run:
    return runfile.parse(_document(new, config), CALLED)


def _surveyed(run: runfile.Run, root: Path) -> tuple[int, int | None]:
    """Return the words of a row and how many rows there are, as a dry run of the download does.

    The words are 0 of data that are tokens, and the rows None where only reading tells.
    """
    seen = dry_run.look(run, Paths("download", Path(CALLED), root))
    exact = seen.amount.most if seen.amount.least == seen.amount.most else None
    return seen.survey.row_words or 0, exact


def _sized(
    new: NewRun, answers: Mapping[str, Any], words: int, rows: int | None, suggested: Any
) -> NewRun:
    """Return the run with the whole rounds that fit into its passes, or into --tokens."""
    length = words or answers["length"]
    if not length or bool(rows) == bool(answers["tokens"]):
        raise LockstepError(
            "--tokens: expected it for text, with --length, and for no data whose rows are known"
        )
    passes = (answers["passes"] or suggested.passes or PASSES) if rows else 1
    whole = passes * rows if rows else fresh.number(answers["tokens"]) // length
    together, batch = new.peers * new.card.local_steps, answers["batch"]
    if not batch:
        of_peer = suggested.batch or BATCH
        while of_peer > 1 and whole < FEWEST_ROUNDS * of_peer * together:
            of_peer //= 2
        batch = of_peer * together
    if whole < batch:
        raise LockstepError(
            f"--passes {passes}: {whole:,} rows, expected at least {batch:,}, one round of "
            f"{new.peers} peers with {new.card.local_steps} local steps"
        )
    wanted = {**answers, "length": length, "batch": batch, "passes": passes}
    wanted["learning_rate"] = answers["learning_rate"] or suggested.learning_rate
    return new._replace(tokens=whole // batch * batch * length, wanted=wanted)


def _document(new: NewRun, config: dict[str, Any]) -> dict[str, Any]:
    document, wanted = fresh.tables(new), new.wanted
    document["workload"] = {
        "factory": wanted["workload"],
        "config": config,
        "seed": new.seed or 0,
    }
    peers = {key: document["peers"][key] for key in ("count", "seed") if key in document["peers"]}
    document["peers"] = peers | {"micro_batch": new.rows, "passes": wanted["passes"] or 1}
    document["held_out"]["sequences"] = MEASURED
    document["evaluate"] = {"tasks": []}
    document["runtime"]["worker_python"] = wanted["worker_python"] or ""
    return document


def _choices(
    new: NewRun, answers: Mapping[str, Any], rows: int | None, suggested: Any
) -> list[Choice]:
    factory, passes = answers["workload"], new.wanted["passes"]
    why = dict(fresh.choices(new))
    why["model.LLM.max_seq_len"] = "words of 4 bytes of a row" if rows else "--length"
    why["peers.micro_batch"] = "a peer's local step at once"
    why["held_out.sequences"] = "rows of a measurement, or all that are held out"
    why["export.dtype"] = "as what peers exchange"
    if not answers["batch"]:
        of = f"as {factory} suggests" if suggested.batch else "not tuned"
        few = f"for at least {FEWEST_ROUNDS} rounds"
        why["config.global_batch_size_end"] = (
            f"{new.peers} peers x {new.rows} rows x {new.card.local_steps} local steps, {of}, {few}"
        )
    if rows:
        why["config.total_steps"] = f"rounds: {passes} x {rows:,} rows to train on"
        of = "--passes" if answers["passes"] else "not tuned"
        why["peers.passes"] = f"as {factory} suggests" if suggested.passes == passes else of
    if suggested.learning_rate and not answers["learning_rate"]:
        why["model.LLM.lr_schedule.Cosine.base_lr"] = f"as {factory} suggests"
    return [Choice(key, reason) for key, reason in why.items()]
