"""`data_location.Arrays`: arrays of examples in files of this machine, for a workload."""

from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from pipeline.runfile.data import DataArrays, Limit
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.sources.rows import array_files
from pipeline.sources.rows.writing import (
    Examples,
    counts_of,
    most_rows,
    same_rows,
    warnings_of,
    write_arrays,
)
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import expand, unchanged
from pipeline.tokens import signs
from pipeline.tokens.rows import WORD
from pipeline.tokens.shards import Split

PATH = "model.LLM.data_location.Arrays"


class ArrayData(NamedTuple):
    """The files at a path, by their names in the folder, and the examples of each split."""

    files: dict[str, Path]
    given: dict[Split, list[Examples]]


def survey(location: DataArrays, options: FetchOptions) -> Survey:
    """Describe what a run would read; headers are read, and no values."""
    found, where = _find(location, options.limit), _where(location)
    words = same_rows(found.given, where).words
    given = {split: sum(one.count for one in some) for split, some in found.given.items()}
    counts = counts_of(given, location.held_out_percent, where)
    files = []
    for split, most in most_rows(options.limit, words, where).items():
        count = counts[split] if most is None else min(most, counts[split])
        if count:
            files.append(SurveyedFile(location.path, split, count * words * WORD, count * words))
    warnings = warnings_of(counts, where, options)
    return Survey(location.path, tuple(files), 1, warnings, row_words=words)


def source_sha256(location: DataArrays, options: FetchOptions) -> str | None:
    """Return the SHA-256 of the files, if `fetch` would read all of them."""
    if options.limit is not None:
        return None
    return _sha256(_find(location, None))


def fetch(location: DataArrays, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of the arrays that a run file names.

    Raises:
      LockstepError: no array is there, they do not fit together, a value is not a finite number, a
        file changes meanwhile, or a split has no row.
    """
    found, where = _find(location, options.limit), _where(location)
    with unchanged(found.files.values()):
        written = write_arrays(folder, found.given, where, location.held_out_percent, options)
        sha256 = _sha256(found)
    return Fetched(
        files=written.files,
        token_size_in_bytes=WORD,
        vocab_size=None,
        shuffle=location.shuffle,
        rows=written.rows,
        source={
            "read": location.path,
            "files": list(found.files),
            "rows": written.counts,
            "sha256": sha256,
        },
        warnings=warnings_of(written.counts, where, options),
    )


def _where(location: DataArrays) -> str:
    return f"{PATH}: {location.path}"


def _find(location: DataArrays, limit: Limit | None) -> ArrayData:
    root = expand(location.path, PATH)
    most = limit.files if limit else None
    if not root.is_dir():
        if not root.exists():
            raise LockstepError(
                f"{PATH}: found no {root.absolute()}, expected a folder or a file of "
                f"{', '.join(array_files.KINDS)}"
            )
        return ArrayData({root.name: root}, {TRAIN: [array_files.read_file(root)]})
    paths, examples = array_files.read_folder(root)
    if not paths:
        raise LockstepError(
            f"{root}: found no file that ends in {', '.join(array_files.KINDS)}, expected some"
        )
    aside: list[Path] = []
    given = {TRAIN: examples, HELD_OUT: []}
    if len(examples) == len(paths):  # each file has examples, and not one array of all of them
        named = signs.held_out_beside(path.name for path in paths)
        given[TRAIN] = []
        for path, one in zip(paths, examples, strict=True):
            given[HELD_OUT if path.name in named else TRAIN].append(one)
        aside = [path for path in paths if path.name in named]
        paths = [path for path in paths if path.name not in named][:most]
    given[TRAIN] = given[TRAIN][:most]
    if (root / HELD_OUT).is_dir():
        more = array_files.read_folder(root / HELD_OUT)
        aside, given[HELD_OUT] = aside + more[0], given[HELD_OUT] + more[1]
    return ArrayData({p.relative_to(root).as_posix(): p for p in [*paths, *aside]}, given)


def _sha256(found: ArrayData) -> str:
    return listing_sha256((name, sha256_file(path)) for name, path in found.files.items())


PROVIDER = Provider(survey, fetch, source_sha256)
