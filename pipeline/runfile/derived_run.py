"""A run like another, with another optimizer: the same tokens, and what the optimizer forces."""

from bisect import bisect_left
from typing import Any

from lockstep.errors import LockstepError
from lockstep.methods import CARDS
from lockstep.methods.card import Card
from pipeline.runfile.run import Run, parse
from pipeline.toml_file import value_at

Reasons = dict[str, str]
"""Dotted keys of a run file -> why they have their values, the most important first."""
CALLED = "lockstep new"  # what errors of the loader call a file that is not written yet
MOST_BATCH = 2**16 - 1  # sequences of a round: Psyche's number has 16 bits
IN_ROUNDS = (  # keys that count rounds, but for those of the learning-rate schedule
    "config.rounds_per_epoch",
    "witness.snapshot_every",
    "held_out.every",
    "evaluate.every",
    "runtime.checkpoint_every",
)
SCHEDULE_IN_ROUNDS = (
    "warmup_steps",
    "total_steps",
    "stable_steps",
    "cosine_decay_steps",
    "linear_decay_steps",
)
RATES = ("base_lr", "warmup_init_lr", "final_lr", "cosine_decay_final_lr", "linear_decay_final_lr")


def short(rate: float) -> float:
    """Return a derived run's learning rate without the digits that binary fractions add."""
    return float(f"{rate:.6g}")


def counted(number: int, thing: str) -> str:
    """Return a derived run's number of things in words: 1 sequence, 2 sequences."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def check_batch(rows: int, flag: str) -> None:
    """Check that a derived run's batch of a round is a number that a run file can have."""
    if rows > MOST_BATCH:
        raise LockstepError(
            f"{flag}: a round of {rows:,} sequences, expected at most {MOST_BATCH:,}; fewer peers "
            "or another optimizer mean fewer"
        )


def with_tokens(base: Run, tokens: int) -> Run:
    """Return a derived run on another number of tokens, with what counts rounds scaled."""
    document, before = base.model_dump(mode="json", exclude_none=True), base.config.total_steps
    config = document["config"]
    batches = {key: config[key] for key in _batches(config)}
    config["total_steps"], _ = _nearest(base, batches, tokens // base.llm.max_seq_len)
    _in_rounds(document, config["total_steps"] / before)
    _schedule(document, config["total_steps"] / before)
    return parse(document, CALLED)


def at_rate(document: dict[str, Any], rate: float) -> None:
    """Set the base learning rate of a derived run's tables in place, others in proportion."""
    ((_, schedule),) = document["model"]["LLM"]["lr_schedule"].items()
    if not schedule["base_lr"]:
        raise LockstepError(
            "model.LLM.lr_schedule: base_lr is 0, expected more: other rates are set in proportion"
        )
    ratio = rate / schedule["base_lr"]
    for name in RATES:
        if name in schedule:
            schedule[name] = short(schedule[name] * ratio)


def tables_like(base: Run, card: Card, params: int | None) -> tuple[dict[str, Any], Reasons]:
    """Return the tables of a derived run on the same tokens with another optimizer; and changes.

    Args:
      base: The run that it is like.
      card: Its optimizer.
      params: Number of the model's params; None where only stage convert can know it.
    """
    document = base.model_dump(mode="json", exclude_none=True)
    reasons = _rounds(document, base, card) | _optimizer(document, base, card, params)
    before = base.model_dump(mode="json", exclude_none=True)
    reasons = {key: why for key, why in reasons.items() if _is_new(key, document, before)}
    limit = document["download"].get("limit", {})
    if "steps" in limit:
        config = document["config"]
        limit |= {"steps": config["total_steps"], "batch": config[_batches(config)[-1]]}
        reasons["download.limit"] = "the same tokens, in rounds of these"
        if document["pins"]["data"]:
            document["pins"]["data"] = ""
            reasons["pins.data"] = "empty, since the limit of the data is another"
    return document, reasons


def _is_new(key: str, document: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether a derived run's key deserves a line: it changed, or says what stays."""
    try:
        return key == "config.total_steps" or value_at(document, key) != value_at(before, key)
    except KeyError:  # the base has no such table
        return True


# ---- Rounds ----


def _batches(config: dict[str, Any]) -> list[str]:
    """Return the keys of a derived run's batch, in either spelling; the largest batch last."""
    spelled = ("global_batch_size", "global_batch_size_start", "global_batch_size_end")
    return [key for key in spelled if key in config]


def _rounds(document: dict[str, Any], base: Run, card: Card) -> Reasons:
    """Set a derived run's batch of a round, and the number of rounds for the base's tokens."""
    reasons = {}
    config, steps, before = document["config"], card.local_steps, base.config.total_steps
    together = base.trainers if steps > 1 else 1  # local steps have equal batches on all peers
    for key in _batches(config):
        rows = config[key] // base.llm.optimizer.steps_of_a_round
        config[key] = max(1, rows // together) * together * steps
        check_batch(config[key], f"--optimizer: {steps} local steps")
        local = f" x {steps} local steps" if steps > 1 else ""
        reasons[f"config.{key}"] = f"{counted(config[key] // steps, 'sequence')}{local}"
    target = base.config.last_index(base.llm.max_seq_len)
    rounds, tokens = _nearest(base, {key: config[key] for key in _batches(config)}, target)
    config["total_steps"] = rounds
    target *= base.llm.max_seq_len
    reasons["config.total_steps"] = f"{tokens:,} tokens, where {before:,} rounds had {target:,}"
    _in_rounds(document, rounds / before)
    return reasons | {"witness.snapshot_every": "as often by tokens, as all that counts rounds"}


def _in_rounds(document: dict[str, Any], share: float) -> None:
    """Scale every key of a derived run that counts rounds, except the schedule's."""
    for key in IN_ROUNDS:
        table, name = key.split(".")
        if document[table].get(name):
            document[table][name] = max(1, round(document[table][name] * share))


def _nearest(base: Run, batches: dict[str, int], target: int) -> tuple[int, int]:
    """Return a derived run's rounds that are nearest to a target of sequences, and their tokens."""
    length = base.llm.max_seq_len

    def sequences(rounds: int) -> int:
        changed = {**batches, "total_steps": rounds}
        return base.config.model_copy(update=changed).last_index(length)

    if target < sequences(1):
        raise LockstepError(
            f"--optimizer: a round is {sequences(1):,} sequences, expected at most the {target:,} "
            "of the whole run"
        )
    after = bisect_left(range(target + 2), target, lo=1, key=sequences)
    rounds = min((max(1, after - 1), after), key=lambda n: abs(sequences(n) - target))
    return rounds, sequences(rounds) * length


# ---- Optimizer and schedule ----


def _optimizer(document: dict[str, Any], base: Run, card: Card, params: int | None) -> Reasons:
    """Set a derived run's optimizer, the schedule over its new rounds, and its rates."""
    llm, before = document["model"]["LLM"], base.llm.optimizer.tag()
    llm["optimizer"] = {card.tag: card.settings}
    reasons = {f"model.LLM.optimizer.{card.tag}": f"in place of {before}; of {card.file}"}
    if document["peers"]["overlap"] and not card.table.overlaps:
        document["peers"]["overlap"] = 0
        reasons["peers.overlap"] = f"{card.tag} does not overlap"
    ((kind, schedule),) = llm["lr_schedule"].items()
    _schedule(document, document["config"]["total_steps"] / base.config.total_steps)
    key = f"model.LLM.lr_schedule.{kind}"
    reasons[f"{key}.warmup_steps"] = "as long by tokens, as the rest of the schedule"
    scale = getattr(base.llm.optimizer, "step_scale", {})  # with another one a rate says nothing
    base_card = next((c for c in CARDS.values() if (c.tag, c.step_scale) == (before, scale)), None)
    if (card.tag == before and base_card) or not schedule["base_lr"]:
        return reasons
    stated, whose = card.rate_for(params), f"by {card.file}"
    rate = stated.rate
    if base_card:
        rate = short(schedule["base_lr"] * rate / base_card.rate_for(params).rate)
        whose = f"by {stated.file} over that of {before}, times the base's"
    at_rate(document, rate)
    reasons[f"{key}.base_lr"] = (
        f"that stated for {stated.params / 1e6:,.4g} M params {whose}, not tuned: try half and "
        "twice; the other rates in proportion"
    )
    return reasons


def _schedule(document: dict[str, Any], share: float) -> None:
    """Scale the rounds of a derived run's learning-rate schedule."""
    ((_, schedule),) = document["model"]["LLM"]["lr_schedule"].items()
    for key in SCHEDULE_IN_ROUNDS:
        if key in schedule:
            schedule[key] = round(schedule[key] * share)
    if "total_steps" in schedule:
        schedule["total_steps"] = max(schedule["total_steps"], schedule["warmup_steps"] + 1)
