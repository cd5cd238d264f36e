"""The held-out split of a run as text: its documents, which no peer trains on."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline import runfile
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import PLAIN, read_shards

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 2**19  # that are read, the first of the split


def documents(run: runfile.Run, shards: Path, tokenizer: "Tokenizer") -> Iterator[str]:
    """Yield the documents of the held-out split; one that continues in another file, in parts.

    There are none where nothing is held out, where rows are not tokens, or where they have columns
    beside their tokens: such rows hold conversations or packed texts, whose lines do not follow one
    another. A special token of the tokenizer ends a document; `shards` is the folder that the stage
    download left.
    """
    listed, length = read_shards(shards), run.llm.max_seq_len
    if not run.held_out.sequences or listed.columns != PLAIN or listed.rows is not None:
        return
    data = Sequences(shards, listed, "held_out", length, run.runtime)
    added = tokenizer.get_added_tokens_decoder()
    special = [token for token, what in added.items() if what.special]
    first, left = 0, MOST_TOKENS // length
    for file in data.files:
        count = file.tokens // length
        taken = min(count, left)
        tokens_N = data.take(np.arange(first, first + taken)).ravel()
        for document_N in np.split(tokens_N, np.flatnonzero(np.isin(tokens_N, special))):
            yield tokenizer.decode(document_N.tolist(), skip_special_tokens=True)
        first, left = first + count, left - taken
