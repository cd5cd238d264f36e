"""`[model.LLM]` data_location: the source of the tokens, and the order of their use.

A class is named after its enum and Psyche's variant; fields and rules are Psyche's. Our own:
`DataCorpus`, `DataText`, `DataHub`, `DataUrl`, the table form of `DataLocal` and the table
`[download]`.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lockstep.tables.table import (
    U8,
    U32,
    URL_BYTES,
    AsTuple,
    Count,
    Distinct,
    Name,
    NoPassword,
    Table,
    Url,
    text,
    wrong,
)
from lockstep.tables.variant import Variant, one_of

TokenSize = Literal["TwoBytes", "FourBytes"]
TOKEN_BYTES = {"TwoBytes": 2, "FourBytes": 4}
HeldOutPercent = Annotated[float, Field(gt=0, lt=100)]
Seed = Annotated[tuple[U8, ...], Field(min_length=32, max_length=32), AsTuple]


class Shuffle(Variant):
    """Order of the train split's sequences."""

    where = "shuffle"


class ShuffleDontShuffle(Shuffle):
    """Sequences in file order."""


class ShuffleSeeded(Shuffle):
    """A pseudo-random permutation, a pure function of the seed."""

    newtype = "seed"
    seed: Seed
    """Seed of the permutation: 32 bytes, as numbers from 0 to 255."""


AnyShuffle = one_of(Shuffle)


class Location(Variant):
    """Where the files of an Http data location are."""

    where = "model.LLM.data_location.Http.location"


class LocationGcp(Location):
    """A public bucket of Google Cloud Storage."""

    bucket_name: Name
    """Name of the bucket, at most 64 bytes."""
    filter_directory: text(URL_BYTES, empty=True)
    """Folder in the bucket, at most 192 bytes; empty means the whole bucket."""


class LocationSingleUrl(Location):
    """A single file."""

    newtype = "url"
    url: Annotated[Url, NoPassword]
    """Address of the file, at most 192 bytes; a user and password, if any, come from ~/.netrc."""


class LocationNumberedFiles(Location):
    """Files whose addresses differ only in a number."""

    url_template: Annotated[Name, NoPassword]
    """Address of the files, with {} in place of the number; at most 64 bytes. A user and password,
    if any, come from ~/.netrc."""
    start_index: U32
    """Number of the first file."""
    n_left_pad_zeros: U8
    """Minimum digits of a number; shorter numbers are padded with zeros on the left."""
    num_files: Annotated[U32, Field(ge=1)]
    """Number of files."""

    @model_validator(mode="after")
    def _number_has_one_position(self) -> "LocationNumberedFiles":
        if self.url_template.count("{}") != 1:
            raise wrong("url_template", "exactly one {}")
        return self


class Data(Variant):
    """Source of the tokens."""

    where = "model.LLM.data_location"
    holds_tokens: ClassVar[bool] = True
    """Whether a row is tokens."""


class DataDummy(Data):
    """All-zero tokens, for tests of everything else."""


class DataServer(Data):
    """A Psyche data server."""

    newtype = "address"
    address: Name
    """Address of the server as host:port, at most 64 bytes."""


class DataLocal(Data):
    """A local folder of .ds files. Written as a string: two-byte tokens, not shuffled."""

    newtype = "path"
    path: Url
    """Path of the folder, at most 192 bytes."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Size of a token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """Order of the train split's sequences."""


class DataHttp(Data):
    """Token files on web servers or in a public bucket, read by range requests."""

    token_size_in_bytes: TokenSize
    """Size of a token in the files."""
    shuffle: AnyShuffle
    """Order of the train split's sequences."""
    location: one_of(Location)
    """Addresses of the files."""


class DataWeightedHttp(Data):
    """Several Http data locations, mixed by weight."""

    newtype = "url"
    url: Annotated[Url, NoPassword]
    """Address of the JSON document that lists them, at most 192 bytes."""


class DataPreprocessed(Data):
    """Parquet files of tokenized and packed sequences."""

    newtype = "source"
    source: Url
    """Local folder, or dataset on the Hugging Face hub if there is no such folder; at most 192
    bytes."""


class DataHub(Data):
    """Token files of a dataset on the Hugging Face hub."""

    repo_id: Name
    """Name of the dataset as owner/name, at most 64 bytes."""
    revision: Name | None = None
    """Commit, branch or tag of the dataset; by default the main branch."""
    patterns: Annotated[tuple[Name, ...], Field(min_length=1), AsTuple] = ("*.ds",)
    """Shell patterns of the token files' paths, where * also matches a slash."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Size of a token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """Order of the train split's sequences."""


class DataUrl(Data):
    """Token files at any address that fsspec supports, such as s3://bucket/folder."""

    url: Annotated[Url, NoPassword]
    """Address of a folder or a file, at most 192 bytes. Credentials come from the environment."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Size of a token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """Order of the train split's sequences."""


class TokenizedText(Data):
    """Text that the stage download tokenizes."""

    vocab_size: Annotated[int, Field(ge=258, le=2**16)] | None = None
    """Vocabulary size of the byte-level BPE tokenizer to train on the text, 258 to 65536: 256
    bytes, two special tokens, and merges. Give either this or tokenizer."""
    tokenizer: Url | None = None
    """Existing tokenizer to use instead: a folder with its files, or owner/name on the hub;
    at most 192 bytes."""
    tokenizer_revision: Name | None = None
    """Commit, branch or tag of a tokenizer on the hub; by default the main branch."""
    shuffle: AnyShuffle
    """Order of the train split's sequences."""
    most_seen_percent: Annotated[float, Field(ge=0, lt=100)] | None = None
    """Percentage of a held-out document's windows of 32 tokens that may stand word for word in the
    train split. A document of more is left out: neither measured nor trained on. By default none
    is, as in older releases."""

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "TokenizedText":
        if (self.vocab_size is None) == (self.tokenizer is None):
            raise wrong("vocab_size", "either vocab_size or tokenizer")
        if self.tokenizer_revision is not None and self.tokenizer is None:
            raise wrong("tokenizer_revision", "no revision without tokenizer")
        return self


class DataCorpus(TokenizedText):
    """The source of packages that constraints.txt pins, tokenized by the stage download."""

    packages: Annotated[tuple[Name, ...], Field(min_length=1), Distinct, AsTuple] | None = None
    """Names of the packages, as on PyPI; by default eight of the extra engines, 12 MB."""
    held_out_percent: HeldOutPercent
    """Percentage of the bytes that no peer trains on, for measurements, above 0 and below 100; in
    whole packages with most_seen_percent, in whole files without."""

    @model_validator(mode="before")
    @classmethod
    def _files_are_text(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        if table.get("path") is not None:
            raise wrong("path", "none; for files use data_location.Text, with source and column")
        # records of older releases have both keys, which meant nothing without a path
        return {key: value for key, value in table.items() if key not in ("path", "text_key")}


class TextSource(Table):
    """Documents wherever they lie: parquet, JSON lines or text."""

    source: Annotated[Url, NoPassword]
    """A file or folder on this machine; the address of a file (https://) or of a folder in a bucket
    (s3://, gs://); or owner/name of a dataset on the Hugging Face hub, if there is no such folder;
    at most 192 bytes. If the only file is a text file, it is cut into many documents between
    lines."""
    revision: Name | None = None
    """Commit, branch or tag of a dataset on the hub; by default the main branch."""
    subset: Name | None = None
    """Subset of a dataset on the hub, as its README.md lists them; by default all its files."""
    split: Name = "train"
    """Split of the subset; held_out_percent chooses from it what is held out."""
    files: Annotated[tuple[Name, ...], Field(min_length=1), AsTuple] = ("*",)
    """Shell patterns of the files' paths, where * also matches a slash. Of the files that match,
    those are read that end in .parquet, .jsonl, .jsonl.gz, .jsonl.zst, .json.gz, .json.zst or .txt;
    in .json, if there is no other file or a pattern is given; or in the ending of a pattern, such
    as *.md."""
    column: Name = "text"
    """Column of a parquet file, or key of a JSON line, that holds the text."""

    @model_validator(mode="after")
    def _split_is_of_a_subset(self) -> "TextSource":
        if self.split != "train" and self.subset is None:
            raise wrong("split", "train without subset")
        return self


class WeightedSource(TextSource):
    """One of several sources of text."""

    weight: Annotated[float, Field(gt=0)]
    """Share of the trained sequences that this source contributes, relative to the sum of all
    weights."""


class HashedText(TokenizedText):
    """Text of which documents are held out by their hash."""

    held_out_percent: HeldOutPercent
    """Percentage of the documents that no peer trains on, for measurements, above 0 and below 100:
    those whose SHA-256, as a fraction of the largest possible, is below it. Adding data never moves
    a document from one side to the other."""


class DataText(HashedText, TextSource):
    """Documents wherever they lie, tokenized by the stage download: parquet, JSON lines or text."""


class DataWeightedText(HashedText):
    """Documents of several sources, each as in Text, mixed by weight."""

    sources: Annotated[tuple[WeightedSource, ...], Field(min_length=1), AsTuple]
    """The sources. [download] limit is divided among them by weight."""


class Limit(Table):
    """The part of a data location to use: its first files or tokens, or what some rounds need."""

    files: Count | None = None
    """Number of files of the train split."""
    tokens: Count | None = None
    """Number of tokens of the train split; the last file is cut short."""
    steps: Count | None = None
    """Number of rounds that the data must suffice for; requires batch and max_seq_len."""
    batch: Count | None = None
    """Sequences in the largest round; equals config.global_batch_size_end. Only with steps."""
    max_seq_len: Count | None = None
    """Length of a sequence in tokens; equals model.LLM.max_seq_len. Only with steps."""

    @model_validator(mode="after")
    def _one_measure(self) -> "Limit":
        if [self.files, self.tokens, self.steps].count(None) != 2:
            raise wrong((), "exactly one of files, tokens and steps")
        for key in ("batch", "max_seq_len"):
            if (getattr(self, key) is None) != (self.steps is None):
                raise wrong(key, "batch and max_seq_len with steps, and neither without")
        return self

    @property
    def sequences(self) -> int | None:
        """Sequences that the steps need, or None without steps."""
        return None if self.steps is None else self.steps * self.batch


class Download(Table):
    """How much of the data is downloaded, and when."""

    stream: bool = False
    """Whether training reads tokens from their source by range requests, instead of downloading
    them first; the batches are the same."""
    limit: Limit | None = None
    """The part of the data location to use; by default all of it."""
