"""What optimizers learn, and how fast text is written and scored."""

import argparse
import json
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import jax
import numpy as np

from benchmarks import generate, sizes
from benchmarks.accelerator.extent import Extent, attempt
from benchmarks.measuring import in_turns
from benchmarks.simulated import Lab
from lockstep.machine.progress import Progress
from lockstep.programs.placement import device_groups
from lockstep.protocol.driver import RunProgress
from lockstep.swarm.peers import SimulatedPeers, make_peers
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from parts.tasks import next_line, next_line_task, task_model
from pipeline import runfile, sources
from pipeline.language_model import held_out
from pipeline.runfile.data import DataText
from pipeline.sources.provider import TOKENIZER, FetchOptions
from pipeline.start import set_up
from pipeline.tokens.shards import write_shards
from pipeline.weights import exported

TEXT = "text.jsonl"  # in the folder of work
OPTIMIZERS = ("distro", "adamw", "diloco")
MODULES = ("jax", "flax", "numpy", "optax")  # whose source is learned beside that of Python itself
SPENT = 0.85  # of a share of time: compiling and snapshots come on top
SKIPPED = {"test", "tests", "site-packages", "dist-packages"}
FAST = {"upload_mbps": 1e6, "download_mbps": 1e6, "tokens_per_second": 1e7}  # nobody is late


def learning(extent: Extent, work: Path) -> Iterator[dict]:
    """Some rounds of each optimizer on the same text, with held-out losses."""
    end = perf_counter() + extent.seconds
    shards = text(extent, work)
    manifest = json.loads((shards / "shards.json").read_text())
    nbytes = (work / TEXT).stat().st_size
    yield {"text_sha256": manifest["source"]["sha256"], "text_bytes": nbytes}
    for place, name in enumerate(OPTIMIZERS):
        share = SPENT * (end - perf_counter()) / (len(OPTIMIZERS) - place)
        case = partial(_learn, extent, name, shards, work, perf_counter() + share)
        yield attempt({"optimizer": name}, case)


def _learn(extent: Extent, name: str, shards: Path, work: Path, end: float) -> dict:
    run = _run(extent, name)
    hf_config = run.llm.checkpoint.config
    lab = Lab(run, hf_config)
    lab.data = set_up.rows(run, hf_config, shards)
    peers = make_peers(lab.programs, run.peers.layout, lab.begin.state, lab.devices)
    losses = HeldOutLosses(run, peers, held_out.read(run, shards).rows_NW, end)
    with TemporaryDirectory(dir=work) as folder, suppress(OutOfTimeError):
        lab.train(run, Path(folder), peers, [losses])
    return {
        "size": extent.run,
        "peers": run.peers.count,
        "precision": run.peers.precision,
        "attention": run.peers.attention,
        "base_lr": run.llm.lr_schedule.base_lr,
        "local_steps": run.llm.optimizer.steps_of_a_round,
        "rounds": len(losses.seconds),
        "rounds_asked_for": run.config.total_steps,
        "bytes_up_per_round": round(sum(losses.bytes) / len(losses.bytes)),
        "held_out": losses.found,
        "milliseconds_per_round": round(1000 * losses.per_round, 2),
        "tokens_per_second": round(losses.tokens / losses.per_round),
    }


def _run(extent: Extent, name: str) -> runfile.Run:
    """As many rounds for each optimizer, of as many tokens for each local step."""
    document = sizes.document_of(extent.run, name, extent.learning)
    document["config"] |= {"epoch_time": 10**6}
    document["links"] |= FAST
    attention = extent.attention("bfloat16")
    document["peers"] |= {
        "precision": "bfloat16",
        "attention": attention,
        "scan_layers": attention == "cudnn",  # which needs it
    }
    return sizes.load(document)


class OutOfTimeError(Exception):
    """A training has had its time, with rounds left."""


class HeldOutLosses(Observer):
    """The held-out loss before the first round and after every `[held_out] every`.

    Ends a training with OutOfTimeError after the first round that is over later than `end`.

    found: rows (round, tokens, loss). bytes: of a peer's message, by round. per_round: median
      seconds of a round and its record.
    """

    def __init__(self, run: runfile.Run, peers: SimulatedPeers, rows_NW: np.ndarray, end: float):
        self.run, self.peers, self.rows_NW = run, peers, rows_NW
        self.tokens = run.config.global_batch_size_end * run.llm.max_seq_len
        self.found = [self._measured(0)]
        self.seconds: list[float] = []
        self.bytes: list[int] = []
        self._began, self._end = 0.0, end

    def begins(self, step: int, progress: RunProgress) -> None:
        """Note when a round begins."""
        self._began = perf_counter()

    def took(self, entry: Entry) -> Entry:
        """Note the loss after a round if it is due, and the time that it takes."""
        step, last = entry.round.step, self.run.config.total_steps
        self.bytes.append(entry.evidence.messages[0].bytes)
        jax.block_until_ready(list(self.peers.params_on.values()))
        ended = perf_counter()
        if step % self.run.held_out.every == 0 or step == last or ended > self._end:
            self.found.append(self._measured(step))
        self._began += perf_counter() - ended
        return entry

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Note how long the round took, its record included."""
        self.seconds.append(perf_counter() - self._began)
        if self.found[-1][0] == entry.round.step and perf_counter() > self._end:
            raise OutOfTimeError

    @property
    def per_round(self) -> float:
        return median(self.seconds)

    def _measured(self, step: int) -> tuple[int, int, float]:
        measure, size = self.peers.measure, self.run.peers.micro_batch
        loss = held_out.mean_loss(measure, self.rows_NW, size)
        return step, step * self.tokens, round(loss.mean, 4)


def text(extent: Extent, work: Path) -> Path:
    """Shards of source code that is in every environment, and a tokenizer trained on it."""
    folder = work / "shards"
    if folder.is_dir():
        return folder
    vocabulary, aside = sizes.SIZES[extent.run].vocabulary, work / "shards.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    path = work / TEXT
    with path.open("w", encoding="utf-8") as file:
        left = extent.megabytes * 1e6
        for source in _python_files():
            document = source.read_text(encoding="utf-8", errors="replace")
            if (left := left - len(document)) < 0:
                break
            file.write(json.dumps({"text": document}) + "\n")
    shuffle = sizes.document(sizes.SIZES[extent.run])["model"]["LLM"]["data_location"]["Corpus"]
    location = DataText(**shuffle | {"source": str(path), "vocab_size": vocabulary})
    progress = partial(Progress, "benchmark")
    options = FetchOptions(
        work / "store", None, stream=False, network=runfile.Network(), progress=progress
    )
    write_shards(aside, sources.fetch(location, aside, options))
    aside.rename(folder)
    return folder


def _python_files() -> Iterator[Path]:
    roots = [Path(import_module(name).__file__).parent for name in MODULES]
    for root in (Path(sysconfig.get_path("stdlib")), *roots):
        for path in sorted(root.rglob("*.py")):
            if not SKIPPED.intersection(path.relative_to(root).parts):
                yield path


def writing(extent: Extent, work: Path) -> Iterator[dict]:
    """Tokens per second of text that a model of random params writes."""
    folder = _random_model(extent, work)
    for batch in extent.batches:
        yield attempt({"batch": batch}, partial(_write, extent, folder, batch))


def _write(extent: Extent, folder: Path, batch: int) -> dict:
    vocabulary = sizes.SIZES[extent.run].vocabulary
    prompts = np.random.default_rng(0).integers(1, vocabulary, (batch, 8)).tolist()
    chosen = argparse.Namespace(new_tokens=extent.new_tokens)
    seconds = _timed(generate.ours(folder, prompts, chosen), extent.repeats)
    return {
        "size": extent.run,
        "new_tokens": extent.new_tokens,
        "tokens_per_second": round(batch * extent.new_tokens / seconds),
    }


def tasks(extent: Extent, work: Path) -> Iterator[dict]:
    """Requests per second of the task next_line, on text that nobody trains on."""
    yield attempt({"task": next_line.NAME}, partial(_ask, extent, work))


def _ask(extent: Extent, work: Path) -> dict:
    run, shards = _run(extent, "adamw"), text(extent, work)
    folder = _random_model(extent, work)
    read = exported.read(folder)
    groups = device_groups(jax.devices(), 1)
    model = task_model.from_folder(read, folder, groups, run.evaluate.batch_size)
    texts = next_line_task.documents(run, shards, read.tokenizer)
    questions = next_line.questions(texts, 0)
    selection = next_line_task.ask(questions, model, extent.questions)
    seconds = _timed(partial(model.log_likelihoods, selection.requests), extent.repeats)
    tokens = sum(len(before) + len(after) for before, after in selection.requests)
    return {
        "size": extent.run,
        "questions": len(selection.questions),
        "requests": len(selection.requests),
        "batch_size": run.evaluate.batch_size,
        "requests_per_second": round(len(selection.requests) / seconds, 1),
        "tokens_per_second": round(tokens / seconds),
    }


def _random_model(extent: Extent, work: Path) -> Path:
    """An exported folder of random params, and the text's tokenizer."""
    folder = work / "random"
    if not folder.is_dir():
        aside = work / "random.part"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        generate.write_random(_run(extent, "adamw"), aside)
        for path in (text(extent, work) / TOKENIZER).glob("*.json"):
            shutil.copy(path, aside)
        aside.rename(folder)
    return folder


def _timed(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of some calls, after two that compile and warm up."""
    return median(in_turns({"work": work}, repeats, warm=2)["work"])
