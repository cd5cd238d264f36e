"""Checks before a run: inputs by their listings, packages, disk and memory.

Nothing is computed, and of what lies elsewhere only listings and small files are fetched. What a
stage has made already is not looked at again, so a finished run needs no network.

To add a package that a key needs, add a row to NEEDS, here or in a part's preflight.py;
`pipeline/extras.py` knows what installs a module.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from lockstep.errors import brief
from lockstep.machine import memory
from lockstep.machine.progress import size
from pipeline import convert, extras, runfile
from pipeline.joints import Joint
from pipeline.language_model import cudnn
from pipeline.monitor.sinks import SINKS
from pipeline.net.fsspec_files import MODULES
from pipeline.preflight import plan
from pipeline.preflight.model import ATTEMPTS, ModelFiles, described, files_of_run, look
from pipeline.preflight.row import CheckRow, Inspection, Mark, Need, looked
from pipeline.runfile import data
from pipeline.runfile.strangers import keys_of
from pipeline.sources import dry_run
from pipeline.stage import artifacts, descriptors, devices
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import OUT
from pipeline.subject import subject_of
from pipeline.tokens.tokenizer_files import OLDER, PIECES, TOKENIZER
from pipeline.weights import bucket, earlier_run, hf

PACKED_TEXT = (".jsonl.zst", ".json.zst")  # text that only pyarrow unpacks
MOST_RATE, RATE_KEYS = 1.0, ("base_lr", "outer_learning_rate")  # stated ones are far below it
LEAST_PERCENT = 0.5  # below it somebody may have meant a share
NAME_WIDTH = 80  # characters of a name in the table


class OffersRows(Protocol):
    """More rows of `lockstep check`'s table."""

    LOOKS: Sequence[Inspection]
    NEEDS: Sequence[Need]


PARTS_ROWS = Joint[OffersRows]("preflight")


class Preflight:
    """The looks at a run: `rows` takes them all. `root` is the folder of `data/`."""

    def __init__(self, run: runfile.Run, run_file: Path, root: Path):
        attempts = min(run.runtime.attempts, ATTEMPTS)
        runtime = run.runtime.model_copy(update={"attempts": attempts})
        self.run = run.model_copy(update={"runtime": runtime})
        self.run_file, self.root = run_file, root
        self.todo = {stage for stage, why in artifacts.rerun_reasons(run_file, root).items() if why}
        self._config = None  # the model's, where it is known before stage convert
        self._files: ModelFiles | None = None
        self._fetched = 0  # bytes of data elsewhere

    def rows(self) -> Iterator[CheckRow]:
        """Run the checks of each stage without a result, and yield their rows."""
        yield CheckRow(Mark.FINE, "run file", f"{self.run_file} is valid, with every table")
        own = [
            ("model", "convert", self._model),
            ("tokenizer", "download", self._tokenizer),
            ("data", "download", self._data),
            ("values", "train", odd_values),
            ("audit", "train", never_audited),
            ("open files", "train", self._open_files),
            ("room", "train", self._room),
            ("GPU", "train", self._gpu),
        ]
        looks = [Inspection(name, stage, partial(take, self.run)) for name, stage, take in own]
        shards = None if "download" in self.todo else self.root / OUT["download"]
        for part in PARTS_ROWS:
            for name, stage, take in part.LOOKS:
                looks.append(Inspection(name, stage, partial(take, self.run, shards)))
        for name, stage, take in looks:
            if stage is None or stage in self.todo:
                yield from looked(name, take)
        yield from package_rows(self.run, self.todo)
        if not self.todo:
            yield CheckRow(Mark.FINE, "results", "every stage has its result")

    # ---- Inputs ----

    def _model(self, run: runfile.Run) -> Iterator[CheckRow]:
        convert.check_readable(run)
        config = None
        match checkpoint := run.llm.checkpoint:
            case runfile.CheckpointInit():
                summary = f"fresh weights of seed {checkpoint.seed}"
                config = convert.fresh_config(run, checkpoint)
            case runfile.CheckpointHub() | runfile.CheckpointP2P():
                self._files = files_of_run(checkpoint, self.root)
                config, summary = self._files.config(), f"weights of {checkpoint.repo_id}"
                hf.check_architecture(run.llm.architecture, config, self._files.where)
                self._files.check_weights()
                yield from _older_tokenizer(self._files)
            case runfile.CheckpointGcs() | runfile.CheckpointP2PGcs():
                listing = bucket.find(checkpoint, self._paths("convert").store, run.runtime)
                summary = f"{len(listing.files)} files in gs://{checkpoint.bucket}"
            case runfile.CheckpointRun(key=key):
                earlier_run.find(key, self._paths("convert"))
                summary = f"the final state of run {key}"
            case _:  # whoever makes it has rows of its own
                return
        if config is not None:
            model = described({}, config, None, summary, "model.LLM.checkpoint")
            self._config = config  # only now: later looks read no model that this one refuses
            summary += f", {model.params:,} params"
        yield CheckRow(Mark.FINE, "model", summary)

    def _tokenizer(self, run: runfile.Run) -> Iterator[CheckRow]:
        location = run.llm.data_location
        tokenizer = getattr(location, "tokenizer", None)
        if tokenizer is None:
            return
        key, revision = f"{runfile.variant_name(location)}.tokenizer", location.tokenizer_revision
        expected = "a folder with a tokenizer.json, or owner/name on the hub"
        files = self._files
        if files is None or (files.repo_id, files.commit) != (tokenizer, revision):
            files = look(tokenizer, revision, self.root, key, expected)
        files.check_tokenizer(key)
        yield from _older_tokenizer(files)
        yield CheckRow(Mark.FINE, "tokenizer", tokenizer)

    def _data(self, run: runfile.Run) -> Iterator[CheckRow]:
        preview = dry_run.look(run, self._paths("download"))
        survey, amount = preview.survey, preview.amount
        if survey.first is not None and not run.download.stream:
            self._fetched = sum(file.size for file in survey.files)
        if any(file.name.lower().endswith(PACKED_TEXT) for file in survey.files):
            yield from _packages(survey.read, "pyarrow")
        for warning in survey.warnings:
            yield CheckRow(Mark.WARNING, "data", warning)
        mark = Mark.WARNING if amount.may_be_too_little else Mark.FINE
        mark = Mark.FAILS if amount.is_too_little else mark
        what = "sequence" if run.llm.data_location.holds_tokens else "row"
        there = "" if amount.most is None else f"{amount.most:,} {what}s to train on, "
        if amount.least != amount.most:
            there = f"{amount.least:,} to {amount.most:,} {what}s to train on, an estimate, "
        needed = f"the run takes {amount.need:,}: {dry_run.epochs(amount)}"
        summary = f"{there}{needed}"
        if mark is not Mark.FINE:
            summary += f"; {amount.remedy}"
        yield CheckRow(mark, "data", f"{brief(survey.read, NAME_WIDTH)}: {summary}")
        batch = max(rows for rows, _ in run.config.sizes(run.llm.max_seq_len))
        if mark is Mark.FINE and amount.most is not None and batch > amount.most:
            text = (
                f"a round takes {batch:,} {what}s, expected at most the {amount.most:,} there are"
            )
            yield CheckRow(Mark.WARNING, "batch", f"{text}; it has some of them twice")

    # ---- Room ----

    def _open_files(self, run: runfile.Run) -> Iterator[CheckRow]:
        descriptors.check()
        yield from ()

    def _room(self, run: runfile.Run) -> Iterator[CheckRow]:
        """Yield rows on disk and memory, and on whether messages are in time by [links]."""
        if self._config is not None:
            usage = plan.plan_of(run, self._config)
        elif "convert" not in self.todo:
            usage = plan.plan(run, self.root)
        else:
            yield CheckRow(Mark.UNKNOWN, "disk", "known once `lockstep convert` has made the model")
            return
        yield self._disk(usage)
        limit, memory_gb = memory.total(), run.runtime.memory_gb
        if memory_gb is not None:
            limit = memory_gb * 1e9
        if run.peers.attention != "cudnn" and usage.state > limit:
            text = (
                f"params and the optimizer's state of all peers are {size(usage.state)}, expected "
                f"less than the {size(limit)} of memory here; fewer peers need less"
            )
            yield CheckRow(Mark.WARNING, "memory", text)
        if usage.late:
            yield CheckRow(Mark.WARNING, "messages", usage.late)

    def _disk(self, usage: plan.Footprint) -> CheckRow:
        blocks = sum(path.stat().st_blocks for path in self._paths("train").scratch.rglob("*"))
        training = usage.checkpoints + usage.spooled
        wanted = max(0, usage.trained + training + self._fetched - 512 * blocks)
        folder = next(path for path in (self.root, *self.root.absolute().parents) if path.is_dir())
        free = shutil.disk_usage(folder).free
        text = (
            f"{size(wanted)} while it trains, of {size(free)} that are free; {usage.kept_states} "
            f"whole snapshots of at most {size(usage.state)} each, and {size(training)} that go "
            "when it ends"
        )
        if wanted > free:
            less = "a larger [witness] snapshot_every or keep_every takes less"
            return CheckRow(Mark.FAILS, "disk", f"{text}; {less}")
        return CheckRow(Mark.FINE, "disk", text)

    def _gpu(self, run: runfile.Run) -> Iterator[CheckRow]:
        if run.peers.attention == "cudnn":
            cudnn.check_device(run)
            yield CheckRow(Mark.FINE, "GPU", "there is one, for cuDNN's attention")

    def _paths(self, stage: str) -> Paths:
        return Paths(stage, self.run_file, self.root)


def _older_tokenizer(files: ModelFiles) -> Iterator[CheckRow]:
    """Yield rows on packages that convert a tokenizer in an older form."""
    if TOKENIZER not in files.names and not files.names.isdisjoint(OLDER):
        yield from _packages(files.where, "transformers")
        if PIECES in files.names:
            yield from _packages(files.where, "sentencepiece")


def _packages(where: str, module: str) -> Iterator[CheckRow]:
    if not extras.is_installed(module):
        yield CheckRow(Mark.FAILS, "packages", str(extras.lacking(where, module)))


# ---- Values that a run file may have, and hardly anybody means ----


def odd_values(run: runfile.Run) -> Iterator[CheckRow]:
    """Yield a warning for each rate or percentage that looks like a mistake."""
    for key, value, _ in keys_of(run, ""):
        if not isinstance(value, float):
            continue
        if key.endswith(RATE_KEYS) and not 0 < value <= MOST_RATE:
            why = "nothing would be learned" if value == 0 else "training seldom survives it"
            text = f"{key} is {value:g}, expected above 0 and at most {MOST_RATE:g}: {why}"
            yield CheckRow(Mark.WARNING, "rate", text)
        if key.endswith("_percent") and 0 < value < LEAST_PERCENT:
            text = f"{key} is {value:g}, of a hundred: one in {100 / value:,.0f}"
            yield CheckRow(Mark.WARNING, "percent", f"{text}; for that share write {100 * value:g}")


def never_audited(run: runfile.Run) -> Iterator[CheckRow]:
    """Yield a warning where nobody can ever compare a step of the run, and so publish it."""
    if why := devices.never_comparable(run, repeats=subject_of(run).repeats(run)):
        yield CheckRow(Mark.WARNING, "audit", f"no window can be compared: {why}")


# ---- Packages that a run needs besides those always installed, by key of the run file ----


def _data_packages(run: runfile.Run) -> Iterator[str]:
    location = run.llm.data_location
    if isinstance(location, data.DataPreprocessed):
        yield "pyarrow"
    sources = getattr(location, "sources", (location,))
    for source in sources:
        address = getattr(source, "url", None) or getattr(source, "source", None) or ""
        if module := MODULES.get(address.partition("://")[0]):
            yield module


def _push_packages(run: runfile.Run) -> Iterator[str]:
    if run.export.every_epoch and any(to.startswith("gs://") for to in run.config.checkpointers):
        yield "google.auth"


NEEDS = (
    Need("download", "model.LLM.data_location", _data_packages),
    Need("train", "[runtime] sinks", lambda run: [SINKS[s].module for s in run.runtime.sinks]),
    Need("train", "[config] checkpointers", _push_packages),
    Need(
        "witness",
        "[witness] beacon",
        lambda run: ["py_ecc"] * run.witness.beacon.startswith("drand"),
    ),
)


def package_rows(run: runfile.Run, todo: Collection[str]) -> Iterator[CheckRow]:
    """Yield a row for each package that a stage of `todo` lacks, or one where it has them all."""
    needs = [*NEEDS, *(need for part in PARTS_ROWS for need in part.NEEDS)]
    needed = {module: need for need in needs if need.stage in todo for module in need.modules(run)}
    for module, need in needed.items():
        yield from _packages(need.key, module)
    installed = [module for module in needed if extras.is_installed(module)]
    if installed:
        yield CheckRow(Mark.FINE, "packages", ", ".join(installed))
