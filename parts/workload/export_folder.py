"""The folder of an exported workload: its params, its description, and its own files.

    params.safetensors    the params that peers agreed on, by the workload's names
    workload.json         the workload's description of itself, and the hash of its code
    statistics.safetensors    those of batch norms at these params, if it has any
    ...                   what its method `save` writes, such as a Hugging Face folder

The first ones are ours: the audit is of these params. The others are the workload's word.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import write_json
from lockstep.optim.optimizer import Tree
from lockstep.transcript import tensorfile
from lockstep.transcript.tensorfile import TensorFile
from lockstep.transcript.trees import save_tree
from parts.workload.description import FILE, Description
from parts.workload.worker import Worker
from pipeline.language_model import held_out
from pipeline.language_model.held_out import HeldOutRows, MeanLoss
from pipeline.stage.untrusted_files import check_file

PARAMS, STATISTICS, CARD = "params.safetensors", "statistics.safetensors", "README.md"
SAVES = "save"  # the capability of a workload that writes files of its own


def write(
    folder: Path, worker: Worker, described: Description, params: TensorFile, dtype: str
) -> None:
    """Write a workload's params, named by their paths joined with "/", and have it save its model.

    Raises:
      LockstepError: The workload writes a link, or a file that is ours.
    """
    write_params(folder, described, lambda name: params[name.replace(".", "/")], dtype)
    if statistics := worker.statistics(read(folder, described)):
        save_tree(folder / STATISTICS, statistics)
    if SAVES not in worker.capabilities:
        return
    saved = folder / ".saved"
    saved.mkdir()
    worker.save(read(folder, described), saved)
    for path in sorted(saved.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            check_file(path, saved)
    for path in sorted(saved.iterdir()):
        if path.name == CARD:  # PEFT writes one; the card of the run takes its place
            continue
        if path.name in (PARAMS, STATISTICS, FILE):
            raise LockstepError(
                f"workload {described.factory}: save: found {path.name} among its files, expected "
                "another name: Lockstep writes that file"
            )
        path.rename(folder / path.name)
    shutil.rmtree(saved)


def write_params(
    folder: Path, described: Description, param: Callable[[str], np.ndarray], dtype: str
) -> None:
    """Write the export folder's two files that are ours; param(name) is a tensor's."""
    specs = {t.name: tensorfile.spec_of(dtype, t.shape) for t in described.tensors}

    def values(name: str) -> np.ndarray:
        return np.ascontiguousarray(np.asarray(param(name)).astype(dtype))

    tensorfile.write(folder / PARAMS, specs, lambda name: tensorfile.pieces(values(name)))
    write_json(folder / FILE, described.model_dump(mode="json"))


def read(folder: Path, described: Description) -> Tree:
    """Return the params of a workload's export folder: nested dicts of float32 arrays.

    Raises:
      LockstepError: They are not those that the workload has.
    """
    params = TensorFile(folder / PARAMS)
    leaves = []
    for tensor in described.tensors:
        array = params.get(tensor.name)
        if array is None or array.shape != tensor.shape:
            actual = "missing" if array is None else f"of shape {[*array.shape]}"
            raise LockstepError(
                f"{folder / PARAMS}: tensor {tensor.name} is {actual}, expected shape "
                f"{[*tensor.shape]} as {FILE} says"
            )
        leaves.append(np.asarray(array, np.float32))
    return described.nested(leaves)


class OpenedWorkload:
    """An exported workload; a `pipeline.subject.OpenedExport`."""

    texts = None

    def __init__(self, worker: Worker, params: Tree):
        self._worker, self._params = worker, params

    def held_out_loss(self, data: HeldOutRows) -> MeanLoss | None:
        """Return the exported workload's mean loss of rows; None where it measures none."""
        if not self._worker.measures:
            return None
        return held_out.mean_of(*self._worker.measure_and_count(self._params, data.rows_NW))

    def numbers(
        self, loss: MeanLoss, data: HeldOutRows, notes: list[str]
    ) -> dict[str, float | int | None]:
        """Return the exported workload's loss; nothing else is known of any rows."""
        del notes
        return dict.fromkeys(held_out.NUMBERS) | held_out.loss_numbers(loss, data)

    def own_metrics(self) -> dict[str, Any]:
        """Return the metrics that an exported workload computes of held-out data, if any."""
        worker = self._worker
        return worker.evaluate(self._params, "held_out") if worker.evaluates else {}

    def close(self) -> None:
        """End the process of the exported workload's worker."""
        self._worker.close()
