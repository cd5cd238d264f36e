"""`lockstep download --dry-run`: what a run would fetch, and whether it is enough for the run."""

import math
import time
from collections.abc import Iterator

from pipeline import sources
from pipeline.errors import LockstepError, brief
from pipeline.net import remote
from pipeline.net.remote import Origin
from pipeline.runfile import DataServer, OptimizerDummy, Run
from pipeline.runfile.data import HashedText
from pipeline.sources import HELD_OUT, TRAIN, FetchOptions, Survey
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import size

TIMED_BYTES = 2**20  # fetched, or a tenth of a small file, to see how fast they come
BYTES_OF_A_TOKEN = (5, 3)  # bytes of text per token, with 100,000 tokens and with 4,000


def lines(run: Run, paths: Paths) -> Iterator[str]:
    """Yield the lines of the report: of listings, and of the first bytes of a file elsewhere.

    Raises:
      LockstepError: the location cannot be read, or is known to differ from `[pins] data`.
    """
    if reason := unsupported(run):
        yield f"download: {reason}"
        return
    location, options = run.llm.data_location, sources.fetch_options(run, paths)
    survey = sources.survey(location, options)
    known = sources.source_sha256(location, options) if run.pins.data else None
    if known:
        pins.check("data", run.pins.data, known, survey.read)
    if not run.held_out.sequences:  # nothing is measured
        survey = survey.all_to_train()
    yield f"download: {survey.read}"
    yield from _table(run, survey)
    if survey.first is not None and not run.download.stream:
        yield _time(sum(file.size for file in survey.files), survey.first, options)
    if run.pins.data:
        compared = "it is these data" if known else "compared once they are read"
        yield f"  pin        [pins] data = {brief(run.pins.data, 12)}: {compared}"
    for warning in survey.warnings:
        yield f"download: warning: {warning}"


def _time(whole: int, first: Origin, options: FetchOptions) -> str:
    """A line on how long the fetch takes, from the speed at which a first piece comes."""
    began = time.perf_counter()
    try:
        pieces = remote.read(first, 0, min(-(-first.size // 10), TIMED_BYTES), options.network)
        came = sum(map(len, pieces))
    except LockstepError as error:
        return f"  time       not known: {error}"
    speed = came / max(time.perf_counter() - began, 1e-3)
    took = whole / speed
    about = f"{took / 60:,.0f} minutes" if took >= 90 else f"{math.ceil(took)} seconds"
    return (
        f"  time       about {about} over one connection at {size(speed)} a second, the speed of "
        f"{size(came)} fetched now; what data/store has is not fetched again"
    )


def unsupported(run: Run) -> str | None:
    """Return what the run would need and this release lacks; None if it could begin."""
    if isinstance(run.llm.data_location, DataServer):
        try:
            sources.provider_of(run.llm.data_location)
        except LockstepError as error:
            return str(error)
    if isinstance(run.llm.optimizer, OptimizerDummy):
        return (
            "model.LLM.optimizer.Dummy: would need an optimizer that leaves the params as they "
            "are, which is not here: there is nothing to train"
        )
    return None


def _table(run: Run, survey: Survey) -> Iterator[str]:
    train = [file for file in survey.files if file.split == TRAIN]
    held_out = [file for file in survey.files if file.split == HELD_OUT]
    length, need = run.llm.max_seq_len, run.config.last_index(run.llm.max_seq_len)
    made = any(file.tokens is None for file in train)  # of text, or by a workload
    how = "read while training" if run.download.stream else "to read" if made else "to fetch"
    of_all = f" of {survey.train_files:,}" if survey.train_files > len(train) else ""
    whole, aside = (size(sum(file.size for file in files)) for files in (survey.files, held_out))
    if isinstance(run.llm.data_location, HashedText):
        percent = f"{run.llm.data_location.held_out_percent:g} %"
        yield f"  files      {len(train):,}{of_all}; {percent} of their documents are held out"
        yield f"  bytes      {whole} {how}" + " at most" * bool(run.download.limit)
    else:
        yield f"  files      {len(train):,}{of_all} to train on, {len(held_out):,} held out"
        yield f"  bytes      {whole} {how}, {aside} of them held out"
    if not run.llm.data_location.holds_tokens:
        yield from _rows(run, survey, need)
        return
    if made:
        if survey.text_bytes is not None:
            yield from _estimate(survey.text_bytes, need, length)
        else:
            yield "  tokens     known when it is read"
            yield f"  the run    {need:,} sequences of {length:,} tokens: {need * length:,} tokens"
        return
    tokens = sum(file.tokens for file in train)
    sequences = sum(file.tokens // length for file in train)
    yield f"  tokens     {tokens:,} to train on"
    yield f"  sequences  {sequences:,} of {length:,} tokens"
    yield (
        f"  the run    {need:,} sequences in {run.config.total_steps:,} steps: "
        f"{need * length:,} tokens, {_epochs(need, sequences)}"
    )


def _rows(run: Run, survey: Survey, need: int) -> Iterator[str]:
    """Lines on rows that are not tokens."""
    length, words = run.llm.max_seq_len, survey.row_words
    asked = f"  the run    {need:,} rows in {run.config.total_steps:,} steps"
    if words is None:  # only the workload tells
        yield "  rows       known when the workload has given them"
        yield asked
        return
    counts = {TRAIN: 0, HELD_OUT: 0}
    for file in survey.files:
        counts[file.split] += file.tokens // words
    train, held_out = counts.values()
    yield f"  rows       {train:,} to train on, {held_out:,} held out: {words:,} words each"
    yield f"{asked}: {_epochs(need, train, 'row')}"
    if length != words:
        yield f"  warning    model.LLM.max_seq_len is {length}, expected {words}, as a row has"


def _estimate(text_bytes: int, need: int, length: int) -> Iterator[str]:
    """Lines on text, whose tokens only tokenizing counts."""
    most, least = BYTES_OF_A_TOKEN
    low, high = text_bytes // most, text_bytes // least
    yield (
        f"  tokens     {low:,} to {high:,} to train on: an estimate, of {least} to {most} bytes "
        "each; known when it is tokenized"
    )
    enough = "enough" if need * length <= low else "too few"
    if low < need * length <= high:
        enough = "perhaps too few"
    yield (
        f"  the run    {need:,} sequences of {length:,} tokens: {need * length:,} tokens, for "
        f"which there are {enough}, by that estimate"
    )


def _epochs(need: int, sequences: int, what: str = "sequence") -> str:
    if need > sequences:
        return f"{need - sequences:,} more than there are, and no {what} is trained on twice"
    return "1 epoch" if need == sequences else f"{need / sequences:.4g} epochs"
