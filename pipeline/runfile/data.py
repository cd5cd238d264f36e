"""`[model.LLM]` data_location: where the tokens come from, and in which order they are used.

A class is named after its enum and Psyche's variant; fields and rules are Psyche's. Our own:
`DataCorpus`, `DataHub`, `DataUrl`, the table form of `DataLocal`, and the table `[download]`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.runfile.serde_enum import Variant, one_of
from pipeline.runfile.table import (
    U8,
    U32,
    URL_BYTES,
    AsTuple,
    Name,
    Table,
    Url,
    text,
    wrong,
)

TokenSize = Literal["TwoBytes", "FourBytes"]
TOKEN_BYTES = {"TwoBytes": 2, "FourBytes": 4}


class Shuffle(Variant):
    """The order in which the sequences of the train split are used."""

    where = "shuffle"


class ShuffleDontShuffle(Shuffle):
    """The order of the files."""


class ShuffleSeeded(Shuffle):
    """A permutation that is a pure function of these bytes."""

    newtype = "seed"
    seed: Annotated[tuple[U8, ...], AsTuple, Field(min_length=32, max_length=32)]
    """32 numbers from 0 to 255."""


AnyShuffle = one_of(ShuffleDontShuffle, ShuffleSeeded)


class Location(Variant):
    """Where the files of a Http data location are."""

    where = "model.LLM.data_location.Http.location"


class LocationGcp(Location):
    """A public bucket of Google Cloud Storage."""

    bucket_name: Name
    """The bucket, at most 64 bytes."""
    filter_directory: text(URL_BYTES, empty=True)
    """The folder in the bucket, at most 192 bytes; empty is all of it."""


class LocationSingleUrl(Location):
    """One file."""

    newtype = "url"
    url: Url
    """Its address, at most 192 bytes."""


class LocationNumberedFiles(Location):
    """Files whose addresses differ in a number."""

    url_template: Name
    """The address with {} for the number, at most 64 bytes."""
    start_index: U32
    """The first number."""
    n_left_pad_zeros: U8
    """Digits of the number; shorter ones get zeros in front."""
    num_files: Annotated[U32, Field(ge=1)]
    """How many files."""

    @model_validator(mode="after")
    def _one_place_for_the_number(self) -> "LocationNumberedFiles":
        if self.url_template.count("{}") != 1:
            raise wrong("url_template", "exactly one {}")
        return self


class Data(Variant):
    """Where the tokens come from."""

    where = "model.LLM.data_location"


class DataDummy(Data):
    """Zeros, for tests of everything else."""


class DataServer(Data):
    """A Psyche data server."""

    newtype = "address"
    address: Name
    """host:port, at most 64 bytes."""


class DataLocal(Data):
    """A folder of .ds files of this machine. As a string: two-byte tokens, not shuffled."""

    newtype = "path"
    path: Url
    """The folder, at most 192 bytes."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Bytes of one token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """The order in which the sequences of the train split are used."""


class DataHttp(Data):
    """Files of tokens read by range requests."""

    token_size_in_bytes: TokenSize
    """Bytes of one token in the files."""
    shuffle: AnyShuffle
    """The order in which the sequences of the train split are used."""
    location: one_of(LocationGcp, LocationSingleUrl, LocationNumberedFiles)
    """Where the files are."""


class DataWeightedHttp(Data):
    """Several Http data locations, mixed by weight."""

    newtype = "url"
    url: Url
    """The address of the JSON that lists them, at most 192 bytes."""


class DataPreprocessed(Data):
    """Parquet files of token sequences that were packed in advance."""

    newtype = "source"
    source: Url
    """A folder of this machine, or else a dataset on the Hugging Face hub; at most 192 bytes."""


class DataHub(Data):
    """Token files of a dataset on the Hugging Face hub."""

    repo_id: Name
    """owner/name, at most 64 bytes."""
    revision: Name | None = None
    """A commit, a branch or a tag; absent is the main branch."""
    patterns: Annotated[tuple[Name, ...], AsTuple, Field(min_length=1)] = ("*.ds",)
    """Which files are token files: shell patterns of their paths, where * also matches a slash."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Bytes of one token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """The order in which the sequences of the train split are used."""


class DataUrl(Data):
    """Token files at an address that fsspec knows, such as s3://bucket/folder."""

    url: Url
    """A folder or a file, at most 192 bytes. Credentials come from the environment."""
    token_size_in_bytes: TokenSize = "TwoBytes"
    """Bytes of one token in the files."""
    shuffle: AnyShuffle = ShuffleDontShuffle()
    """The order in which the sequences of the train split are used."""


class DataCorpus(Data):
    """Text, tokenized here: the source of Python's standard library, or files of yours."""

    path: Url | None = None
    """A text file, a file of JSON lines (.jsonl or .jsonl.gz), or a folder of such files, at most
    192 bytes; absent is the source of Python's standard library, which every machine has."""
    text_key: Name = "text"
    """The key of the text in a JSON line."""
    vocab_size: Annotated[int, Field(ge=258, le=2**16)] | None = None
    """Tokens of the byte-level BPE trained on it: 256 bytes, two special ones, and merges."""
    tokenizer: Url | None = None
    """In place of vocab_size: a folder with a tokenizer.json, or owner/name on the hub; at most 192
    bytes."""
    tokenizer_revision: Name | None = None
    """Of a tokenizer on the hub: a commit, a branch or a tag; absent is the main branch."""
    held_out_percent: Annotated[float, Field(gt=0, lt=100)]
    """Percent of the bytes kept out of training, to measure on: in whole files where they fit, else
    in documents of each file."""
    shuffle: AnyShuffle
    """The order in which the sequences of the train split are used."""

    @model_validator(mode="after")
    def _one_tokenizer(self) -> "DataCorpus":
        if (self.vocab_size is None) == (self.tokenizer is None):
            raise wrong("vocab_size", "either vocab_size or tokenizer")
        if self.tokenizer_revision is not None and self.tokenizer is None:
            raise wrong("tokenizer_revision", "none without tokenizer")
        return self


AnyData = one_of(
    DataDummy,
    DataServer,
    DataLocal,
    DataHttp,
    DataWeightedHttp,
    DataPreprocessed,
    DataHub,
    DataUrl,
    DataCorpus,
)


class Limit(Table):
    """How much of a data location a run uses: its first files, tokens, or what steps need."""

    files: Annotated[int, Field(ge=1)] | None = None
    """Files of the train split."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the train split; the last file is cut short."""
    steps: Annotated[int, Field(ge=1)] | None = None
    """What so many rounds need; with batch and max_seq_len."""
    batch: Annotated[int, Field(ge=1)] | None = None
    """Sequences of a round, the largest: config.global_batch_size_end."""
    max_seq_len: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a sequence: model.LLM.max_seq_len."""

    @model_validator(mode="after")
    def _one_measure(self) -> "Limit":
        if [self.files, self.tokens, self.steps].count(None) != 2:
            raise wrong((), "one of files, tokens and steps")
        for key in ("batch", "max_seq_len"):
            if (getattr(self, key) is None) != (self.steps is None):
                raise wrong(key, "just with steps: both or neither")
        return self

    @property
    def sequences(self) -> int | None:
        """Sequences of `max_seq_len` tokens that the steps need."""
        return None if self.steps is None else self.steps * self.batch


class Download(Table):
    """How much of the data is fetched, and when."""

    stream: bool = False
    """Whether tokens are read from where they are while training, by ranges, instead of being
    fetched before; the batches are the same."""
    limit: Limit | None = None
    """How much of the data location is used; absent is all."""
