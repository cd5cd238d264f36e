"""How fast sequences are read, and files fetched: `python -m benchmarks.data`.

Part `shards`, of files in a folder. A JSON line for each way of reading, in order and shuffled, in
batches of 8 and of 256 x 2,048 tokens, position after position as training asks for them. Between
its batches, plain NumPy gathers the same sequences out of `np.memmap`s of the same files, in two
ways, of which the faster one counts: row by row, and file by file. It neither finds where a
position is nor looks at ids, and it keeps all it has read in memory. Then a line for the memory
that reading all positions once takes, and one for the time until 10,000 shards are open. What is
read lies in the page cache: the disk is not measured.

Part `fetch`, from a web server on this machine, beside curl: one large file, and many small ones.
The server runs in a process of its own. Rates are of what each tool needs from the first request to
the last byte on the disk; ours also hashes what comes.

Compare lines only of one quiet machine.
"""

import argparse
import json
import multiprocessing
import multiprocessing.connection
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.measuring import in_turns, peak
from lockstep.machine import allocator
from lockstep.machine.progress import Progress
from lockstep.programs.permutation import permute
from pipeline.net.origin import Origin
from pipeline.net.transfers import store
from pipeline.runfile import Network
from pipeline.runfile.data import Shuffle, ShuffleDontShuffle, ShuffleSeeded
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import ShardFile, Shards, read_shards, write_shards

LENGTH, VOCABULARY, TOKEN_BYTES = 2048, 2**15, 2
BATCHES = 8, 256
MANY, REPEATS = 10_000, 5
NETWORK = Network()
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


def opened(folder: Path, files: list[ShardFile], shuffle: Shuffle, repeat: int = 0) -> Sequences:
    write(folder, files, shuffle, repeat)
    return Sequences(folder, read_shards(folder), "train", LENGTH)


def write(folder: Path, files: list[ShardFile], shuffle: Shuffle, repeat: int) -> None:
    manifest = Shards(
        format=2,
        token_size_in_bytes=TOKEN_BYTES,
        vocab_size=VOCABULARY,
        shuffle=shuffle,
        files=tuple(files),
        source={"read": repeat},
    )
    write_shards(folder, manifest)


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
    source_N = positions_N
    if isinstance(shuffle, ShuffleSeeded):
        source_N = permute(SEED, positions_N, len(sequences))
    counts_F = [file.tokens // LENGTH for file in sequences.files]
    file_N = np.repeat(np.arange(len(counts_F)), counts_F)[source_N]
    row_N = np.concatenate([np.arange(count) for count in counts_F])[source_N]
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
    other = Sequences(folder, read_shards(folder), "train", LENGTH)  # reads in between
    ways = (ours, by_row, by_file)
    seconds: dict[Callable, list[float]] = {way: [] for way in ways}
    batches = len(sequences) // batch
    for number in range(batches):
        # Each is a third of the data ahead of the one before, so that none finds in the processor's
        # caches what another has just read.
        for turn, way in enumerate(ways):
            start = (number + turn * batches // len(ways)) % batches * batch
            span = slice(start, start + batch)
            started = time.perf_counter()
            rows_NL = way(span)
            seconds[way].append(time.perf_counter() - started)
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

    def opening() -> None:
        Sequences(folder, read_shards(folder), "train", LENGTH)

    seconds: dict[str, list[float]] = {"first": [], "again": []}
    for repeat in range(REPEATS):
        write(folder, files, ORDERS["shuffled"], repeat)  # other bytes each time
        for times in seconds.values():
            times += in_turns({"open": opening}, 1, warm=0)["open"]
    median = {f"{name}_milliseconds": 1e3 * np.median(times) for name, times in seconds.items()}
    return {"files": len(files)} | {name: round(ms, 1) for name, ms in median.items()}


# ---- Fetched from a web server, beside curl ----


def fetch(folder: Path, chosen: argparse.Namespace) -> Iterator[dict]:
    """One large file, and many small ones, from a web server on this machine, beside curl."""
    yield {"measured": "large"} | large(folder, int(chosen.gb * 1e9))
    for latency in (0.0, 0.02):
        yield {"measured": "small"} | small(folder, MANY, LENGTH * TOKEN_BYTES, latency)


class Quiet(Progress):
    """A bar that nobody sees."""

    def advance(self, count: int = 1, **fields: object) -> None:
        self.done += count


def fetched(origins: list[Origin], folder: Path) -> None:
    """Fetch files into an empty store."""
    transfers = [store.Transfer(origin.url, origin, origin.size) for origin in origins]
    with Quiet("data", total=1, unit="byte") as bar:
        store.fetch(transfers, folder, NETWORK, bar)


def large(folder: Path, size: int) -> dict:
    """One file of `size` bytes, by our fetch and by curl."""
    source = folder / "served" / "large.ds"
    source.parent.mkdir(exist_ok=True)
    piece = bytes(range(256)) * 2**12
    with open(source, "wb") as file:
        for _ in range(size // len(piece)):
            file.write(piece)
    size = source.stat().st_size
    with served(source.parent) as address:
        url = f"{address}/{source.name}"
        ours, curls = beside(
            lambda: fetched([Origin(url=url, size=size)], folder / "store"),
            lambda: curl([url], folder / "curl"),
            folder,
        )
    source.unlink()
    return {
        "bytes": size,
        "mb_per_second": round(size / 1e6 / ours),
        "curl_mb_per_second": round(size / 1e6 / curls),
        "of_curl": round(curls / ours, 2),
    }


def small(folder: Path, count: int, size: int, latency: float) -> dict:
    """Many files of `size` bytes, as many at a time as a run does, by our fetch and by curl.

    Args:
      folder: for what is served and fetched.
      count: files.
      size: bytes of each.
      latency: seconds that the server waits before each answer, as a network would.
    """
    source = folder / "served"
    source.mkdir(exist_ok=True)
    for number in range(count):
        (source / f"{number:05}.ds").write_bytes(number.to_bytes(8, "little") * (size // 8))
    with served(source, latency) as address:
        urls = [f"{address}/{number:05}.ds" for number in range(count)]
        ours, curls = beside(
            lambda: fetched([Origin(url=url, size=size) for url in urls], folder / "store"),
            lambda: curl(urls, folder / "curl"),
            folder,
        )
    shutil.rmtree(source)
    return {
        "files": count,
        "latency_milliseconds": 1e3 * latency,
        "bytes": count * size,
        "files_per_second": round(count / ours),
        "curl_files_per_second": round(count / curls),
        "of_curl": round(curls / ours, 2),
    }


def beside(ours: Callable[[], None], other: Callable[[], None], folder: Path) -> tuple[float, ...]:
    """Median seconds of both, taken in turn."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(REPEATS):
        for work, times in zip((ours, other), seconds, strict=True):
            for name in ("store", "curl"):  # not timed
                shutil.rmtree(folder / name, ignore_errors=True)
            times += in_turns({"work": work}, 1, warm=0)["work"]
    return tuple(map(statistics.median, seconds))


def curl(urls: list[str], folder: Path) -> None:
    """Fetch with curl, in one process, over as many connections as we use."""
    folder.mkdir()
    config = "".join(f'url = "{url}"\noutput = "{folder / Path(url).name}"\n' for url in urls)
    command = ["curl", "-s", "-Z", "--no-progress-meter"]
    command += ["--parallel-max", str(NETWORK.connections), "-K", "-"]
    subprocess.run(command, input=config.encode(), check=True)


@contextmanager
def served(folder: Path, latency: float = 0.0) -> Iterator[str]:
    """A web server over a folder, in another process; yields its address."""
    fork = multiprocessing.get_context("spawn")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_serve, args=(folder, latency, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send(None)
        process.join()


def _serve(folder: Path, latency: float, pipe: multiprocessing.connection.Connection) -> None:
    from tests.servers.files import Files
    from tests.servers.web import Answer

    def late(request: str, answer: Answer) -> Answer:
        time.sleep(latency)
        return answer

    files = Files(faults=[late] if latency else [])
    files.add(folder)
    with files.serving():
        pipe.send(files.address)
        pipe.recv()


PARTS = {"shards": shards, "fetch": fetch}


if __name__ == "__main__":
    main()
