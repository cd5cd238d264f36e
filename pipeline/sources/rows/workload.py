"""`data_location.Workload`: the arrays that a workload's own `dataset(split)` gives.

The arrays come from `FetchOptions.dataset`, which asks the workload: this room starts no process.
"""

import hashlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.tables.variant import variant_name
from pipeline.runfile.data import DataWorkload
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.sources.rows.writing import (
    Examples,
    counts_of,
    examples_of,
    warnings_of,
    write_arrays,
)
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.rows import WORD
from pipeline.tokens.shards import Split

READ = "dataset of the workload"


def survey(location: DataWorkload, options: FetchOptions) -> Survey:
    """Describe the arrays that the workload gives, as a file of each split."""
    given, where = _given(location, options), variant_name(location)
    some = {split: one.count for split, (one,) in given.items()}
    counts, words = counts_of(some, location.held_out_percent, where), given[TRAIN][0].rows.words
    files = tuple(
        SurveyedFile(READ, split, count * words * WORD, count * words)
        for split, count in counts.items()
        if count
    )
    return Survey(READ, files, 1, warnings_of(counts, where, options), row_words=words)


def fetch(location: DataWorkload, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of the workload's arrays [N, ...]; its "held_out" may be missing or empty.

    Raises:
      LockstepError: there is no workload, or `write_arrays` refuses its arrays.
    """
    given, where = _given(location, options), variant_name(location)
    written = write_arrays(folder, given, where, location.held_out_percent, options)
    row = hashlib.sha256(written.rows.model_dump_json().encode()).hexdigest()
    contents = [("rows", row), *((file.path, file.sha256) for file in written.files)]
    return Fetched(
        files=written.files,
        token_size_in_bytes=WORD,
        vocab_size=None,
        shuffle=location.shuffle,
        rows=written.rows,
        source={"read": READ, "rows": written.counts, "sha256": listing_sha256(contents)},
        warnings=warnings_of(written.counts, where, options),
    )


def _given(location: DataWorkload, options: FetchOptions) -> dict[Split, list[Examples]]:
    where = variant_name(location)
    if options.dataset is None:
        raise LockstepError(
            f"{where}: found no workload, expected one in the table [workload] whose object has "
            "dataset(split)"
        )
    arrays = options.dataset()
    if not arrays.get(TRAIN):
        raise LockstepError(f"{where}: found no arrays to train on, expected some")
    return {
        split: [examples_of(f'{where}: dataset("{split}")', partial(nullcontext, arrays[split]))]
        for split in (TRAIN, HELD_OUT)
        if arrays.get(split)
    }


PROVIDER = Provider(survey, fetch)
