"""Models in a worker, by burn_p2p's own methods: params go in and come out as packs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from parts.workload.description import Description
from parts.workload.process.shared_arrays import SharedArrays
from parts.workload.process.worker_process import WorkerProcess
from parts.workload.python.lockstep_worker import pack_files
from pipeline.stage.untrusted_files import check_file


class WorkerSession(NamedTuple):
    """A worker's process, what it said of the run's model, on what device, and what is shared.

    Without arrays it computes no gradients, as a class that was written for burn_p2p. `asked` are
    what decides a new model: patterns of what travels, and the seed.
    """

    process: WorkerProcess
    description: Description
    device: str
    arrays: SharedArrays | None
    asked: dict[str, Any]


def write_params(folder: Path, description: Description, params: Tree) -> None:
    """Write params as a pack."""
    facts = {"model_schema_hash": description.code, "layout_hash": description.layout_hash}
    pack_files.write(folder, (np.asarray(leaf) for leaf in description.leaves(params)), facts)


def read_params(folder: Path, description: Description) -> Tree:
    """Return the params of a pack that a worker or a command wrote.

    Raises:
      LockstepError: It is not a whole pack, of another model, or its values are no finite numbers.
    """
    for path in {folder / pack_files.MANIFEST, *(folder.iterdir() if folder.is_dir() else ())}:
        check_file(path, folder)  # no link that leads elsewhere
    try:
        values = pack_files.read(
            folder, description.layout_hash, description.code, description.parameters
        )
    except (ValueError, OSError, RecursionError) as error:
        raise LockstepError(" ".join(str(error).split())) from error
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        where = folder / pack_files.VALUES
        raise LockstepError(f"{where}: value {bad} is {values[bad]}, expected finite numbers")
    return description.tree(values)


@contextmanager
def new_pack(
    process: WorkerProcess, device: str, code: str, asked: dict[str, Any]
) -> Iterator[Path]:
    """Yield the params of a new model as a pack; the other arguments are as in `WorkerSession`."""
    request = {"device": device, "seed": asked["seed"]}
    model = process.result("model_id", "init_model", request).model_id
    folder = process.folder / "initial"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        request = {"model_id": model, "parameter_pack_path": str(folder)}
        request |= {"model_schema_hash": code, "state_dict_filter": asked["state_dict_filter"]}
        process.call("export_parameter_pack", request)
        process.call("release_model", {"model_id": model})
        check_file(folder / pack_files.MANIFEST, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def initial(session: WorkerSession) -> Tree:
    """Return the params of a new model."""
    process, device, description = session.process, session.device, session.description
    with new_pack(process, device, description.code, session.asked) as folder:
        return read_params(folder, description)


@contextmanager
def model_at(session: WorkerSession, folder: Path) -> Iterator[str]:
    """Yield the id of a new model, with the params of a pack; it is let go of."""
    request = {
        **session.asked,
        "device": session.device,
        "parameter_pack_path": str(folder),
        "model_schema_hash": session.description.code,
    }
    model = session.process.result("model_id", "import_parameter_pack", request).model_id
    yield model
    session.process.call("release_model", {"model_id": model})


@contextmanager
def model_of(session: WorkerSession, params: Tree) -> Iterator[str]:
    """Yield the id of a new model with such params; it is let go of."""
    folder = session.process.folder / "params"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write_params(folder, session.description, params)
        with model_at(session, folder) as model:
            yield model
    finally:
        shutil.rmtree(folder, ignore_errors=True)
