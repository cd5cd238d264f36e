"""A worker in its process, asked one method after the other, with the arrays of `gradient`."""

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from parts.workload.process.shared_arrays import SharedArrays
from parts.workload.process.worker_process import WorkerCommand, WorkerProcess
from pipeline.stage.keys import PROJECT
from pipeline.tokens.rows import encode
from tests.pipeline.tokens.shards_folder import rows_of

WORKLOADS = PROJECT / "workloads"
ROW_WORDS = 2**14  # that there is room for


class Host(AbstractContextManager):
    """A worker, and what a host shares with it.

    Args:
        factory: `module:attr`.
        config: what it is called with.
        folder: the worker's folder; modules of the test in it are found.
    """

    def __init__(self, factory, config, folder, paths=(), python=sys.executable):
        path, one_thread = (WORKLOADS, Path(folder), *paths), {"OMP_NUM_THREADS": "1"}
        command = WorkerCommand(
            python, "lockstep_worker.worker", factory, config, path, one_thread, 60.0, 60.0
        )
        self.process = WorkerProcess.start(command, Path(folder))
        self.group, self.connection = self.process.group, self.process.connection

    def __exit__(self, *_):
        self.process.close()

    def ask(self, method, **params):
        """The result; an error is raised."""
        return self.process.call(method, params)

    # The capability `gradient`.

    def begin(self, rows, *, micro_batch=64, seed=0, include=(), exclude=()):
        """Begin, and share arrays."""
        globs = {"include_globs": list(include), "exclude_globs": list(exclude)}
        given = {"rows": rows, "micro_batch": micro_batch, "threads": 1, "seed": seed}
        found = self.ask("begin", **given, state_dict_filter=globs)
        self.arrays = SharedArrays(self.process.folder, found["parameter_count"])
        self.arrays.forget()
        self.arrays.make_room(ROW_WORDS)
        self.ask("open_arrays", **self.arrays.request())
        self.arrays.forget()
        self.params, self.gradients = self.arrays.params, self.arrays.gradients
        self.tensors = found["tensors"]
        self.ask("init")
        return found

    def write(self, words):
        """Put rows there; the params of `gradient` and `measure` that say how many."""
        self.arrays.rows[: words.size] = words.reshape(-1)
        return {"rows": len(words), "width": words.shape[1]}

    def split(self, flat):
        """The tensors in a row of values, by name."""
        parts, at = {}, 0
        for tensor in self.tensors:
            size = int(np.prod(tensor["shape"], dtype=int))
            parts[tensor["name"]] = flat[at : at + size].reshape(tensor["shape"]).copy()
            at += size
        return parts


def array_rows(**arrays):
    """Rows of words [N, W] that hold arrays [N, ...], and their kind."""
    rows = rows_of(**arrays)
    return encode(rows, arrays).view("<i4"), rows.model_dump(mode="json")


def inner_job(folder, shards, spec, *, steps, **more):
    """The params of `run_inner_loop` for these rows, one file each, in a folder of its own."""
    folder.mkdir()
    (folder / "rows.json").write_text(json.dumps(spec))
    paths = [str(folder / f"{i}.npy") for i in range(len(shards))]
    for path, words in zip(paths, shards, strict=True):
        np.save(path, words)
    given = {"batches": [{"shard_paths": paths, "microshard_ids": [*range(len(paths))]}]}
    given |= {"num_inner_steps": steps, "output_parameter_pack_path": str(folder / "out")}
    return given | {"model_schema_hash": "s", "require_exact_steps": True} | more


def left_by(job):
    """The values of the pack that an inner loop left."""
    return np.fromfile(Path(job["output_parameter_pack_path"], "values.f32le"), "<f4")
