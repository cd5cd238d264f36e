"""`lockstep download --dry-run`: what a run would fetch, and whether it is enough for the run."""

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from lockstep.errors import LockstepError, brief
from lockstep.machine.progress import size
from lockstep.methods.dense import OptimizerDummy
from pipeline import sources
from pipeline.net import remote
from pipeline.net.origin import Origin
from pipeline.runfile import Network, Run
from pipeline.runfile.data import HashedText
from pipeline.sources.provider import HELD_OUT, TRAIN, Survey, opened_options
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths

TIMED_BYTES = 2**20  # fetched, or a tenth of a small file, to see how fast they come
BYTES_OF_A_TOKEN = (5, 3)  # bytes of text per token, with 100,000 tokens and with 4,000


class Sufficiency(NamedTuple):
    """How many sequences or rows a run trains on, in all its passes, and how many there are.

    There are `least` to `most`: in an estimate they differ, and None is unknown before reading.
    """

    need: int
    passes: int
    least: int | None = None
    most: int | None = None

    @property
    def is_too_little(self) -> bool:
        """Whether by the dry run the training will find too little."""
        return self.most is not None and self.need > self.passes * self.most

    @property
    def may_be_too_little(self) -> bool:
        """Whether the data may be too little for the run."""
        return self.least is not None and self.need > self.passes * self.least

    @property
    def remedy(self) -> str:
        """What to do, by the dry run, where the data are, or may be, too little."""
        again = f", or [peers] passes = {-(-self.need // self.least)}" if self.least else ""
        return f"more data, a smaller config.total_steps{again}"


class DataPreview(NamedTuple):
    """What a run would read, how much that is, and how it compares with `[pins] data`, if set."""

    survey: Survey
    amount: Sufficiency
    pin: str


def look(run: Run, paths: Paths) -> DataPreview:
    """Look at the listings of a run's data; no data are fetched.

    Raises:
      LockstepError: the location cannot be read, or is known to differ from `[pins] data`; or the
        run needs what this release lacks.
    """
    if isinstance(run.llm.optimizer, OptimizerDummy):
        raise LockstepError(
            "model.LLM.optimizer.Dummy: would need an optimizer that leaves the params as they "
            "are, which is not here: there is nothing to train"
        )
    location = run.llm.data_location
    with opened_options(run, paths) as options:
        survey = sources.survey(location, options)
        sha256 = sources.source_sha256(location, options) if run.pins.data else None
    if sha256:
        pins.check("data", run.pins.data, sha256, survey.read)
    if not run.held_out.sequences:  # nothing is measured
        survey = survey.all_to_train()
    pin = ""
    if run.pins.data:
        status = "it is these data" if sha256 else "compared once they are read"
        pin = f"[pins] data = {brief(run.pins.data, 12)}: {status}"
    return DataPreview(survey, _amount(run, survey), pin)


def lines(run: Run, paths: Paths, preview: DataPreview | None = None) -> Iterator[str]:
    """Yield the lines of the dry run; the first bytes of a file elsewhere are fetched.

    `preview` is what `look` returned, where that was done already.
    """
    preview = preview or look(run, paths)
    survey = preview.survey
    yield f"download: {survey.read}"
    yield from _table(run, survey, preview.amount)
    if survey.first is not None and not run.download.stream:
        yield _time(sum(file.size for file in survey.files), survey.first, run.runtime)
    if preview.pin:
        yield f"  pin        {preview.pin}"
    for warning in survey.warnings:
        yield f"download: warning: {warning}"


def _amount(run: Run, survey: Survey) -> Sufficiency:
    length = run.llm.max_seq_len
    need, of_rows = run.config.last_index(length), not run.llm.data_location.holds_tokens
    amount = Sufficiency(need, run.peers.passes)
    train = [file.tokens for file in survey.files if file.split == TRAIN]
    if of_rows:
        if survey.row_words is None:
            return amount
        count = sum(tokens // survey.row_words for tokens in train)
    elif None not in train:
        count = sum(tokens // length for tokens in train)
    elif survey.text_bytes is not None:
        low, high = (survey.text_bytes // size // length for size in BYTES_OF_A_TOKEN)
        return amount._replace(least=low, most=high)
    else:
        return amount
    return amount._replace(least=count, most=count)


def _time(total: int, first: Origin, network: Network) -> str:
    """Return the dry run's line on how long the fetch takes, by the speed of a first piece."""
    began = time.perf_counter()
    try:
        pieces = remote.read(first, 0, min(-(-first.size // 10), TIMED_BYTES), network)
        received = sum(map(len, pieces))
    except LockstepError as error:
        return f"  time       not known: {error}"
    speed = received / max(time.perf_counter() - began, 1e-3)
    seconds = total / speed
    wait = f"{seconds / 60:,.0f} minutes" if seconds >= 90 else f"{math.ceil(seconds)} seconds"
    return (
        f"  time       about {wait} over one connection at {size(speed)} a second, the speed of "
        f"{size(received)} fetched now; what data/store has is not fetched again"
    )


def _table(run: Run, survey: Survey, amount: Sufficiency) -> Iterator[str]:
    train = [file for file in survey.files if file.split == TRAIN]
    held_out = [file for file in survey.files if file.split == HELD_OUT]
    length, need = run.llm.max_seq_len, amount.need
    is_made = any(file.tokens is None for file in train)  # of text, or by a workload
    how = "read while training" if run.download.stream else "to read" if is_made else "to fetch"
    of_all = f" of {survey.train_files:,}" if survey.train_files > len(train) else ""
    total, aside = (size(sum(file.size for file in files)) for files in (survey.files, held_out))
    if isinstance(run.llm.data_location, HashedText):
        percent = f"{run.llm.data_location.held_out_percent:g} %"
        yield f"  files      {len(train):,}{of_all}; {percent} of their documents are held out"
        yield f"  bytes      {total} {how}" + " at most" * bool(run.download.limit)
    else:
        yield f"  files      {len(train):,}{of_all} to train on, {len(held_out):,} held out"
        yield f"  bytes      {total} {how}, {aside} of them held out"
    if not run.llm.data_location.holds_tokens:
        yield from _rows(run, survey, amount)
        return
    if is_made:
        if survey.text_bytes is not None:
            yield from _estimate(survey.text_bytes, amount, length)
        else:
            yield "  tokens     known when it is read"
            yield f"  the run    {need:,} sequences of {length:,} tokens: {need * length:,} tokens"
        return
    yield f"  tokens     {sum(file.tokens for file in train):,} to train on"
    yield f"  sequences  {amount.most:,} of {length:,} tokens"
    yield (
        f"  the run    {need:,} sequences in {run.config.total_steps:,} steps: "
        f"{need * length:,} tokens, {epochs(amount)}"
    )


def _rows(run: Run, survey: Survey, amount: Sufficiency) -> Iterator[str]:
    """Yield the dry run's lines on rows that are not tokens."""
    length, words = run.llm.max_seq_len, survey.row_words
    run_line = f"  the run    {amount.need:,} rows in {run.config.total_steps:,} steps"
    if words is None:  # only reading tells
        yield "  rows       known when the workload has given them"
        yield run_line
        return
    held_out = sum(file.tokens // words for file in survey.files if file.split == HELD_OUT)
    yield f"  rows       {amount.most:,} to train on, {held_out:,} held out: {words:,} words each"
    yield f"{run_line}: {epochs(amount)}"
    if length != words:
        yield f"  warning    model.LLM.max_seq_len is {length}, expected {words}, as a row has"


def _estimate(text_bytes: int, amount: Sufficiency, length: int) -> Iterator[str]:
    """Yield the dry run's lines on text, whose tokens can only be estimated."""
    most, least = BYTES_OF_A_TOKEN
    low, high, need = text_bytes // most, text_bytes // least, amount.need
    yield (
        f"  tokens     {low:,} to {high:,} to train on: an estimate, of {least} to {most} bytes "
        "each; known when it is tokenized"
    )
    yield (
        f"  the run    {need:,} sequences of {length:,} tokens: {need * length:,} tokens, for "
        f"which there are {epochs(amount)}"
    )


def epochs(amount: Sufficiency) -> str:
    """Return how much of the data a run trains on, in words."""
    need, most = amount.need, amount.most
    if most is None:
        return "as many as only reading tells"
    if amount.least != most:
        enough = "perhaps too few" if amount.may_be_too_little else "enough"
        return f"{'too few' if amount.is_too_little else enough}, by that estimate"
    if amount.is_too_little:
        return f"{need - amount.passes * most:,} more than {amount.passes} x the {most:,} there are"
    return "1 epoch" if need == most else f"{need / most:.4g} epochs"
