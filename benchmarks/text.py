"""Documents into tokens by stage download, next to `tokenizers` alone: `-m benchmarks.text`.

The documents are the source of the packages that every machine has, cut at 3,000 characters, in a
parquet file. Prints one JSON line: medians of turns, of `data_location.Text` from the file to
shards, and of `encode_batch` over all documents in memory; and the peak memory of the former alone.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from lockstep.machine.progress import Progress
from pipeline import sources
from pipeline.runfile import Network
from pipeline.runfile.data import DataText, ShuffleDontShuffle
from pipeline.sources.provider import FetchOptions
from pipeline.sources.text import corpus, tokenizer
from pipeline.tokens.tokenizer_files import save_tokenizer

CHARACTERS = 3000  # of a document
VOCABULARY = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--times", type=int, default=2, help="how often the documents are there")
    parser.add_argument("--documents", type=int, help="of these, the first")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.repeats, chosen.times, chosen.documents)))


def measure(repeats: int, times: int, documents: int | None) -> dict:
    """Turns of both on the same documents."""
    import pyarrow
    from pyarrow import parquet

    texts = [
        text[start : start + CHARACTERS]
        for file in corpus.find()
        for text in [file.path.read_text(errors="replace")]
        for start in range(0, len(text), CHARACTERS)
    ][:documents] * times
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in ("text", "tokenizer"):
            (folder / name).mkdir()
        table = pyarrow.table({"text": texts})
        parquet.write_table(table, folder / "text/a.parquet", compression="zstd")
        some = texts[: len(texts) // times]
        made = tokenizer.train_tokenizer(some, VOCABULARY, "here", "VOCABULARY")
        special = {"eos_token": tokenizer.END}
        save_tokenizer(made, folder / "tokenizer", special)
        peak = _peak(folder)
        seconds: dict[str, list[float]] = {"text": [], "encode_batch": []}
        for turn in range(repeats):
            seconds["text"].append(fetch(folder, str(turn)))
            began = time.perf_counter()
            made.encode_batch(texts, add_special_tokens=False)
            seconds["encode_batch"].append(time.perf_counter() - began)
    pairs = zip(seconds["encode_batch"], seconds["text"], strict=True)
    return {
        "benchmark": "text",
        "megabytes": round(sum(len(text.encode()) for text in texts) / 1e6, 1),
        "documents": len(texts),
        "repeats": repeats,
        **{f"{name}_seconds": round(median(s), 2) for name, s in seconds.items()},
        "speed_of_encode_batch": round(median(other / ours for other, ours in pairs), 3),
        "peak_mb": round(peak),
    }


def fetch(folder: Path, name: str) -> float:
    """The seconds of stage download's work on the folder's text."""
    location = DataText(
        source=str(folder / "text"),
        tokenizer=str(folder / "tokenizer"),
        held_out_percent=1.0,
        shuffle=ShuffleDontShuffle(),
    )
    store, progress = folder / "store", partial(Progress, "benchmark")
    options = FetchOptions(store, None, stream=False, network=Network(), progress=progress)
    (folder / name).mkdir()
    began = time.perf_counter()
    sources.fetch(location, folder / name, options)
    return time.perf_counter() - began


def _peak(folder: Path) -> float:
    """Megabytes that a process of its own needs at most to fetch the text."""
    child = f"""
from pathlib import Path
from benchmarks.text import fetch
fetch(Path({str(folder)!r}), "alone")
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    return float(done.stdout) / 1000


if __name__ == "__main__":
    main()
