"""`data_location.Preprocessed`: rows of token ids in parquet files (parquet.py), made into shards.

Names say what is held out, as choice.py has it. A limit is on the train split; where it
cuts by tokens or steps, at most HELD_OUT_TOKENS are held out.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from lockstep.programs.columns import Column, counted
from lockstep.tables.variant import variant_name
from pipeline.net.transfers.store import Stored
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
from pipeline.sources.rows.parquet import COLUMNS, Parquet
from pipeline.sources.token_files.choice import is_by_default, max_tokens, sides
from pipeline.sources.token_files.fetching import fetch_files, fetch_tokenizer
from pipeline.sources.token_files.hub import REPO_ID, list_dataset
from pipeline.sources.token_files.listing import (
    Listing,
    LocationFile,
    check_local,
    local_file,
    remembered,
    tokenizer_files,
)
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.given_files import expand, unchanged, walk
from pipeline.tokens.shards import ShardFile, Split, write_shard

SHARD_NUMBERS = 2**20


def survey(location: DataPreprocessed, options: FetchOptions) -> Survey:
    """Describe what a run would read; of files of this machine, how many tokens that are.

    Raises:
      LockstepError: see `fetch`, except for what only the rows tell.
    """
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
    by_default = is_by_default(listing, options.limit)
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
                if left < shards.length:
                    break
    for split, count in shards.unlabelled.items():
        if count:
            of_all = f"{count:,} of {shards.rows[split]:,} {split} rows"
            warnings.append(f"{listing.read}: {of_all} have no label that a loss counts")
    if not shards.rows[TRAIN]:
        found = "; ".join(["found no rows to train on, expected some", *warnings])
        raise LockstepError(f"{listing.read}: {found}")
    return Fetched(
        files=tuple(shards.files),
        token_size_in_bytes=4,
        vocab_size=vocab_size,
        shuffle=listing.shuffle,
        source={
            "read": listing.read,
            **listing.says,
            "files": {split: list(names) for split, names in read.items()},
            "rows": shards.rows,
            "row_tokens": shards.length,
            "sha256": listing_sha256(pair for names in read.values() for pair in names.items()),
        },
        columns=shards.kinds,
        held_out_by_default=is_by_default(listing, options.limit),
        warnings=tuple(warnings),
    )


def _fetch(
    files: list[LocationFile], batch: int, options: FetchOptions
) -> Iterator[tuple[LocationFile, Stored]]:
    """Yield files with their place in the store, fetched `batch` at a time as they are needed."""
    for start in range(0, len(files), batch):
        some = files[start : start + batch]
        yield from zip(some, fetch_files(some, options), strict=True)


class _RowShards:
    """The shards, as they are made of one parquet file after another.

    Attributes:
      files: the shards.
      rows: number of rows of each split.
      unlabelled: number of those whose labels are all UNCOUNTED: nothing is learned from them.
      columns, length: columns and tokens of a row, of the first file that has rows and so of all.
    """

    def __init__(self, folder: Path, vocab_size: int | None):
        self.folder, self.vocab_size = folder, vocab_size
        self.files: list[ShardFile] = []
        self.rows: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}
        self.unlabelled: dict[Split, int] = {TRAIN: 0, HELD_OUT: 0}
        self.columns: tuple[str, ...] = ()
        self.length = 0
        self._first = ""
        self._counts = {TRAIN: 0, HELD_OUT: 0}

    @property
    def kinds(self) -> tuple[Column, ...]:
        """What the columns hold."""
        return tuple(COLUMNS[column] for column in self.columns)

    def add(self, file: Parquet, name: str, split: Split, most: int | None) -> int:
        """Make shards of a file's first `most` tokens, or of all; return how many tokens.

        Raises:
          LockstepError: it has other columns than the first, or a row is invalid.
        """
        if not self.columns:
            self.columns, self.length, self._first = file.columns, file.length, file.name
        if file.columns != self.columns:
            found, expected = ", ".join(file.columns), ", ".join(self.columns)
            raise LockstepError(
                f"{file.name}: found columns {found}, expected {expected} as in {self._first}"
            )
        rows = None if most is None else most // self.length
        size = max(1, SHARD_NUMBERS // (len(self.columns) * self.length))
        done = 0
        for rows_NW in file.read(self.length, self.vocab_size, size, rows):
            last = done + len(rows_NW) - 1
            self.unlabelled[split] += int((~counted(rows_NW, self.kinds).any(axis=1)).sum())
            numbers = rows_NW.astype("<u4")  # -100 as its 32 bits
            name_of_rows = f"{name}, rows {done} to {last}"
            self.files.append(
                write_shard(self.folder, split, self._counts[split], numbers, name_of_rows)
            )
            self._counts[split] += 1
            done = last + 1
        self.rows[split] += done
        return done * self.length


# ---- Which files ----


def _choose(
    location: DataPreprocessed, options: FetchOptions
) -> tuple[Listing, dict[Split, list[LocationFile]], int, list[str]]:
    """Return the listing, the files of each split to read, those to train on, and warnings."""
    listing = _list(location, options)
    if not listing.files:
        raise LockstepError(f"{listing.read}: found no file that ends in .parquet")
    train, held_out, warnings = sides(listing, options, unnamed=False)
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
        commit, files = list_dataset(repo_id, None, f"{where}: {repo_id}", options.network)
        return _listing(f"{repo_id} on the hub", files, {"repo_id": repo_id, "commit": commit})

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


PROVIDER = Provider(survey, fetch)
