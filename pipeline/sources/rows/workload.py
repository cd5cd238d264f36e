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
from pipeline.sources.rows.writing import examples_of, warnings_of, write_arrays
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.rows import WORD

READ = "dataset of the workload"


def survey(location: DataWorkload, options: FetchOptions) -> Survey:
    """Describe one file of unknown size: only the workload's process tells."""
    return Survey(READ, (SurveyedFile(READ, TRAIN, 0, None),), 1)


def fetch(location: DataWorkload, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of the workload's arrays [N, ...]; its "held_out" may be missing or empty.

    Raises:
      LockstepError: there is no workload, or `write_arrays` refuses its arrays.
    """
    where = variant_name(location)
    if options.dataset is None:
        raise LockstepError(
            f"{where}: found no workload, expected one in the table [workload] whose object has "
            "dataset(split)"
        )
    arrays = options.dataset()
    given = {
        split: [examples_of(f'{where}: dataset("{split}")', partial(nullcontext, arrays[split]))]
        for split in (TRAIN, HELD_OUT)
        if arrays.get(split)
    }
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


PROVIDER = Provider(survey, fetch)
