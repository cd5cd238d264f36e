"""Fetching from a web server on this machine, beside curl: one large file, and many small ones.

The server runs in a process of its own. Rates are of what each tool needs from the first request to
the last byte on the disk; ours also hashes what comes. For `python -m benchmarks.data`.
"""

import multiprocessing
import multiprocessing.connection
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.machine.progress import Progress
from pipeline.net.origin import Origin
from pipeline.net.transfers import store
from pipeline.runfile import Network

REPEATS = 5
NETWORK = Network()


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
        for work, taken in zip((ours, other), seconds, strict=True):
            for name in ("store", "curl"):
                shutil.rmtree(folder / name, ignore_errors=True)
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return tuple(map(statistics.median, seconds))


def curl(urls: list[str], folder: Path) -> None:
    """Fetches with curl, in one process, over as many connections as we use."""
    folder.mkdir()
    asked = "".join(f'url = "{url}"\noutput = "{folder / Path(url).name}"\n' for url in urls)
    command = ["curl", "-s", "-Z", "--no-progress-meter"]
    command += ["--parallel-max", str(NETWORK.connections), "-K", "-"]
    subprocess.run(command, input=asked.encode(), check=True)


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

    def late(asked: str, answer: Answer) -> Answer:
        time.sleep(latency)
        return answer

    files = Files(faults=[late] if latency else [])
    files.add(folder)
    with files.serving():
        pipe.send(files.address)
        pipe.recv()
