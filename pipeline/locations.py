"""`[model.LLM]` data_location: where the tokens come from, and in which order they are used.

A class is named after its enum and Psyche's variant; fields and rules are Psyche's. Our own:
`DataCorpus`, and the table form of `DataLocal`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.table import U8, U32, URL_BYTES, AsTuple, Name, Url, Variant, one_of, text, wrong

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


class DataCorpus(Data):
    """The source of Python's standard library, which every machine has, with its own tokenizer."""

    vocab_size: Annotated[int, Field(ge=258, le=2**16)]
    """Tokens of the byte-level BPE trained on it: 256 bytes, two special ones, and merges."""
    held_out_percent: Annotated[float, Field(gt=0, lt=100)]
    """Percent of the bytes, in whole files, kept out of training, to measure on."""
    shuffle: AnyShuffle
    """The order in which the sequences of the train split are used."""


AnyData = one_of(
    DataDummy,
    DataServer,
    DataLocal,
    DataHttp,
    DataWeightedHttp,
    DataPreprocessed,
    DataCorpus,
)
