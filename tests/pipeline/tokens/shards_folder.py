"""A folder of token shards with the arrays that a test gives it, here or elsewhere."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lockstep.files import sha256_file
from pipeline.net.origin import Origin
from pipeline.runfile import Network
from pipeline.runfile.data import ShuffleDontShuffle, ShuffleSeeded
from pipeline.tokens.rows import ArrayRows, RowArray
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import ShardFile, Shards, read_shards, write_shards

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
        **{"source": {"read": "a test", "sha256": "cd" * 32}} | more,
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


# ---- What is in it ----


def open_shards(folder: Path, *arguments: object, **fields: object) -> Sequences:
    """Open the sequences of a split of a shards folder."""
    return Sequences(folder, read_shards(folder), *arguments, **fields)


def measure(
    folder: Path, token_size_in_bytes: int, names: Mapping[str, str] | None = None
) -> tuple[ShardFile, ...]:
    """Describe the token files in `train/` and `held_out/`, by name.

    Args:
      folder: the shards folder.
      token_size_in_bytes: 2 or 4.
      names: path in the folder -> name at the source; by default the same.
    """
    names = names or {}
    return tuple(
        ShardFile(
            path=(inside := f"{split}/{path.name}"),
            split=split,
            tokens=path.stat().st_size // token_size_in_bytes,
            sha256=sha256_file(path),
            name=names.get(inside, inside),
        )
        for split in ("train", "held_out")
        for path in sorted((folder / split).glob("*.ds"))
    )


def rows_of(**arrays: np.ndarray) -> ArrayRows:
    """What a row of these arrays is."""
    return ArrayRows(
        arrays=tuple(
            RowArray(name=name, dtype=array.dtype.name, shape=array.shape[1:])
            for name, array in arrays.items()
        )
    )


def decoded(rows: ArrayRows, rows_NW: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of rows, by name."""
    bytes_NB = np.ascontiguousarray(rows_NW).view(np.uint8)
    return {
        array.name: np.ascontiguousarray(bytes_NB[:, at : at + array.nbytes])
        .view(array.dtype)
        .reshape(len(rows_NW), *array.shape)
        for array, at in rows.places()
    }


# ---- Files elsewhere ----


def elsewhere(file: ShardFile, url: str, size: int, **of_origin) -> ShardFile:
    """The file, as it is listed where it is not in the folder."""
    origin = Origin(url=url, size=size, **of_origin)
    return file.model_copy(update={"sha256": None, "origin": origin})


def send_away(folder: Path, store: Path, which) -> None:
    """Moves files out of the folder, to be read where they go."""
    store.mkdir(exist_ok=True)

    def change(document: dict) -> None:
        for number, file in enumerate(document["files"]):
            if number in which:
                here, there = folder / file["path"], store / f"{number}.ds"
                here.rename(there)
                status = there.stat()
                tag = str(status.st_mtime_ns)
                origin = {"url": str(there), "size": status.st_size, "tag": tag}
                file.update(sha256=None, origin=origin, name=f"far/{number}.ds")

    edit(folder, change)


class FakeStreams:
    """Reads files of this machine by their addresses, and writes down what it is asked."""

    def __init__(self, network: Network):
        self.network, self.read_ranges, self.expected = network, [], []
        FakeStreams.last = self

    def read(self, wanted) -> list[bytes]:
        self.read_ranges += wanted
        return [Path(origin.url).read_bytes()[start:stop] for origin, start, stop in wanted]

    def expect(self, wanted) -> None:
        self.expected += wanted
