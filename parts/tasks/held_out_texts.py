"""The held-out split of a run as text: its documents, which no peer trains on."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lockstep.programs.columns import PLAIN
from pipeline import runfile
from pipeline.language_model import held_out
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_TOKENS = 2**19  # that are read
STRETCH = 16  # sequences that are read together, so that lines have lines before them


def documents(run: runfile.Run, shards: Path, tokenizer: "Tokenizer") -> Iterator[str]:
    """Yield documents of the held-out split; one that continues in another file, in parts.

    Of a split of more than `MOST_TOKENS`, stretches are read that the run's seed spreads over it.
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
    for indices_N in _stretches(data, length, run.peers.seed):
        tokens_N = data.take(indices_N).ravel()
        for document_N in np.split(tokens_N, np.flatnonzero(np.isin(tokens_N, special))):
            yield tokenizer.decode(document_N.tolist(), skip_special_tokens=True)


def _stretches(data: Sequences, length: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the sequences that are read, those that follow one another in a file together."""
    count, most = len(data), MOST_TOKENS // length
    stretch_M = held_out.spread(-(-count // STRETCH), -(-most // STRETCH), seed)
    index_N = (stretch_M[:, None] * STRETCH + np.arange(STRETCH)).ravel()
    index_N = index_N[index_N < count]
    ends_F = np.cumsum([file.tokens // length for file in data.files])
    file_N = np.searchsorted(ends_F, index_N, side="right")
    apart_N = (np.diff(index_N) > 1) | (np.diff(file_N) > 0)
    yield from np.split(index_N, np.flatnonzero(apart_N) + 1)
