"""What a worker that computes no gradients does for a run, by burn_p2p's own methods.

It makes models, measures them, and says what of them travels; params go in and come out as packs.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.optim.optimizer import Tree
from lockstep.tables.table import AsTuple, Table
from lockstep.tables.untrusted_values import ELEMENTS, Metrics
from lockstep.tables.validation import validate
from parts.burn_p2p.python.lockstep_worker import pack_files
from pipeline.stage.untrusted_files import check_file

PLAN = "parameter_pack_plan"


class Session(Protocol):
    """A worker of packs that has said hello, as `parts/workload` has begun it.

    Attributes:
      process: Answers methods: `call(method, params)`, `result(key, method, params)`.
      description: What it said of its model, with the order and the shapes of its tensors.
      device: Where it computes.
      asked: What decides a new model: patterns of what travels, and the seed.
    """

    process: Any
    description: Any
    device: str
    asked: dict[str, Any]


class PackPlan(Table, extra="ignore"):
    """A worker's answer to `parameter_pack_plan`."""

    parameter_count: Annotated[int, Field(ge=0, le=ELEMENTS)]
    tensors: Annotated[tuple[dict[str, Any], ...] | None, AsTuple] = None
    """Only our worker names them: of another's a single tensor travels."""
    excluded_float_keys: Annotated[tuple[str, ...], AsTuple] = ()
    ignored_non_float_keys: Annotated[tuple[str, ...], AsTuple] = ()
    tied: dict[str, str] = {}
    layout_hash: str | None = None
    uses_custom_parameter_pack_hooks: bool = False
    """Whether the class writes packs itself: then a pack says what travels."""


def planned(process: Any, device: str, code: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's description of its packs; one without shapes has a single tensor.

    Its fields are those of the description that a worker with gradients gives. The arguments are as
    in `Session`, and `code` is the hash of the workload's code.
    """
    plan = validate(PackPlan, process.call(PLAN, {"device": device, **asked}), PLAN)
    if plan.uses_custom_parameter_pack_hooks:
        with new_pack(process, device, code, asked) as folder:
            facts = read_json(folder / pack_files.MANIFEST)
        pack = validate(PackPlan, facts, f"{PLAN}: its own pack")
        plan = plan if pack.layout_hash == plan.layout_hash else pack
    if not plan.parameter_count:
        raise LockstepError(f"{PLAN}: no trained params, expected some; see workload.include")
    single = {"name": "values", "shape": [plan.parameter_count], "dtype": "float32"}
    return {
        "tensors": plan.tensors or (single,),
        "frozen": [{"name": name, "why": "excluded"} for name in plan.excluded_float_keys],
        "integers": plan.ignored_non_float_keys,
        "tied": plan.tied,
        "layout_hash": plan.layout_hash,
        "frozen_sha256": None,
    }


def write_params(folder: Path, description: Any, params: Tree) -> None:
    """Write params as a pack."""
    facts = {"model_schema_hash": description.code, "layout_hash": description.layout_hash}
    pack_files.write(folder, (np.asarray(leaf) for leaf in description.leaves(params)), facts)


def read_params(folder: Path, description: Any) -> Tree:
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
def new_pack(process: Any, device: str, code: str, asked: dict[str, Any]) -> Iterator[Path]:
    """Yield a new model's params as a pack; the other arguments are as in `Session`."""
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


def initial(session: Session) -> Tree:
    """Return a new model's params, from its pack."""
    process, device, description = session.process, session.device, session.description
    with new_pack(process, device, description.code, session.asked) as folder:
        return read_params(folder, description)


@contextmanager
def model_at(session: Session, folder: Path) -> Iterator[str]:
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


def evaluated(session: Session, params: Tree, split: str) -> Metrics:
    """Return the workload's own metrics at a pack's params, on a split of the data."""
    folder = session.process.folder / "params"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        write_params(folder, session.description, params)
        with model_at(session, folder) as model:
            request = {"model_id": model, "split": split}
            return session.process.result("metrics", "evaluate", request).metrics
    finally:
        shutil.rmtree(folder, ignore_errors=True)
