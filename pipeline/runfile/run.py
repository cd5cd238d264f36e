"""A whole run file: Psyche's tables and Lockstep's, and what they must agree on.

Every variant of Psyche's enums loads; a stage without an engine for one refuses it by
`variant_name`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from lockstep.errors import LockstepError
from lockstep.methods.card import Surroundings
from lockstep.methods.misfits import check_faults, check_needs
from lockstep.protocol.committee import trainers_of
from lockstep.tables.links import Links
from lockstep.tables.table import Table, missing, wrong
from lockstep.tables.validation import validate
from lockstep.transcript.windows import Snapshots
from pipeline.runfile.data import Download
from pipeline.runfile.parts import TABLES, check_parts, with_keys, with_tables
from pipeline.runfile.psyche import (
    LLM,
    STATE_KEYS,
    CurrentConfig,
    ModelTables,
    OlderConfig,
    read_config,
)
from pipeline.runfile.tables import (
    CoreRuntime,
    Evaluate,
    Export,
    Faults,
    HeldOut,
    Peers,
    Pins,
    Witness,
)
from pipeline.toml_file import read_run_file


class Runtime(with_keys(CoreRuntime)):
    """Settings that cannot change a result; no stage runs again when they change."""


class CoreRun(Table):
    """The tables of a run that need no part."""

    config: Annotated[
        CurrentConfig | OlderConfig,
        BeforeValidator(read_config, json_schema_input_type=CurrentConfig | OlderConfig),
    ]
    """Psyche's coordinator: rounds, epochs, batch, witnesses."""
    model: ModelTables
    """Psyche's model: architecture, data, schedule and optimizer."""
    download: Download = Download()
    """How much of the data is downloaded, and when."""
    peers: Peers = Field(
        default_factory=lambda fields: Peers(count=fields["config"].init_min_clients)
    )
    """The peers that train, and how they compute; by default, config.init_min_clients peers."""
    links: Links = Links()
    """The simulated network and speed of the peers."""
    faults: Faults = Faults()
    """Faults that peers commit on purpose, to test the audit."""
    witness: Witness = Witness()
    """How much of the run is audited, and which findings refuse the export."""
    held_out: HeldOut = HeldOut()
    """Loss on sequences that no peer trains on, measured during training."""
    pins: Pins = Pins()
    """Hashes of inputs from outside the repository."""
    export: Export = Export()
    """The exported Hugging Face folder."""
    evaluate: Evaluate = Evaluate()
    """The tasks for the exported model, and its text sample."""
    runtime: Runtime = Runtime()
    """Settings that cannot change a result; no stage runs again when they change."""

    @property
    def llm(self) -> LLM:
        """The table [model.LLM]."""
        return self.model.LLM

    @property
    def trainers(self) -> int:
        """The number of the run's peers that train in a round if all take part."""
        return trainers_of(self.peers.count, self.config.verification_percent)

    @property
    def rows_of_a_step(self) -> int | None:
        """Sequences of the run's local step, where slower peers take fewer; else they vary."""
        optimizer = self.llm.optimizer
        if not optimizer.paced:
            return None
        steps = self.peers.count * optimizer.steps_of_a_round
        return self.config.global_batch_size_end // steps

    def snapshots(self, start: int = 0) -> Snapshots:
        """Return the snapshots of the run; it starts after step `start`."""
        every, keep_every = self.witness.snapshot_every, self.witness.keep_every
        return Snapshots(start, self.config.total_steps, every, keep_every)

    @model_validator(mode="after")
    def _cold_start_fits(self) -> "CoreRun":
        key = ("model", "LLM", "cold_start_warmup_steps")
        most, formula = self.config.cold_start_limit()
        if self.llm.cold_start_warmup_steps > most:
            raise wrong(key, f"at most {formula} = {most}")
        stated = "cold_start_warmup_steps" in self.llm.model_fields_set
        if not stated and isinstance(self.config, CurrentConfig):
            raise missing(*key)
        return self

    @model_validator(mode="after")
    def _peers_fit(self) -> "CoreRun":
        count = self.peers.count
        if count < self.config.init_min_clients:
            least = self.config.init_min_clients
            raise wrong(("peers", "count"), f"at least config.init_min_clients ({least})")
        self.links.check(count)
        return self

    @model_validator(mode="after")
    def _local_steps_fit(self) -> "CoreRun":
        steps, trainers = self.llm.inner_steps, self.trainers
        if steps == 1:
            return self
        for size, _ in self.config.sizes(self.llm.max_seq_len):
            if size % (trainers * steps):
                key = ("model", "LLM", "optimizer", self.llm.optimizer.tag(), "inner_steps")
                same = steps == self.llm.optimizer.inner_steps
                part = "inner_steps" if same else f"its {steps} steps of a round"
                whom = f"{trainers} training peers"
                raise wrong(key, f"{part} x {whom} to divide the {size} sequences of a round")
        return self

    @model_validator(mode="after")
    def _method_has_what_it_needs(self) -> "CoreRun":
        peers, percent = self.peers, self.config.verification_percent
        rule, liars = peers.aggregation, peers.liars
        run = Surroundings(percent, peers.count, rule, liars, peers.layout, self.links)
        check_needs(self.llm.optimizer, run)
        least = (self.rows_of_a_step or 0) * peers.count
        if self.config.global_batch_size_start < least:
            text = f"at least {least}, a local step of each peer with {self.llm.optimizer.tag()}"
            raise wrong(("config", "global_batch_size_start"), text)
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "CoreRun":
        for part in TABLES:
            part.rules(self)
        return self

    @model_validator(mode="after")
    def _limit_fits(self) -> "CoreRun":
        limit = self.download.limit
        if limit is None or limit.steps is None:
            return self
        batch, length = self.config.global_batch_size_end, self.llm.max_seq_len
        if limit.batch != batch:
            raise wrong(("download", "limit", "batch"), f"{batch}, the largest batch of [config]")
        if limit.max_seq_len != length:
            text = f"{length}, the value of model.LLM.max_seq_len"
            raise wrong(("download", "limit", "max_seq_len"), text)
        if limit.steps < self.config.total_steps:
            steps = self.config.total_steps
            raise wrong(("download", "limit", "steps"), f"at least config.total_steps ({steps})")
        return self

    @model_validator(mode="after")
    def _faults_fit(self) -> "CoreRun":
        check_faults(self.faults.schedule, self.peers, self.config, self.llm.optimizer)
        return self

    @model_validator(mode="after")
    def _epochs_have_destinations(self) -> "CoreRun":
        if self.export.every_epoch and not self.config.checkpointers:
            text = "false, or a destination in config.checkpointers, as the older spelling has them"
            raise wrong(("export", "every_epoch"), text)
        if self.export.every_epoch and self.links.clock == "store":
            raise wrong(("export", "every_epoch"), 'false with links.clock = "store"')
        return self

    @model_validator(mode="after")
    def _verifiers_fit(self) -> "CoreRun":
        key, percent = ("config", "verification_percent"), self.config.verification_percent
        if percent and self.peers.layout != "each":
            text = "since a verifier runs the trainer's own program"
            raise wrong(key, f"0 with peers.layout = {self.peers.layout}, {text}")
        least = self.config.min_clients
        if not trainers_of(least, percent):
            raise wrong(key, f"less than 100, so that at least one of min_clients ({least}) trains")
        return self

    @model_validator(mode="after")
    def _one_process_fits(self) -> "CoreRun":
        if self.runtime.in_one_process and self.links.clock == "wall":
            text = "simulated, since peers of one process take turns: runtime.carrier is in_process"
            raise wrong(("links", "clock"), text)
        if self.runtime.in_one_process and self.peers.processes > 1:
            raise wrong(("peers", "processes"), "1 with runtime.carrier = in_process")
        return self

    @model_validator(mode="after")
    def _chosen_windows_exist(self) -> "CoreRun":
        # a run that extends another has fewer windows: the audit ignores numbers beyond those
        windows = self.snapshots().window_count
        for index, (window, peer) in enumerate(self.witness.chosen):
            if window >= windows or peer >= self.peers.count:
                text = f"a window below {windows} and a peer below {self.peers.count}"
                raise wrong(("witness", "replay", index), text)
        return self


class Run(with_tables(CoreRun)):
    """A whole run of Lockstep."""


def load(path: Path) -> Run:
    """Read and validate a run file."""
    document = read_run_file(path)
    for key in STATE_KEYS:
        if key in document:
            raise LockstepError(
                f"{path}: {key}: a key of Psyche's state files, expected a run file; "
                f"`lockstep import {path}` makes one"
            )
    return parse(document, str(path))


def parse(document: dict, name: str) -> Run:
    """Validate a parsed run file, which errors call `name`."""
    check_parts(document, name)
    return validate(Run, document, name)
