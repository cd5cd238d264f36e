"""`data_location.Dummy`: endless zeros, to try everything else.

Psyche's are sequences of 2,048 tokens whatever max_seq_len says; ours are of max_seq_len.
"""

from pathlib import Path

from pipeline.net.origin import Origin
from pipeline.runfile.data import DataDummy, ShuffleDontShuffle
from pipeline.sources.provider import TRAIN, Fetched, FetchOptions, Provider, Survey, SurveyedFile
from pipeline.stage.artifacts import listing_sha256
from pipeline.tokens.shards import ZEROS, ShardFile, shard_path

DUMMY_TOKENS = 2**48  # more than any run asks for


def survey(location: DataDummy, options: FetchOptions) -> Survey:
    """Describe the dummy: one file that exists nowhere."""
    return Survey("zeros", (SurveyedFile("zeros", TRAIN, 0, DUMMY_TOKENS),), 1)


def fetch(location: DataDummy, folder: Path, options: FetchOptions) -> Fetched:
    """List the dummy, one file that exists nowhere; nothing is fetched or written."""
    zeros = ShardFile(
        path=shard_path(TRAIN, 0),
        split=TRAIN,
        tokens=DUMMY_TOKENS,
        sha256=None,
        name="zeros",
        origin=Origin(url=ZEROS, size=2 * DUMMY_TOKENS),
    )
    return Fetched(
        files=(zeros,),
        token_size_in_bytes=2,
        vocab_size=None,
        shuffle=ShuffleDontShuffle(),
        source={"read": "zeros", "sha256": listing_sha256([("zeros", "")])},
        warnings=("the tokens are zeros, and nothing is held out",),
    )


PROVIDER = Provider(survey, fetch, streams=True)
