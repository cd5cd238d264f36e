"""data/init/workload.json: a workload's description of itself, and its code's hash."""

import hashlib
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from pydantic import Field, model_validator

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.tables.table import AsTuple, Table, wrong
from lockstep.tables.untrusted_values import ELEMENTS, Shape
from lockstep.tables.validation import validate
from parts.workload.tables import workload_of
from pipeline import runfile
from pipeline.stage.keys import PROJECT, WORKLOADS, digest_of_files, files_of_factory

FILE = "workload.json"
SOURCE = PROJECT / WORKLOADS  # where the code of workloads is
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TensorName = Annotated[str, Field(pattern=r"^[^/\x00-\x1f]+$", max_length=500)]


class Tensor(Table):
    """A described tensor whose values travel, in the order of packs."""

    name: TensorName
    """Its name, as in a state dict."""
    shape: Shape
    dtype: Annotated[str, Field(max_length=40)]
    """What the workload computes with; what travels is float32."""


class KeptTensor(Table):
    """A described tensor of floating-point numbers that stays as it is."""

    name: TensorName
    why: Literal["frozen", "excluded", "buffer", "statistics"]
    """frozen: it takes no gradient. excluded: the run file's patterns leave it out. buffer: it is
    no parameter. statistics: of a batch norm, computed anew before anything reads them."""


class Description(Table):
    """A workload's description of itself, and the hash of its code."""

    factory: str
    code: Sha256
    """Hash of the table [workload] and of the factory's code in workloads/."""
    tensors: Annotated[tuple[Tensor, ...], Field(min_length=1), AsTuple]
    frozen: Annotated[tuple[KeptTensor, ...], AsTuple]
    integers: Annotated[tuple[TensorName, ...], AsTuple]
    """Tensors of integers, which stay as they are."""
    tied: dict[TensorName, TensorName]
    """Names of tensors that are another one, by which they travel."""
    layout_hash: str
    """Hash of the tensors' names, shapes and dtypes, as burn_p2p has it."""
    frozen_sha256: Sha256 | None
    """Hash of all that stays as it is, values included; null of another worker than Lockstep's."""

    @model_validator(mode="after")
    def _tensors_fit(self) -> "Description":
        if self.parameters > ELEMENTS:
            raise wrong("tensors", f"at most {ELEMENTS} numbers together")
        names = sorted(tuple(tensor.name.split(".")) for tensor in self.tensors)
        for name, following in pairwise(names):
            if following[: len(name)] == name:
                within, outer = ".".join(following), ".".join(name)
                text = f"unique names, none within another, unlike {within!r} and {outer!r}"
                raise wrong("tensors", text)
        return self

    @property
    def counts_rows(self) -> bool:
        """Whether the described workload has statistics of rows, as batch norms do."""
        return any(tensor.why == "statistics" for tensor in self.frozen)

    @property
    def parameters(self) -> int:
        """The number of parameters that peers of the described workload exchange."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def shapes(self) -> Tree:
        """Shapes of the described params, nested by the parts of their names: float32."""
        return self.nested(
            [jax.ShapeDtypeStruct(tensor.shape, np.float32) for tensor in self.tensors]
        )

    def nested(self, leaves: list) -> Tree:
        """Return a leaf for each described tensor, in their order, as nested dicts."""
        names = [tensor.name for tensor in self.tensors]
        return unflatten_dict(dict(zip(names, leaves, strict=True)), sep=".")

    def tree(self, values: np.ndarray) -> Tree:
        """Return copies of the described tensors' values, float32 one after the other, nested."""
        leaves, offset = [], 0
        for tensor in self.tensors:
            size = math.prod(tensor.shape)
            leaves.append(values[offset : offset + size].reshape(tensor.shape).copy())
            offset += size
        return self.nested(leaves)

    def leaves(self, tree: Tree) -> list:
        """Return the leaves of nested dicts in the order of the described tensors."""
        flat = flatten_dict(tree)
        return [flat[tuple(tensor.name.split("."))] for tensor in self.tensors]


def code_hash(run: runfile.Run) -> str:
    """Return the hash of what decides a workload's results but for data and machine.

    SHA-256 over the table `[workload]`, and names and contents of the factory's files.
    """
    table, files = workload_of(run).model_dump(mode="json"), files_of(run)
    text = json.dumps({"workload": table, "code": digest_of_files(files)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def files_of(run: runfile.Run) -> dict[str, Path]:
    """Return the files of workloads/ that a described factory consists of (`files_of_factory`).

    Raises:
      LockstepError: Its module is not there.
    """
    factory = workload_of(run).factory
    if files := files_of_factory(factory, SOURCE):
        return files
    module = factory.partition(":")[0].replace(".", "/")
    queued = "; git add it: a queued experiment has what git knows" * (".dvcexps" in SOURCE.parts)
    raise LockstepError(
        f"workload.factory is {factory!r}, expected module:name with the module "
        f"{WORKLOADS}/{module}.py{queued}"
    )


def of_model(model: dict[str, Any], where: object) -> Description:
    """Return the description of a run's workload in the transcript's header.

    Raises:
      LockstepError: The model is that of no workload.
    """
    if "workload" not in model:
        raise LockstepError(f"{where}: has a model of models/, expected that of workload.factory")
    return validate(Description, model["workload"], f"{where}: workload")
