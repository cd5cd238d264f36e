"""How fast sequences are read, and files fetched: `python -m benchmarks.data`.

Part `shards`, of files in a folder. A JSON line for each way of reading, in order and shuffled, in
batches of 8 and of 256 x 2,048 tokens, position after position as training asks for them. Between
its batches, plain NumPy gathers the same sequences out of `np.memmap`s of the same files, in two
ways, of which the faster one counts: row by row, and file by file. It neither finds where a
position is nor looks at ids, and it keeps all it has read in memory. Then a line for the memory
that reading all positions once takes, and one for the time until 10,000 shards are open. What is
read lies in the page cache: the disk is not measured.

Part `fetch`: transfers.py.

Compare lines only of one quiet machine.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import transfers
from benchmarks.resident import peak
from lockstep.machine import allocator
from lockstep.programs.permutation import permute
from pipeline.runfile.data import Shuffle, ShuffleDontShuffle, ShuffleSeeded
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import ShardFile, Shards, read_shards, write_shards

LENGTH, VOCABULARY, TOKEN_BYTES = 2048, 2**15, 2
BATCHES = 8, 256
MANY, REPEATS = 10_000, 5
SEED = bytes(range(32))
ORDERS = {"in order": ShuffleDontShuffle(), "shuffled": ShuffleSeeded(seed=tuple(SEED))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gb", type=float, default=1.0, help="of shards")
    parser.add_argument("--files", type=int, default=10, help="that these are")
    chosen = parser.parse_args()
    allocator.tune()
    for part in chosen.part:
        with tempfile.TemporaryDirectory() as folder:
            for line in PARTS[part](Path(folder), chosen):
                print(json.dumps({"benchmark": "data", "part": part} | line), flush=True)


# ---- Shards in a folder ----


def shards(folder: Path, chosen: argparse.Namespace) -> Iterator[dict]:
    """Sequences of a folder, in each order and size of batch; memory; start-up."""
    per_file = int(chosen.gb * 1e9 / chosen.files / TOKEN_BYTES / LENGTH)
    files = make_files(folder, chosen.files, per_file)
    for order, shuffle in ORDERS.items():
        yield {"measured": "memory", "order": order} | memory(opened(folder, files, shuffle))
    for order, shuffle in ORDERS.items():
        sequences = opened(folder, files, shuffle)
        for batch in BATCHES:
            yield {"measured": "reading", "order": order} | reading(sequences, shuffle, batch)
    many = make_files(folder / "many", MANY, 1)
    yield {"measured": "start-up"} | start_up(folder / "many", many)


def make_files(folder: Path, count: int, sequences: int) -> list[ShardFile]:
    """Token files of random ids, of so many sequences each."""
    (folder / "train").mkdir(parents=True)
    rng, files = np.random.default_rng(0), []
    for number in range(count):
        path, length = f"train/{number:05}.ds", sequences * LENGTH
        rng.integers(VOCABULARY, size=length, dtype=np.uint16).tofile(folder / path)
        file = ShardFile(path=path, split="train", tokens=length, sha256="0" * 64, name=path)
        files.append(file)
    return files


def opened(folder: Path, files: list[ShardFile], shuffle: Shuffle, said: int = 0) -> Sequences:
    write(folder, files, shuffle, said)
    return Sequences(folder, read_shards(folder), "train", LENGTH)


def write(folder: Path, files: list[ShardFile], shuffle: Shuffle, said: int) -> None:
    listed = Shards(
        format=2,
        token_size_in_bytes=TOKEN_BYTES,
        vocab_size=VOCABULARY,
        shuffle=shuffle,
        files=tuple(files),
        source={"read": said},
    )
    write_shards(folder, listed)


def memory(sequences: Sequences) -> dict:
    """What the process holds at its peak while it reads all sequences, beyond what it held."""

    def read_all() -> None:
        for start in range(0, len(sequences), BATCHES[0]):
            sequences.take(np.arange(start, min(start + BATCHES[0], len(sequences))))

    grown = peak(read_all)
    read_mb = len(sequences) * LENGTH * TOKEN_BYTES / 1e6
    return {"read_mb": round(read_mb), "grown_mib": round(grown / 2**20, 1)}


def reading(sequences: Sequences, shuffle: Shuffle, batch: int) -> dict:
    """Medians over batches, and over NumPy's in between; at most all positions once."""
    positions_N = np.arange(len(sequences))
    found_N = positions_N
    if isinstance(shuffle, ShuffleSeeded):
        found_N = permute(SEED, positions_N, len(sequences))
    counts_F = [file.tokens // LENGTH for file in sequences.files]
    file_N = np.repeat(np.arange(len(counts_F)), counts_F)[found_N]
    row_N = np.concatenate([np.arange(count) for count in counts_F])[found_N]
    maps = [
        np.memmap(sequences.folder / file.path, f"<u{TOKEN_BYTES}", "r").reshape(-1, LENGTH)
        for file in sequences.files
    ]

    def ours(span: slice) -> np.ndarray:
        return sequences.take(np.arange(span.start, span.stop))

    def by_row(span: slice) -> np.ndarray:
        rows_NL = np.empty((batch, LENGTH), np.int32)
        for row_L, file, row in zip(rows_NL, file_N[span], row_N[span], strict=True):
            row_L[:] = maps[file][row]
        return rows_NL

    def by_file(span: slice) -> np.ndarray:
        if len(maps) == 1:
            return maps[0][row_N[span]].astype(np.int32)
        rows_NL = np.empty((batch, LENGTH), np.int32)
        for file in np.unique(file_N[span]):
            rows = file_N[span] == file
            rows_NL[rows] = maps[file][row_N[span][rows]]
        return rows_NL

    folder = sequences.folder
    other = Sequences(folder, read_shards(folder), "train", LENGTH)  # asked for places in between
    ways = (ours, by_row, by_file)
    seconds: dict[Callable, list[float]] = {way: [] for way in ways}
    batches = len(sequences) // batch
    for number in range(batches):
        # Each is a third of the data ahead of the one before: nobody finds in the processor's
        # caches what another has just read.
        for turn, way in enumerate(ways):
            start = (number + turn * batches // len(ways)) % batches * batch
            span = slice(start, start + batch)
            began = time.perf_counter()
            rows_NL = way(span)
            seconds[way].append(time.perf_counter() - began)
        if number % 100 == 0:
            np.testing.assert_array_equal(rows_NL, other.take(np.arange(span.start, span.stop)))
    median = {way: float(np.median(times)) for way, times in seconds.items()}
    numpy_seconds = min(median[by_row], median[by_file])
    per_second = batch / median[ours]
    return {
        "batch": batch,
        "tokens": LENGTH,
        "files": len(maps),
        "batches": len(seconds[ours]),
        "batch_milliseconds": round(1e3 * median[ours], 4),
        "slowest_percent_milliseconds": round(1e3 * float(np.percentile(seconds[ours], 99)), 4),
        "sequences_per_second": round(per_second),
        "mb_per_second": round(per_second * LENGTH * TOKEN_BYTES / 1e6),
        "numpy_by_row_milliseconds": round(1e3 * median[by_row], 4),
        "numpy_by_file_milliseconds": round(1e3 * median[by_file], 4),
        "of_numpy": round(numpy_seconds / median[ours], 2),
    }


def start_up(folder: Path, files: list[ShardFile]) -> dict:
    """Medians of the time until a folder is open: first, and again in the same process."""
    seconds: dict[str, list[float]] = {"first": [], "again": []}
    for repeat in range(REPEATS):
        write(folder, files, ORDERS["shuffled"], repeat)  # other bytes each time
        for times in seconds.values():
            began = time.perf_counter()
            Sequences(folder, read_shards(folder), "train", LENGTH)
            times.append(time.perf_counter() - began)
    median = {f"{name}_milliseconds": 1e3 * np.median(times) for name, times in seconds.items()}
    return {"files": len(files)} | {name: round(ms, 1) for name, ms in median.items()}


def fetch(folder: Path, chosen: argparse.Namespace) -> Iterator[dict]:
    """One large file, and many small ones, from a web server on this machine, beside curl."""
    yield {"measured": "large"} | transfers.large(folder, int(chosen.gb * 1e9))
    for latency in (0.0, 0.02):
        yield {"measured": "small"} | transfers.small(folder, MANY, LENGTH * TOKEN_BYTES, latency)


PARTS = {"shards": shards, "fetch": fetch}


if __name__ == "__main__":
    main()
