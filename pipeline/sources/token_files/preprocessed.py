"""`data_location.Preprocessed`: rows of token ids in parquet files, checked and made into shards.

Columns are lists of integers, all of one length, as in Psyche's Preprocessed data:

    inputs            token ids
    labels            ids to predict; UNCOUNTED, -100, where the loss does not count them
    position_ids      positions, from 0 and below the row's length
    sequence_lengths  of any length: lengths of the sequences packed into the row; the rest of the
                      row is padding

All but `inputs` may be absent. Rows of `sequence_lengths` without labels get labels here: each
token of a sequence but its first. Other columns of numbers for each token, such as an
attention_mask, are refused, and columns of anything else ignored.

Names say what is held out, as listing.py has it. A limit is on the train split; where it cuts by
tokens or steps, at most HELD_OUT_TOKENS are held out.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import sha256_file
from lockstep.programs.columns import UNCOUNTED, Column, counted
from lockstep.programs.columns import split as split_columns
from lockstep.tables.variant import variant_name
from pipeline import extras
from pipeline.net.transfers.store import StoredFile
from pipeline.runfile.data import DataPreprocessed, ShuffleDontShuffle
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.sources.token_files.fetching import fetch_files, fetch_tokenizer
from pipeline.sources.token_files.listing import (
    Listing,
    LocationFile,
    check_local,
    holds_out_by_default,
    local_file,
    max_tokens,
    remembered,
    split_files,
    tokenizer_files,
)
from pipeline.sources.token_files.remote_files import REPO_ID, list_dataset
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.untrusted_files import check_unpacked, expand, unchanged, walk
from pipeline.tokens.shards import ShardFile, Split, write_shard

if TYPE_CHECKING:
    from pyarrow import Array

SHARD_NUMBERS = 2**20
ROW_TOKENS = 2**24  # at most, of a row, which is read into memory
LEAST_NUMBERS = 2**28  # that any row group may have; more only if its bytes are not too few
# A column of a file -> the column of the shards (columns.py), in the order of a row.
PARQUET_COLUMNS: dict[str, Column] = {
    "inputs": "inputs",
    "labels": "labels",
    "position_ids": "position_ids",
    "sequence_lengths": "sequence_ids",
}


def survey(location: DataPreprocessed, options: FetchOptions) -> Survey:
    """Describe the parquet files to read; of this machine's, the number of tokens too."""
    listing, chosen, train_files, warnings = _choose(location, options)
    files = []
    for split, of_split in chosen.items():
        left = max_tokens(options.limit)[split]
        for file in of_split:
            local = file.origin.is_local
            tokens = Parquet(Path(file.origin.url), file.label).tokens if local else None
            if local and left is not None:
                tokens = min(tokens, left)
                left -= tokens
            if tokens != 0:
                files.append(SurveyedFile(file.name, split, file.origin.size, tokens))
    by_default = holds_out_by_default(listing, options.limit)
    return Survey(listing.read, tuple(files), train_files, tuple(warnings), by_default)


def fetch(location: DataPreprocessed, folder: Path, options: FetchOptions) -> Fetched:
    """Make shards of parquet files, of a folder or of a dataset on the hub.

    Raises:
      LockstepError: there are no files, pyarrow is not installed, or a row is invalid.
    """
    listing, chosen, _, warnings = _choose(location, options)
    vocab_size = fetch_tokenizer(listing, folder, options)
    shards = _RowShards(folder, vocab_size)
    read: dict[str, dict[str, str]] = {TRAIN: {}, HELD_OUT: {}}
    for split, of_split in chosen.items():
        (folder / split).mkdir()
        left = max_tokens(options.limit)[split]
        # where only rows tell how many files are needed, no more are fetched than at once
        batch = max(1, len(of_split)) if left is None else options.network.connections
        for file, stored in _fetch(of_split, batch, options):
            with unchanged([stored.path]):
                rows = Parquet(stored.path, file.label)
                read[split][file.name] = stored.sha256 or sha256_file(stored.path)
                written = shards.add(rows, file.name, split, left) if rows.rows else 0
            if not rows.rows:
                warnings.append(f"{file.label}: has no rows")
                continue
            if left is not None:
                left -= written
                if left < shards.first.length:
                    break
    for split, count in shards.unlabelled.items():
        if count:
            of_all = f"{count:,} of {shards.rows[split]:,} {split} rows"
            warnings.append(f"{listing.read}: {of_all} have no label that a loss counts")
    if shards.over:
        warnings.append(
            f"{listing.read}: {shards.over:,} labels count at the first token of a sequence or of "
            f"the padding, which nothing of it precedes, expected {UNCOUNTED}"
        )
    if not shards.rows[TRAIN]:
        message = "; ".join(["found no rows to train on, expected some", *warnings])
        raise LockstepError(f"{listing.read}: {message}")
    return Fetched(
        files=(*shards.files[TRAIN], *shards.files[HELD_OUT]),
        token_size_in_bytes=4,
        vocab_size=vocab_size,
        shuffle=listing.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": {split: list(names) for split, names in read.items()},
            "rows": shards.rows,
            "row_tokens": shards.first.length,
            "sha256": listing_sha256(pair for names in read.values() for pair in names.items()),
        },
        columns=shards.first.kinds,
        held_out_by_default=holds_out_by_default(listing, options.limit),
        warnings=tuple(warnings),
    )


def _fetch(
    files: list[LocationFile], batch: int, options: FetchOptions
) -> Iterator[tuple[LocationFile, StoredFile]]:
    """Yield files with their place in the store, fetched `batch` at a time as they are needed."""
    for start in range(0, len(files), batch):
        chunk = files[start : start + batch]
        yield from zip(chunk, fetch_files(chunk, options), strict=True)


class _RowShards:
    """The shards, as they are made of one parquet file after another.

    Of the `rows` of each split, `unlabelled` are those whose labels are all UNCOUNTED: nothing is
    learned from them; `over` is the number of labels that are over a border. All files have the
    columns and the length of `first`, the first with rows.
    """

    def __init__(self, folder: Path, vocab_size: int | None):
        self._folder, self._vocab_size = folder, vocab_size
        self.first: Parquet | None = None
        self.files: dict[Split, list[ShardFile]] = {TRAIN: [], HELD_OUT: []}
        self.rows: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}
        self.unlabelled: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}
        self.over = 0

    def add(self, file: "Parquet", name: str, split: Split, most: int | None) -> int:
        """Make shards of a parquet file's first `most` tokens, or of all; return how many."""
        first = self.first = self.first or file
        if file.columns != first.columns:
            actual, expected = ", ".join(file.columns), ", ".join(first.columns)
            raise LockstepError(
                f"{file.name}: found columns {actual}, expected {expected} as in {first.name}"
            )
        rows, done = None if most is None else most // first.length, 0
        size = max(1, SHARD_NUMBERS // (len(first.kinds) * first.length))
        files = self.files[split]
        for rows_NW in file.read(first.length, self._vocab_size, size, rows):
            last = done + len(rows_NW) - 1
            counts_NS = counted(rows_NW, first.kinds)
            self.unlabelled[split] += int((~counts_NS.any(axis=1)).sum())
            if (ids_NL := split_columns(rows_NW, first.kinds).sequence_ids) is not None:
                self.over += int((counts_NS & (np.diff(ids_NL) != 0)).sum())
            numbers = rows_NW.astype("<u4")  # -100 as its 32 bits
            name_of_rows = f"{name}, rows {done} to {last}"
            files.append(write_shard(self._folder, split, len(files), numbers, name_of_rows))
            done = last + 1
        self.rows[split] += done
        return done * first.length


# ---- Which files ----


def _choose(
    location: DataPreprocessed, options: FetchOptions
) -> tuple[Listing, dict[Split, list[LocationFile]], int, list[str]]:
    """Return the listing, the files to read by split, the number of train files, and warnings."""
    listing = _list(location, options)
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in .parquet")
    train, held_out, warnings = split_files(listing, options, unnamed=False)
    first = train[: options.limit.files if options.limit else None]
    return listing, {TRAIN: first, HELD_OUT: held_out}, len(train), [*warnings]


def _list(location: DataPreprocessed, options: FetchOptions) -> Listing:
    """Return the parquet files of the folder or the dataset, and the tokenizer beside them."""
    root = expand(location.source, variant_name(location))
    if root.is_dir():
        files = [
            local_file(path, root)
            for name, path in walk(root, hidden=False)
            if name.endswith(".parquet") or path.is_file()
        ]
        return check_local(_listing(location.source, files, {}), root)
    repo_id, where = location.source.strip(), variant_name(location)
    if not REPO_ID.fullmatch(repo_id):
        raise LockstepError(
            f"{where}: found no folder {root.absolute()}, expected one of .parquet files, or "
            "owner/name of a dataset on the hub"
        )

    def ask() -> Listing:
        says, files = list_dataset(repo_id, None, f"{where}: {repo_id}", options.network)
        return _listing(f"{repo_id} on the hub", files, says)

    return remembered(location, options, ask)


def _listing(read: str, files: Iterable[LocationFile], says: dict[str, str]) -> Listing:
    files = sorted(files, key=lambda file: file.name)
    return Listing(
        read=read,
        token_size_in_bytes="FourBytes",
        shuffle=ShuffleDontShuffle(),
        files=tuple(
            file
            for file in files
            if file.name.endswith(".parquet") and not f"/{file.name}".count("/.")
        ),
        tokenizer=tokenizer_files(files),
        says=says,
    )


# ---- The rows of a file ----


class Parquet:
    """A parquet file of rows.

    `columns` are those of PARQUET_COLUMNS that it has, `kinds` the columns of the shards, `rows` is
    the number of rows, and `length` the tokens of the first, 0 without rows.

    Raises:
      LockstepError: it is not a parquet file, lacks a column, or has one of another type; or
        pyarrow is not installed.
    """

    def __init__(self, path: Path, name: str):
        extras.required(name, "pyarrow")
        from pyarrow import parquet

        self.name = name
        with self._reading():  # names too are decoded only when they are asked for
            # mapped, or a whole row group would be read into memory, however large
            self._file = parquet.ParquetFile(path, memory_map=True)
            self.rows = self._file.metadata.num_rows
            self.columns = self._find_columns()
            self.kinds = tuple(
                kind
                for column, kind in PARQUET_COLUMNS.items()
                if column in self.columns or (kind == "labels" and self._is_packed)
            )
            self._check_size()
        self.length = self._first_length()

    @property
    def _is_packed(self) -> bool:
        return "sequence_lengths" in self.columns

    @property
    def tokens(self) -> int:
        """Number of a parquet file's tokens, from its metadata."""
        with self._reading():
            groups = map(self._file.metadata.row_group, range(self._file.num_row_groups))
            columns = [group.column(n) for group in groups for n in range(group.num_columns)]
            return sum(c.num_values for c in columns if c.path_in_schema.split(".")[0] == "inputs")

    def read(
        self, length: int, vocab_size: int | None, rows: int, most: int | None
    ) -> Iterator[np.ndarray]:
        """Yield a parquet file's rows, int64 [N, W]: their columns one after the other.

        Each row has `length` tokens, whose ids are below `vocab_size`, or 2**31. N is `rows`,
        except for the last, and at most `most` rows are read.

        Raises:
          LockstepError: a row is invalid; names the column and the row, from 0.
        """
        done = 0
        with self._reading():
            for batch in self._file.iter_batches(rows, columns=list(self.columns)):
                if most is not None:
                    batch = batch.slice(0, most - done)
                if not batch.num_rows:
                    break
                found: dict[Column, np.ndarray] = {}
                for column in self.columns:
                    lists = _Lists(self.name, column, batch.column(column), done)
                    found[PARQUET_COLUMNS[column]] = _read(lists, length, vocab_size)
                    if column == "position_ids" and not self._is_packed:
                        _check_one_sequence(lists, found["position_ids"], found.get("labels"))
                    elif column == "sequence_lengths" and "labels" not in found:
                        found["labels"] = _labels(lists, found["inputs"], found["sequence_ids"])
                yield np.concatenate([found[kind] for kind in self.kinds], axis=1)
                done += batch.num_rows

    def _find_columns(self) -> tuple[str, ...]:
        """Return the columns that a parquet file has, after checking their types."""
        from pyarrow import types

        schema = self._file.schema_arrow
        columns = tuple(column for column in PARQUET_COLUMNS if column in schema.names)
        if "inputs" not in columns:
            actual = brief(", ".join(schema.names)) or "none"
            raise LockstepError(f"{self.name}: found columns {actual}, expected inputs among them")
        for name in schema.names:
            if name in columns and schema.names.count(name) > 1:
                raise LockstepError(f"{self.name}: column {name} is there twice, expected once")
        for number, column in enumerate(schema.names):
            kind = schema.field(number).type
            lists = types.is_list(kind) or types.is_large_list(kind)
            lists = lists or types.is_fixed_size_list(kind)
            if column not in columns:
                if lists and types.is_primitive(kind.value_type):
                    raise LockstepError(
                        f"{self.name}: found column {brief(column)} of {brief(str(kind))}, "
                        f"expected of such columns {', '.join(PARQUET_COLUMNS)} alone: nothing "
                        f"reads it; a token that is not to count has the label {UNCOUNTED}"
                    )
            elif not (lists and types.is_integer(kind.value_type)):
                actual = brief(str(kind))
                raise LockstepError(
                    f"{self.name}: column {column} is of {actual}, expected lists of integers"
                )
        return columns

    def _check_size(self) -> None:
        """Check that no row of parquet is too long to be read: a few bytes may unpack to GB."""
        for number in range(self._file.num_row_groups):
            group = self._file.metadata.row_group(number)
            for column in map(group.column, range(group.num_columns)):
                name = column.path_in_schema.split(".")[0]
                if name in self.columns and column.num_values > ROW_TOKENS * group.num_rows:
                    raise LockstepError(
                        f"{self.name}: column {name} has {column.num_values} numbers in "
                        f"{group.num_rows} rows, expected at most {ROW_TOKENS} in a row"
                    )
                if name == "inputs":  # those of other columns may all be the same
                    sizes = (column.total_compressed_size, column.num_values)
                    check_unpacked(*sizes, f"{self.name}: column {name}", LEAST_NUMBERS)

    def _first_length(self) -> int:
        with self._reading():
            for batch in self._file.iter_batches(1, columns=["inputs"]):
                first = _Lists(self.name, "inputs", batch.column("inputs"), 0)
                if not first.lengths[0]:
                    first.refuse(0, "an empty list", "token ids")
                return int(first.lengths[0])
        return 0

    def _reading(self) -> AbstractContextManager[None]:
        from pyarrow import ArrowException

        # a name that is not UTF-8 is a ValueError
        return expecting(self.name, "a parquet file", ArrowException, OSError, ValueError)


def _read(lists: "_Lists", length: int, vocab_size: int | None) -> np.ndarray:
    """Return a parquet column of rows: int64 [N, L]."""
    if lists.column == "sequence_lengths":
        return _sequence_ids(lists, length)
    lists.check_lengths(length)
    if lists.column == "position_ids":
        lists.check_values(length, f"a position from 0 and below the row's length, {length}")
    else:
        limit = vocab_size or 2**31
        expected, also = f"a token id from 0 and below {limit}", None
        if lists.column == "labels":
            expected, also = f"{UNCOUNTED} or {expected}", UNCOUNTED
        lists.check_values(limit, expected, also)
    return lists.values.reshape(-1, length).astype(np.int64)


def _sequence_ids(lists: "_Lists", length: int) -> np.ndarray:
    """Return each token's sequence number, from 0; padding has the one after the last."""
    lists.check_values(length + 1, f"a length from 0 to {length}, that of the row")
    # where each sequence ends, counted over all rows
    ends_S = np.cumsum(lists.values, dtype=np.int64)
    edges = np.concatenate([[0], ends_S])
    starts_N, stops_N = edges[lists.ends - lists.lengths], edges[lists.ends]
    wrong_N = stops_N - starts_N > length
    if wrong_N.any():
        row = int(np.argmax(wrong_N))
        actual = f"lengths that sum to {stops_N[row] - starts_N[row]}"
        lists.refuse(row, actual, f"at most {length}, that of the row")
    row_S = np.repeat(np.arange(len(lists.lengths)), lists.lengths)
    real_S = np.asarray(lists.values) > 0
    steps = np.zeros((len(lists.lengths), length + 1), np.int64)
    steps[row_S[real_S], (ends_S - starts_N[row_S])[real_S]] = 1
    return np.cumsum(steps, axis=1)[:, :length]


def _labels(lists: "_Lists", inputs_NL: np.ndarray, ids_NL: np.ndarray) -> np.ndarray:
    """Return the labels of packed rows: each token of a sequence, without its first one."""
    row_S = np.repeat(np.arange(len(lists.lengths)), lists.lengths)
    packed_N = np.bincount(row_S, lists.values, len(lists.lengths))
    counted_NL = np.arange(inputs_NL.shape[1]) < packed_N[:, None]
    counted_NL[:, 1:] &= ids_NL[:, 1:] == ids_NL[:, :-1]
    counted_NL[:, 0] = False
    return np.where(counted_NL, inputs_NL, UNCOUNTED)


def _check_one_sequence(
    lists: "_Lists", positions_NL: np.ndarray, labels_NL: np.ndarray | None
) -> None:
    """Check that positions begin once, but for padding, which labels show.

    Without lengths, a model would look over the border that they mark.
    """
    anew_NL = positions_NL[:, 1:] <= positions_NL[:, :-1]
    if labels_NL is not None:
        counted_NL = labels_NL[:, 1:] != UNCOUNTED
        anew_NL &= np.logical_or.accumulate(counted_NL[:, ::-1], axis=1)[:, ::-1]
    if anew_NL.any():
        row, token = np.argwhere(anew_NL)[0].tolist()
        actual = f"{positions_NL[row, token + 1]} after {positions_NL[row, token]}"
        lists.refuse(row, actual, "rising positions, or sequence_lengths beside them")


class _Lists:
    """Lists of integers of a column: all values, and the length and the end of each list.

    `first` is the row number of the first list.
    """

    def __init__(self, name: str, column: str, array: "Array", first: int):
        from pyarrow import compute

        self.name, self.column, self.first = name, column, first
        if array.null_count:
            row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
            self.refuse(row, "null", "a list of integers")
        self.lengths = compute.list_value_length(array).to_numpy().astype(np.int64)
        self.ends = np.cumsum(self.lengths)
        values = array.flatten()
        if values.null_count:
            index = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
            self.refuse(self._row_of(index), "null", "integers")
        self.values = values.to_numpy()

    def check_lengths(self, length: int) -> None:
        """Check that each list of a parquet column has this length."""
        wrong = self.lengths != length
        if wrong.any():
            row = int(np.argmax(wrong))
            actual = f"{self.lengths[row]} numbers"
            self.refuse(row, actual, f"{length} as the first row of inputs has")

    def check_values(self, limit: int, expected: str, also: int | None = None) -> None:
        """Check that each value of a parquet column is from 0 and below a limit, or `also`."""
        wrong = (self.values < 0) | (self.values >= limit)
        if also is not None:
            wrong &= self.values != also
        if wrong.any():
            index = int(np.argmax(wrong))
            self.refuse(self._row_of(index), str(self.values[index]), expected)

    def refuse(self, row: int, actual: str, expected: str) -> NoReturn:
        """Raise the error for a parquet file's row."""
        raise LockstepError(
            f"{self.name}: column {self.column}, row {self.first + row}: found {actual}, expected "
            f"{expected}"
        )

    def _row_of(self, index: int) -> int:
        return int(np.searchsorted(self.ends, index, side="right"))


PROVIDER = Provider(survey, fetch)
