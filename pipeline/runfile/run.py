"""A whole run file: Psyche's tables and Lockstep's, and what they must agree on.

Every variant of Psyche's enums loads; a stage without an engine for one refuses it by
`variant_name`.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from lockstep.errors import LockstepError
from lockstep.methods.card import Surroundings
from lockstep.methods.dense import OptimizerOfCode
from lockstep.methods.diloco import Fragmented
from lockstep.methods.misfits import check_faults, check_needs
from lockstep.tables.explain import validate
from lockstep.tables.links import Links
from lockstep.tables.table import Table, missing, wrong
from lockstep.transcript.windows import Snapshots
from pipeline.runfile.checkpoint import CheckpointEphemeral, CheckpointRun
from pipeline.runfile.data import Download
from pipeline.runfile.psyche import (
    LLM,
    STATE_KEYS,
    CurrentConfig,
    ModelTables,
    OlderConfig,
    read_config,
)
from pipeline.runfile.tables import (
    Evaluate,
    Export,
    Faults,
    HeldOut,
    Peers,
    Pins,
    Runtime,
    Volunteers,
    Witness,
    Workload,
)
from pipeline.toml_file import read_run_file

# The keys of [peers] that say how models of Lockstep compute, and no workload.
OF_OUR_MODELS = (
    "bits",
    "layout",
    "fsdp",
    "processes",
    "precision",
    "attention",
    "remat",
    "balance_speed",
    "scan_layers",
)


class Run(Table):
    """A whole run of Lockstep."""

    config: Annotated[
        CurrentConfig | OlderConfig,
        BeforeValidator(read_config, json_schema_input_type=CurrentConfig | OlderConfig),
    ]
    """Psyche's coordinator: rounds, epochs, batch, witnesses."""
    model: ModelTables
    """Psyche's model: architecture, data, schedule and optimizer."""
    download: Download = Download()
    """How much of the data is downloaded, and when."""
    workload: Workload = Workload()
    """A model of your own, trained by code in workloads/, in a process of its own."""
    peers: Peers = Field(
        default_factory=lambda fields: Peers(count=fields["config"].init_min_clients)
    )
    """The peers that train, and how they compute; by default, config.init_min_clients peers."""
    links: Links = Links()
    """The simulated network and speed of the peers."""
    volunteers: Volunteers = Volunteers()
    """Peers of strangers, which share an object store."""
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
    def rows_of_a_step(self) -> int | None:
        """Sequences of each local step, where slower peers take fewer steps; else they vary."""
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
    def _cold_start_fits(self) -> "Run":
        key = ("model", "LLM", "cold_start_warmup_steps")
        most, formula = self.config.cold_start_limit()
        if self.llm.cold_start_warmup_steps > most:
            raise wrong(key, f"at most {formula} = {most}")
        stated = "cold_start_warmup_steps" in self.llm.model_fields_set
        if not stated and isinstance(self.config, CurrentConfig):
            raise missing(*key)
        return self

    @model_validator(mode="after")
    def _peers_fit(self) -> "Run":
        count = self.peers.count
        if count < self.config.init_min_clients:
            least = self.config.init_min_clients
            raise wrong(("peers", "count"), f"at least config.init_min_clients ({least})")
        self.links.check(count)
        return self

    @model_validator(mode="after")
    def _local_steps_fit(self) -> "Run":
        steps, peers = self.llm.inner_steps, self.peers.count
        trainers = peers - peers * self.config.verification_percent // 100
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
    def _method_has_what_it_needs(self) -> "Run":
        peers, links, percent = self.peers, self.links, self.config.verification_percent
        run = Surroundings(
            peers=peers.count,
            trainers=peers.count - peers.count * percent // 100,
            aggregation=peers.aggregation,
            liars=peers.liars,
            layout=peers.layout,
            topology=links.topology,
            clock=links.clock,
            verification_percent=percent,
        )
        check_needs(self.llm.optimizer, run)
        least = (self.rows_of_a_step or 0) * peers.count
        if self.config.global_batch_size_start < least:
            text = f"at least {least}, a local step of each peer with {self.llm.optimizer.tag()}"
            raise wrong(("config", "global_batch_size_start"), text)
        return self

    @model_validator(mode="after")
    def _workload_fits(self) -> "Run":
        _check_workload(self.workload, self.llm, self.peers)
        if self.workload.factory:
            self._asks_no_more_of_a_workload_than_it_has()
        return self

    def _asks_no_more_of_a_workload_than_it_has(self) -> None:
        why = "with workload.factory"
        if self.evaluate.every:
            raise wrong(("evaluate", "every"), f"0 {why}: tasks need a model of models/")
        if set(self.evaluate.tasks) - set(Evaluate.model_fields["tasks"].default):
            text = f'["next_line"] or [] {why}: tasks need a model of models/'
            raise wrong(("evaluate", "tasks"), text)
        if self.export.every_epoch:
            text = f"false {why}: what is pushed between rounds is a Hugging Face folder"
            raise wrong(("export", "every_epoch"), text)

    @model_validator(mode="after")
    def _limit_fits(self) -> "Run":
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
    def _faults_fit(self) -> "Run":
        check_faults(self.faults.schedule, self.peers, self.config, self.llm.optimizer)
        for index, fault in enumerate(self.faults.schedule):
            if fault.kind == "wrong_precision" and self.workload.factory:
                text = "another kind with workload.factory, since a workload sets its own precision"
                raise wrong(("faults", "schedule", index, "kind"), text)
        return self

    @model_validator(mode="after")
    def _epochs_have_destinations(self) -> "Run":
        if self.export.every_epoch and not self.config.checkpointers:
            text = "false, or a destination in config.checkpointers, as the older spelling has them"
            raise wrong(("export", "every_epoch"), text)
        if self.export.every_epoch and self.links.clock == "store":
            raise wrong(("export", "every_epoch"), 'false with links.clock = "store"')
        return self

    @model_validator(mode="after")
    def _verifiers_fit(self) -> "Run":
        key, percent = ("config", "verification_percent"), self.config.verification_percent
        if percent and self.peers.layout != "each":
            text = "since a verifier runs the trainer's own program"
            raise wrong(key, f"0 with peers.layout = {self.peers.layout}, {text}")
        least = self.config.min_clients
        if least - least * percent // 100 < 1:
            raise wrong(key, f"less than 100, so that at least one of min_clients ({least}) trains")
        return self

    @model_validator(mode="after")
    def _carrier_fits(self) -> "Run":
        carrier, layout, count = self.runtime.carrier, self.peers.layout, self.peers.count
        if carrier == "in_process" and self.links.clock == "wall":
            text = "simulated with runtime.carrier = in_process: peers of one process take turns"
            raise wrong(("links", "clock"), text)
        if carrier != "in_process" and layout != "each":
            text = f"in_process with peers.layout = {layout}, one program for all peers"
            raise wrong(("runtime", "carrier"), text)
        if carrier != "processes" and self.peers.processes > 1:
            raise wrong(("peers", "processes"), f"1 with runtime.carrier = {carrier}")
        if max(self.runtime.by_hand, default=0) >= count:
            raise wrong(("runtime", "by_hand"), f"numbers less than peers.count ({count})")
        return self

    @model_validator(mode="after")
    def _store_fits(self) -> "Run":
        if self.links.clock != "store":
            if self.runtime.store:
                raise wrong(("runtime", "store"), f"none with links.clock = {self.links.clock}")
            return self
        config, peers = self.config, self.peers
        faults = [fault for fault in self.faults.schedule if not fault.changes_only_message]
        for table, key, value, expected in (
            ("config", "verification_percent", config.verification_percent, 0),
            ("config", "witness_nodes", config.witness_nodes, 0),
            ("peers", "layout", peers.layout, "each"),
            ("peers", "processes", peers.processes, 1),
            ("runtime", "carrier", self.runtime.carrier, "in_process"),
            ("faults", "schedule", faults, []),
        ):
            if value != expected:
                besides = " besides lies in messages" if table == "faults" else ""
                raise wrong((table, key), f'{expected}{besides} with links.clock = "store"')
        return self

    @model_validator(mode="after")
    def _chosen_windows_exist(self) -> "Run":
        # a run that extends another has fewer windows: the audit ignores numbers beyond those
        windows = self.snapshots().window_count
        for index, (window, peer) in enumerate(self.witness.chosen):
            if window >= windows or peer >= self.peers.count:
                text = f"a window below {windows} and a peer below {self.peers.count}"
                raise wrong(("witness", "replay", index), text)
        return self


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
    return validate(Run, document, name)


def _check_workload(workload: Workload, llm: LLM, peers: Peers) -> None:
    """Check that a workload fits the tables of the model that it replaces."""
    where = ("model", "LLM")
    inner = getattr(llm.optimizer, "inner", None)
    optimizer = (*where, "optimizer")
    if isinstance(llm.optimizer, OptimizerOfCode):
        raise wrong(optimizer, "an optimizer with local steps, with Workload as its inner one")
    its_own = isinstance(inner, OptimizerOfCode)
    if its_own != (workload.inner != "gradient"):
        text = "Workload" if not its_own else "an optimizer of Lockstep"
        text += f' with workload.inner = "{workload.inner}"'
        raise wrong((*optimizer, llm.optimizer.tag(), *(["inner"] if inner else [])), text)
    if its_own and isinstance(llm.optimizer, Fragmented):
        text = "another optimizer with inner = Workload: fragments are adopted between local steps"
        raise wrong(optimizer, text)
    if not workload.factory:
        return
    if llm.architecture != "HfAuto":
        raise wrong((*where, "architecture"), "HfAuto with workload.factory, which makes the model")
    if not isinstance(llm.checkpoint, CheckpointEphemeral | CheckpointRun):
        text = "Ephemeral with workload.factory, which makes the params, or Run"
        raise wrong((*where, "checkpoint"), text)
    for name in OF_OUR_MODELS:
        if getattr(peers, name) != Peers.model_fields[name].default:
            text = f"{Peers.model_fields[name].default!r} with workload.factory"
            raise wrong(("peers", name), text)
