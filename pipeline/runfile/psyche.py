"""Psyche's tables of a run file: `[config]`, in both its spellings, and `[model.LLM]`.

Names, types and rules are those of Psyche's `CoordinatorConfig` and `LLM`.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from lockstep.methods import AnyOptimizer
from lockstep.methods.card import OptimizerVariant
from lockstep.methods.schedule import AnySchedule
from lockstep.protocol.committee import MAX_WITNESSES
from lockstep.tables.peers import PeerCount
from lockstep.tables.table import NAME_BYTES, U8, U16, U32, U64, AsTuple, Table, wrong
from lockstep.tables.variant import one_of, variants_of
from pipeline.runfile.checkpoint import BUCKET, PREFIX, AnyCheckpoint, CheckpointGcs, CheckpointHub
from pipeline.runfile.data import Data
from pipeline.runfile.parts import TABLES

# Top-level keys of a coordinator's state file that hold a run's state, not its configuration.
STATE_KEYS = (
    "run_id",
    "run_state",
    "progress",
    "epoch_state",
    "run_state_start_unix_timestamp",
    "pending_pause",
)


# ---- [config] ----


class Coordinator(Table):
    """The keys that both spellings of `[config]` share; both answer for every setting."""

    warmup_time: U64
    """Time to load the params before the first round of an epoch, in seconds."""
    cooldown_time: Annotated[U64, Field(ge=1)]
    """Time between the last round of an epoch and the next epoch, in seconds."""
    max_round_train_time: Annotated[U64, Field(ge=1)]
    """Time limit for training in a round, in seconds; the round continues without slower peers."""
    round_witness_time: Annotated[U64, Field(ge=1)]
    """Time for the witnesses at the end of a round to attest what they received, in seconds."""
    min_clients: PeerCount
    """Number of peers below which an epoch ends early, 1 to 256."""
    verification_percent: Annotated[int, Field(ge=0, le=100)]
    """Percentage of peers that verify other peers' work instead of training, 0 to 100. It is 0 in
    every working Psyche run."""
    witness_nodes: Annotated[int, Field(ge=0, le=MAX_WITNESSES)]
    """Number of peers elected as witnesses each round, 0 to 32; 0 elects all, but at most 32."""
    total_steps: Annotated[U32, Field(ge=1)]
    """Number of rounds to train. (Psyche runs one fewer.)"""

    @model_validator(mode="after")
    def _witnesses_exist(self) -> "Coordinator":
        if self.witness_nodes > self.min_clients:
            raise wrong("witness_nodes", f"at most min_clients ({self.min_clients})")
        return self

    def batch_size(self, tokens: int) -> int:
        """Return `[config]`'s number of sequences in a round that begins after `tokens` tokens.

        round(start + (end - start) * tokens / warmup_tokens), half away from zero; then end.
        """
        start, end = self.global_batch_size_start, self.global_batch_size_end
        warmup = self.global_batch_size_warmup_tokens
        if tokens >= warmup:
            return end
        fraction, whole = math.modf(start + (end - start) * (tokens / warmup))
        return int(whole) + (fraction >= 0.5)

    def last_index(self, max_seq_len: int, first_step: int = 0, index: int = 0) -> int:
        """Return the data index after `[config]`'s last round; arguments as in `sizes`."""
        sizes = self.sizes(max_seq_len, first_step, index)
        return index + sum(size * rounds for size, rounds in sizes)

    def sizes(
        self, max_seq_len: int, first_step: int = 0, index: int = 0
    ) -> Iterator[tuple[int, int]]:
        """Yield each batch size of `[config]`, and the number of rounds for which the run has it.

        The run continues after `first_step` rounds, at data index `index`.
        """
        left = self.total_steps - first_step
        while left > 0:
            size = self.batch_size(index * max_seq_len)
            ends = range(index + size, index + left * size, size)  # of its rounds but the last
            rounds = 1 + bisect_right(ends, size, key=lambda i: self.batch_size(i * max_seq_len))
            index, left = index + rounds * size, left - rounds
            yield size, rounds


class CurrentConfig(Coordinator):
    """Psyche's current spelling: epochs in seconds, and a batch that may grow."""

    epoch_time: Annotated[U64, Field(ge=1)]
    """Length of an epoch from the start of its warm-up, in seconds."""
    init_min_clients: PeerCount
    """Number of waiting peers with which an epoch begins, 1 to 256; at least min_clients."""
    waiting_for_members_extra_time: Annotated[U8, Field(ge=1)]
    """Minimum wait for more peers before an epoch begins, in seconds, 1 to 255."""
    global_batch_size_start: Annotated[U16, Field(ge=1)]
    """Sequences per round, over all peers, at the start of the run."""
    global_batch_size_end: Annotated[U16, Field(ge=1)]
    """Sequences per round, over all peers, after the batch ramp."""
    global_batch_size_warmup_tokens: U64
    """Length of the batch ramp in tokens, over which the batch grows linearly from start to end; 0
    means no ramp, so that every batch has the size `end`."""

    # what the older spelling has: here epochs end by time
    rounds_per_epoch: ClassVar[None] = None
    checkpointers: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _times_fit(self) -> "CurrentConfig":
        for key in ("warmup_time", "max_round_train_time"):
            if getattr(self, key) >= self.epoch_time:
                raise wrong(key, f"less than epoch_time ({self.epoch_time})")
        if self.init_min_clients < self.min_clients:
            raise wrong("init_min_clients", f"at least min_clients ({self.min_clients})")
        if self.global_batch_size_end < self.global_batch_size_start:
            start = self.global_batch_size_start
            raise wrong("global_batch_size_end", f"at least global_batch_size_start ({start})")
        return self

    def cold_start_limit(self) -> tuple[int, str]:
        """Return the number of rounds that always fit into an epoch, and its formula."""
        rounds = (self.epoch_time - self.warmup_time) // self.max_round_train_time
        return rounds, "(epoch_time - warmup_time) / max_round_train_time"


DESTINATION = (
    rf"(?P<repo_id>(?a:\w[\w.-]*/\w[\w.-]*))|gs://(?P<bucket>{BUCKET})(/(?P<prefix>{PREFIX})?)?"
)
DESTINATION_FORM = (
    f"owner/name on the hub or gs://bucket/prefix, each name of at most {NAME_BYTES} bytes"
)


def destination(text: str) -> CheckpointHub | CheckpointGcs | None:
    """Return a destination of `lockstep push` as the checkpoint to load from it, or None."""
    form = re.fullmatch(DESTINATION, text)
    names = {key: name for key, name in form.groupdict().items() if name} if form else {}
    if form is None or any(len(name.encode()) > NAME_BYTES for name in names.values()):
        return None
    return CheckpointHub(**names) if "repo_id" in names else CheckpointGcs(**names)


def _destination(value: str) -> str:
    if destination(value) is None:
        raise wrong((), DESTINATION_FORM)
    return value


class OlderConfig(Coordinator):
    """Psyche's older spelling: epochs in rounds, and one batch size."""

    rounds_per_epoch: Annotated[U32, Field(ge=1)]
    """Number of rounds in an epoch."""
    global_batch_size: Annotated[U16, Field(ge=1)]
    """Sequences per round, over all peers."""
    checkpointers: Annotated[tuple[Annotated[str, AfterValidator(_destination)], ...], AsTuple]
    """Destinations of `lockstep push`: owner/name on the hub, or gs://bucket/prefix."""

    # what the current spelling has: here epochs end by rounds, and batches do not grow
    epoch_time: ClassVar[None] = None
    waiting_for_members_extra_time: ClassVar[int] = 10
    """Psyche's constant from before this was a setting, in seconds."""
    global_batch_size_warmup_tokens: ClassVar[int] = 0

    @property
    def init_min_clients(self) -> int:
        """`min_clients`: this spelling has one number for both."""
        return self.min_clients

    @property
    def global_batch_size_start(self) -> int:
        """`global_batch_size`: this spelling has one batch size for the whole run."""
        return self.global_batch_size

    global_batch_size_end = global_batch_size_start

    def cold_start_limit(self) -> tuple[int, str]:
        """Return the number of rounds in an epoch, and its key."""
        return self.rounds_per_epoch, "rounds_per_epoch"


def read_config(table: Any) -> Any:
    """Return the `[config]` table in the spelling that its keys belong to."""
    if isinstance(table, Coordinator):  # made in Python
        return table
    if not isinstance(table, dict):
        raise wrong((), "a table")
    older, current = OlderConfig.model_fields, CurrentConfig.model_fields
    found_older = [key for key in older if key in table and key not in current]
    found_current = [key for key in current if key in table and key not in older]
    if found_older and found_current:
        raise wrong(
            found_older[0],
            f"one spelling: {', '.join(found_current)} belong to the current one, "
            f"{', '.join(found_older)} to the older one",
        )
    return (OlderConfig if found_older else CurrentConfig).model_validate(table)


# ---- [model.LLM] ----

list(TABLES)  # have variants of their own, in tables of other variants too
for _variant in variants_of(OptimizerVariant):
    _variant.model_rebuild(force=True)


class LLM(Table):
    """A language model: architecture, data, schedule and optimizer."""

    architecture: Literal["HfLlama", "HfDeepseek", "HfAuto", "Torchtitan"]
    """Family of the model."""
    data_type: Literal["Pretraining", "Finetuning"]
    """Kind of the data: plain text, or packed conversations with labels."""
    max_seq_len: Annotated[U32, Field(ge=1)]
    """Length of a sequence in tokens; replaces the model's max_position_embeddings."""
    cold_start_warmup_steps: U32 = 0
    """Length of the learning-rate warm-up, from 0, of a run that extends an earlier one
    (checkpoint.Run), in steps; must fit into an epoch. Required with the current spelling of
    [config]."""
    checkpoint: AnyCheckpoint
    """Initial weights."""
    data_location: one_of(Data)
    """Source of the tokens."""
    lr_schedule: AnySchedule
    """Learning rate by step."""
    optimizer: AnyOptimizer
    """How gradients become updates, and what peers send each other."""

    @property
    def counted(self) -> tuple[str, int]:
        """What an amount of the run's data is counted in, and how many words of 4 bytes one has."""
        return ("tokens", 1) if self.data_location.holds_tokens else ("rows", self.max_seq_len)

    @property
    def inner_steps(self) -> int:
        """Local steps of `[model.LLM]` that a peer takes in a round."""
        return self.optimizer.steps_of_a_round


class ModelTables(Table):
    """Psyche's only kind of model."""

    LLM: Annotated[LLM, Field(description="A language model.")]
