"""Maps tensors of Hugging Face files to params of a model, and checks that none is missing."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict

from lockstep.errors import LockstepError
from lockstep.transcript.tensorfile import TensorFile
from models.architecture import Architecture

MOST_TENSORS = 10**6  # the most of one kind; DeepSeek V3 has 15,000
FLOATS = ("F32", "BF16", "F16")  # dtypes that a tensor may be stored in, as safetensors names them


class Slot(NamedTuple):
    """The part of a param that one tensor of a file holds."""

    path: str
    """Path of the param, joined with "/"."""
    index: tuple[int, ...]
    """Layer and expert within the param, as many of them as it has."""
    transposed: bool
    """Whether the tensor is stored transposed."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    float32: bool
    """Whether the tensor is stored in float32, whatever the dtype of the others."""


def param_shapes(model: Architecture, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every param by its path joined with "/"."""
    return {path: x.shape for path, x in flatten_dict(model.shapes(config), sep="/").items()}


def slots_of(model: Architecture, config: Any) -> dict[str, Slot]:
    """Return the slot of every tensor that a file of this model holds, by the tensor's name.

    Raises:
      LockstepError: There are too many to be listed.
    """
    slots = {}
    for path, shape in param_shapes(model, config).items():
        template, transposed = model.names[path]
        first = config.first_layers.get(path.split("/")[0], 0)
        axes = sum(number in template for number in ("{layer}", "{expert}"))
        if (count := math.prod(shape[:axes])) > MOST_TENSORS:
            raise LockstepError(
                f"config.json: {path} would be {count:,} tensors, expected at most {MOST_TENSORS:,}"
            )
        own = shape[axes:][::-1] if transposed else shape[axes:]
        for index in np.ndindex(shape[:axes]):
            layer, expert = (*index, 0, 0)[:2]  # a template names those that it has
            name = template.format(layer=first + layer, expert=expert)
            slots[name] = Slot(path, index, transposed, own, path in model.float32)
    return slots


def check_tensors(
    model: Architecture,
    config: Any,
    slots: Mapping[str, Slot],
    files: Mapping[str, TensorFile],
    where: str,
) -> dict[str, str]:
    """Compare the tensors of files, by name, with the slots of a model.

    Returns:
      Copies of tied tensors: name -> name of the tensor that it must equal.

    Raises:
      LockstepError: Tensors are missing, unexpected, or of another shape or dtype.
    """
    problems, copies = [], {}
    for name in sorted(slots.keys() | files.keys()):
        if name not in files:
            problems.append(f"{name} {list(slots[name].shape)} is missing")
            continue
        path, (dtype, shape) = files[name].path, files[name].specs[name]
        if name not in slots:
            if model.tied.get(name) in files:
                copies[name] = model.tied[name]
            elif not _is_ignored(name, model, config):
                problems.append(f"{name} {list(shape)} in {path.name} is not expected")
        elif shape != slots[name].shape:
            expected = list(slots[name].shape)
            problems.append(f"{name} in {path.name} is {list(shape)}, expected {expected}")
        elif dtype not in FLOATS:
            problems.append(f"{name} in {path.name} is {dtype}, expected {', '.join(FLOATS)}")
    if problems:
        raise LockstepError(f"{where}: {'; '.join(problems)}")
    return copies


def _is_ignored(name: str, model: Architecture, config: Any) -> bool:
    match = re.fullmatch(model.ignored, name)
    if match is None:
        return False
    beyond = match.groupdict().get("beyond")
    return beyond is None or int(beyond) >= config.num_hidden_layers


def check_params(
    params: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare params with the shapes of a model, by path.

    Raises:
      LockstepError: Params are missing, unexpected or of another shape.
    """
    problems = [f"{path} is missing" for path in sorted(shapes.keys() - params.keys())]
    problems += [f"{path} is not expected" for path in sorted(params.keys() - shapes.keys())]
    for path in sorted(shapes.keys() & params.keys()):
        if params[path].shape != shapes[path]:
            shape, expected = list(params[path].shape), list(shapes[path])
            problems.append(f"{path} is {shape}, expected {expected}")
    if problems:
        raise LockstepError(f"{where}: {'; '.join(problems)}")
