"""A folder of token shards with the arrays that a test gives it."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.runfile.data import ShuffleDontShuffle, ShuffleSeeded
from pipeline.tokens.shards import ShardFile, Shards, write_shards
from tests.pipeline.tokens.measured import measure

SEED = tuple(range(1, 33))
IN_ORDER, SEEDED = ShuffleDontShuffle(), ShuffleSeeded(seed=SEED)


def shards_folder(
    folder: Path, train=(), held_out=(), *, size=2, vocab=1000, shuffle=IN_ORDER, part=(), **more
) -> Path:
    """A shards folder with these token arrays, one for each file, of these parts."""
    for split, arrays in (("train", train), ("held_out", held_out)):
        (folder / split).mkdir(parents=True)
        for number, array in enumerate(arrays):
            np.asarray(array).astype(f"<u{size}").tofile(folder / split / f"{number:05}.ds")
    files = list(measure(folder, size))
    for number, which in enumerate(part):
        files[number] = files[number].model_copy(update={"part": which})
    write(folder, size=size, vocab=vocab, shuffle=shuffle, files=files, **more)
    return folder


def write(folder: Path, files: Sequence[ShardFile], size=2, vocab=1000, shuffle=IN_ORDER, **more):
    shards = Shards(
        format=2,
        token_size_in_bytes=size,
        vocab_size=vocab,
        shuffle=shuffle,
        files=tuple(files),
        source={"read": "a test"},
        **more,
    )
    write_shards(folder, shards)


def edit(folder: Path, change) -> None:
    path = folder / "shards.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def files_of(counts: Sequence[int], width: int) -> list[np.ndarray]:
    """Files of so many rows each, and of some numbers beyond; no number comes twice."""
    rng, start, files = np.random.default_rng(0), 0, []
    for count in counts:
        length = count * width + int(rng.integers(0, width))
        files.append(np.arange(start, start + max(1, length)))
        start += length
    return files
