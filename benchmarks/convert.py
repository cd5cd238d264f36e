"""Convert and export of a large model: `python -m benchmarks.convert`.

Makes a Hugging Face folder of a Llama with random weights, and turns it into params and back, each
in a process of its own: as stage convert does, which hashes what it reads beside that; without the
hashes; and back, as stage export does. Beside them, processes copy the folder's files, and the file
of params, flushed to the disk like what the others write; each replaces what it wrote before.

Prints one JSON line for each dtype: bytes; seconds and bytes read and written per second, medians
of interleaved repeats; the ratio to that of the copy that writes as much, since a disk takes more
bytes slower; the peak of memory, and the bound that it is to keep. Needs free disk space of six
times the float32 params, and returns it.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.measuring import alone, peak
from lockstep.machine import allocator

ALLOWANCE = 200 * 2**20  # bytes beside twice the largest tensor
SOURCE, PARAMS, EXPORT = "source", "params", "export"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the folder")
    parser.add_argument("--hidden", type=int, default=2048, help="width of the model")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("data"), help="on the disk to measure")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    allocator.tune()  # as every stage does
    if chosen.child:
        step, folder = chosen.child
        print(json.dumps(STEPS[step](Path(folder))))
        return
    for dtype in chosen.dtypes:
        with tempfile.TemporaryDirectory(dir=chosen.folder, prefix=".convert-") as folder:
            print(json.dumps(measure(Path(folder), dtype, chosen)), flush=True)


def measure(folder: Path, dtype: str, chosen: argparse.Namespace) -> dict:
    largest = write_model(
        folder / SOURCE,
        int(1e9 * chosen.gigabytes),
        dtype,
        hidden=chosen.hidden,
        vocabulary=chosen.vocabulary,
    )
    seconds, peaks = defaultdict(list), defaultdict(list)
    for _ in range(chosen.repeats):
        for step in STEPS:
            values = alone("convert", {}, "--child", step, str(folder))
            seconds[step].append(values["seconds"])
            peaks[step].append(values["peak_bytes"])
    nbytes = {name: size(folder / name) for name in (SOURCE, PARAMS, EXPORT)}
    moved = {
        "convert": nbytes[SOURCE] + nbytes[PARAMS],
        "convert_unhashed": nbytes[SOURCE] + nbytes[PARAMS],
        "export": nbytes[PARAMS] + nbytes[EXPORT],
        "copy": 2 * nbytes[SOURCE],
        "copy_params": 2 * nbytes[PARAMS],
    }
    median = {step: float(np.median(times)) for step, times in seconds.items()}
    rate = {step: moved[step] / median[step] / 1e6 for step in median}
    return {
        "benchmark": "convert",
        "dtype": dtype,
        "bytes": nbytes,
        "seconds": {step: round(value, 2) for step, value in median.items()},
        "megabytes_per_second": {step: round(value) for step, value in rate.items()},
        "ratio_to_copy": {step: round(rate[step] / rate[copy], 2) for step, copy in COPIES.items()},
        "peak_bytes": {step: max(values) for step, values in peaks.items()},
        "largest_tensor_bytes": largest,
        "bound_bytes": 2 * largest + ALLOWANCE,
    }


def write_model(folder: Path, nbytes: int, dtype: str, *, hidden: int, vocabulary: int) -> int:
    """Writes a Llama of about `nbytes` with random weights; returns the largest tensor's bytes.

    Args:
      folder: where to; it is made.
      nbytes: of all tensors.
      dtype: of the tensors.
      hidden: the model's width.
      vocabulary: how many tokens it knows.
    """
    import jax

    from lockstep.transcript import tensorfile
    from models.llama import llama
    from pipeline.weights import hf

    intermediate = 11 * hidden // 4
    values = nbytes // np.dtype(dtype).itemsize
    layers = (values - 2 * vocabulary * hidden) // (4 * hidden**2 + 3 * hidden * intermediate)
    config = llama.Config.from_hf(
        {
            "model_type": "llama",
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": max(1, layers),
            "num_attention_heads": hidden // 64,
            "tie_word_embeddings": False,
        }
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: _noise(leaf.shape, rng), jax.eval_shape(lambda: llama.init(config, 0))
    )
    folder.mkdir()
    hf.write_folder(folder, config.to_hf(), params, dtype)
    readers = map(tensorfile.TensorFile, hf.weight_files(folder))
    return max(spec.nbytes for reader in readers for spec in reader.specs.values())


def _noise(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random values, drawn once for the last axis and a little more: rows are shifts of another."""
    shifts = (3, 7)[3 - len(shape) :] if len(shape) > 1 else ()
    count = shape[-1] + sum(n * shift for n, shift in zip(shape, shifts, strict=False))
    noise = rng.standard_normal(count, np.float32)
    strides = tuple(4 * shift for shift in (*shifts, 1))
    return np.lib.stride_tricks.as_strided(noise, shape, strides, writeable=False)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# ---- In a process of its own ----


def _copy(folder: Path, name: str = SOURCE) -> dict:
    out = _empty(folder / f"copy-{name}")

    def copy() -> None:
        for source in (folder / name).glob("*.safetensors"):
            shutil.copyfile(source, out / source.name)
            with open(out / source.name, "rb+") as file:
                os.fsync(file.fileno())

    return _measured(copy)


def _convert(folder: Path) -> dict:
    from pipeline import convert

    out = _empty(folder / PARAMS)
    return _measured(lambda: convert.write_params(folder / SOURCE, out))


def _convert_unhashed(folder: Path) -> dict:
    from pipeline.weights import hf

    out = _empty(folder / PARAMS)
    return _measured(lambda: hf.HfFolder(folder / SOURCE).save(out / "params.safetensors"))


def _export(folder: Path) -> dict:
    from lockstep.transcript import tensorfile
    from pipeline.weights import hf

    out = _empty(folder / EXPORT)

    def export() -> None:
        hf_config = hf.read_config(folder / SOURCE)
        params = tensorfile.TensorFile(folder / PARAMS / "params.safetensors")
        hf.write_folder(out, hf_config, params, hf_config["dtype"])

    return _measured(export)


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _measured(call: Callable[[], object]) -> dict:
    import models

    models.get("llama")  # imported before the clock starts
    seconds = []

    def timed() -> None:
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)

    most = peak(timed)
    return {"seconds": seconds[0], "peak_bytes": most}


STEPS = {
    "copy": _copy,
    "convert": _convert,
    "convert_unhashed": _convert_unhashed,
    "export": _export,
    "copy_params": lambda folder: _copy(folder, PARAMS),
}
# the copy that writes as many bytes
COPIES = {"convert": "copy_params", "convert_unhashed": "copy_params", "export": "copy"}

if __name__ == "__main__":
    main()
