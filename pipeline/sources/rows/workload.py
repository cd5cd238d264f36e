"""`data_location.Workload`: the arrays that a workload's own `dataset(split)` gives.

The arrays come from `FetchOptions.dataset`, which asks the workload: this room starts no process.
"""

import hashlib
from collections.abc import Mapping
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
from pipeline.sources.rows.examples import Sliced, in_memory, write_arrays
from pipeline.sources.rows.writing import warnings_of
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.rows import WORD
from pipeline.tokens.shards import Split

READ = "dataset of the workload"


def survey(location: DataWorkload, options: FetchOptions) -> Survey:
    """Describe one file of unknown size: only the workload's process tells."""
    return Survey(READ, (SurveyedFile(READ, TRAIN, 0, None),), 1)


def fetch(location: DataWorkload, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of the workload's arrays.

    Raises:
      LockstepError: there is no workload, or see `shards_of`.
    """
    if options.dataset is None:
        raise LockstepError(
            f"{variant_name(location)}: found no workload, expected one in the table [workload] "
            "whose object has dataset(split)"
        )
    return shards_of(options.dataset(), location, folder, options)


def shards_of(
    arrays: Mapping[Split, Mapping[str, Sliced]],
    location: DataWorkload,
    folder: Path,
    options: FetchOptions,
) -> Fetched:
    """Make shards of arrays [N, ...], by name and split; "held_out" may be missing or empty.

    Raises:
      LockstepError: they do not fit together, a value is no finite number, or a split has no row.
    """
    where = variant_name(location)
    given = {
        split: [in_memory(f'{where}: dataset("{split}")', arrays[split])]
        for split in (TRAIN, HELD_OUT)
        if arrays.get(split)
    }
    written = write_arrays(
        folder,
        given,
        where,
        held_out_percent=location.held_out_percent,
        limit=options.limit,
        progress=options.progress,
    )
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
