"""A Hugging Face folder (config.json, safetensors) as params, and params as such a folder.

The model's `NAMES` says which tensor is which param. Every tensor is used exactly once; where that
fails, one error names all that is missing, unexpected or of another shape.
"""

import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

import models
from pipeline.artifacts import read_json, write_bytes, write_json
from pipeline.errors import LockstepError

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
REFUSED = "refused.json"  # stands in the place of weights where the audit failed
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # safetensors' names and NumPy's


class _Slot(NamedTuple):
    """Where a tensor belongs: a param's path, its place there, and the tensor's own shape.

    index: its layer and its expert among those of the param, or as many of them as it has.
    kept: whether it is written in float32, whatever the others are.
    """

    path: str
    index: tuple[int, ...]
    transposed: bool
    shape: tuple[int, ...]
    kept: bool


class _Found(NamedTuple):
    """A tensor in a file: the file's path, the open file, and what its header says."""

    path: Path
    file: safe_open
    shape: tuple[int, ...]
    dtype: str


def read_config(folder: Path) -> dict[str, Any]:
    """Reads a folder's config.json.

    Raises:
      LockstepError: it is not there, or holds no table.
    """
    if not folder.is_dir():
        raise LockstepError(f"{folder}: no such folder, expected config.json and safetensors in it")
    hf_config = read_json(folder / CONFIG)
    if not isinstance(hf_config, dict):
        raise LockstepError(
            f"{folder / CONFIG}: found {type(hf_config).__name__}, expected a table"
        )
    return hf_config


def model_of(hf_config: dict[str, Any], where: object) -> tuple[ModuleType, Any]:
    """Returns the model's module and its Config.

    Args:
      hf_config: what config.json holds.
      where: how errors call it.

    Raises:
      LockstepError: there is no such model here, or it does not do what the config asks for.
    """
    try:
        model = models.get(hf_config.get("model_type"))
        return model, model.Config.from_hf(hf_config)
    except models.ModelError as error:
        raise LockstepError(f"{where}: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that a folder's weights lie in: one, or those that its index names.

    Raises:
      LockstepError: there are none, or the index is damaged or names a file elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise LockstepError(f"{folder}: found neither {WEIGHTS} nor {INDEX}, expected one of them")
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a model.

    Args:
      folder: config.json and safetensors, in one file or in shards.

    Returns:
      config.json, with the `dtype` that the tensors are stored in (float32 where they differ); and
      the params, nested dicts of float32 arrays.

    Raises:
      LockstepError: a file is missing or damaged, or a tensor is missing, extra or of a wrong form.
    """
    hf_config = read_config(folder)
    model, config = model_of(hf_config, folder / CONFIG)
    slots = _slots(model, config)
    params = {}
    with ExitStack() as stack:
        found = _headers(folder, stack)
        copies = _check_tensors(folder, model, config, slots, found)
        for name, copied in copies.items():
            if not np.array_equal(_tensor(name, found), _tensor(copied, found)):
                raise LockstepError(
                    f"{found[name].path}: {name} differs from {copied}, expected equal tensors, "
                    f"since {CONFIG} says tie_word_embeddings"
                )
        for path, shape in _param_shapes(model, config).items():
            params[path] = np.empty(shape, np.float32)
        for name, slot in slots.items():
            tensor = _tensor(name, found)
            params[slot.path][slot.index] = tensor.T if slot.transposed else tensor
        dtypes = {DTYPES[found[name].dtype] for name, slot in slots.items() if not slot.kept}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    return hf_config | {"dtype": dtype, "torch_dtype": dtype}, unflatten_dict(params, sep="/")


def write_folder(
    folder: Path,
    hf_config: dict[str, Any],
    params: dict[str, Any],
    dtype: str,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes config.json and safetensors; equal params give equal bytes.

    Args:
      folder: where to; it exists.
      hf_config: the model's config.json; keys that the model does not know stay in it.
      params: nested dicts of arrays.
      dtype: float32, bfloat16 or float16, of the tensors.
      max_shard_bytes: weights larger than this are written in several files with an index.

    Raises:
      LockstepError: a param is missing, extra or of another shape, or is too large for `dtype`.
    """
    model, config = model_of(hf_config, folder / CONFIG)
    slots = _slots(model, config)
    flat = {path: np.asarray(leaf) for path, leaf in flatten_dict(params, sep="/").items()}
    _check_params(folder, flat, _param_shapes(model, config))

    sizes = {
        name: int(np.prod(slots[name].shape)) * _stored(slots[name], dtype).itemsize
        for name in sorted(slots)
    }
    shards = _shards(sizes, max_shard_bytes)
    files = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        total = {"total_parameters": sum(leaf.size for leaf in flat.values())}
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        metadata = total | {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    for file, names in zip(files, shards, strict=True):
        tensors = {name: _cast(name, slots[name], flat, dtype) for name in names}
        write_bytes(folder / file, save(tensors, metadata={"format": "pt"}))
    write_config(folder, hf_config, dtype)


def write_config(folder: Path, hf_config: dict[str, Any], dtype: str) -> None:
    """Writes config.json so that transformers 4 and 5 read the same model from it."""
    _, config = model_of(hf_config, folder / CONFIG)
    whole = hf_config | config.to_hf(dtype)
    whole.pop("auto_map", None)  # names remote code, which we neither run nor copy
    write_json(folder / CONFIG, dict(sorted(whole.items())))


# ---- Names ----


def _param_shapes(model: ModuleType, config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every param by its path joined with "/"; nothing is computed."""
    shapes = jax.eval_shape(partial(model.init, config, 0))
    return {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}


def _slots(model: ModuleType, config: Any) -> dict[str, _Slot]:
    """Every tensor that a file of this model holds, by name."""
    slots = {}
    first_layers = model.first_layers(config) if hasattr(model, "first_layers") else {}
    for path, shape in _param_shapes(model, config).items():
        template, transposed = model.NAMES[path]
        first = first_layers.get(path.split("/")[0], 0)
        axes = sum(number in template for number in ("{layer}", "{expert}"))
        own = shape[axes:][::-1] if transposed else shape[axes:]
        for index in np.ndindex(shape[:axes]):
            layer, expert = (*index, 0, 0)[:2]  # a template names those that it has
            name = template.format(layer=first + layer, expert=expert)
            kept = path in getattr(model, "FLOAT32", ())
            slots[name] = _Slot(path, index, transposed, own, kept)
    return slots


def _is_ignored(name: str, model: ModuleType, config: Any) -> bool:
    found = re.fullmatch(model.IGNORED, name)
    if found is None:
        return False
    beyond = found.groupdict().get("beyond")
    return beyond is None or int(beyond) >= config.num_hidden_layers


def _stored(slot: _Slot, dtype: str) -> np.dtype:
    return jnp.dtype("float32" if slot.kept else dtype)


# ---- Reading ----


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    content = read_json(path)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise LockstepError(f"{path}: found no weight_map, expected tensor names and their files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise LockstepError(
                f"{path}: {name} is in {file!r}, expected a safetensors file in the same folder"
            )
    return weight_map


def _headers(folder: Path, stack: ExitStack) -> dict[str, _Found]:
    """What the files hold, by tensor; each tensor is where the index has it, and only there."""
    found: dict[str, _Found] = {}
    for path in weight_files(folder):
        try:
            file = stack.enter_context(safe_open(path, framework="np"))
        except (OSError, SafetensorError) as error:
            raise LockstepError(f"{path}: expected a safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - no dict
            if name in found:
                raise LockstepError(f"{path}: {name} is also in {found[name].path.name}")
            header = file.get_slice(name)
            found[name] = _Found(path, file, tuple(header.get_shape()), header.get_dtype())
    if not (folder / WEIGHTS).is_file():
        for name, file in _weight_map(folder).items():
            if name not in found or found[name].path.name != file:
                there = found[name].path.name if name in found else "no file"
                raise LockstepError(f"{folder / INDEX}: {name} is in {there}, expected in {file}")
    return found


def _check_tensors(
    folder: Path,
    model: ModuleType,
    config: Any,
    slots: dict[str, _Slot],
    found: dict[str, _Found],
) -> dict[str, str]:
    """Compares what is there with what belongs there; returns copies of tied tensors."""
    problems, copies = [], {}
    for name in sorted(slots.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name} {list(slots[name].shape)} is missing")
            continue
        path, _, shape, dtype = found[name]
        if name not in slots:
            if name in model.TIED and model.TIED[name] in found:
                copies[name] = model.TIED[name]
            elif not _is_ignored(name, model, config):
                problems.append(f"{name} {list(shape)} in {path.name} is not expected")
        elif shape != slots[name].shape:
            expected = list(slots[name].shape)
            problems.append(f"{name} in {path.name} is {list(shape)}, expected {expected}")
        elif dtype not in DTYPES:
            problems.append(f"{name} in {path.name} is {dtype}, expected {', '.join(DTYPES)}")
    if problems:
        raise LockstepError(f"{folder}: tensors against {CONFIG}: {'; '.join(problems)}")
    return copies


def _tensor(name: str, found: dict[str, _Found]) -> np.ndarray:
    try:
        return found[name].file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise LockstepError(f"{found[name].path}: {name}: {error}, expected to read it") from error


# ---- Writing ----


def _check_params(
    folder: Path, flat: dict[str, np.ndarray], shapes: dict[str, tuple[int, ...]]
) -> None:
    problems = [f"{path} is missing" for path in sorted(shapes.keys() - flat.keys())]
    problems += [f"{path} is not expected" for path in sorted(flat.keys() - shapes.keys())]
    for path in sorted(shapes.keys() & flat.keys()):
        if flat[path].shape != shapes[path]:
            found, expected = list(flat[path].shape), list(shapes[path])
            problems.append(f"{path} is {found}, expected {expected}")
    if problems:
        raise LockstepError(f"{folder}: params against {CONFIG}: {'; '.join(problems)}")


def _shards(sizes: dict[str, int], most: int) -> list[list[str]]:
    """Fills one file after the other, in the order of `sizes`, up to `most` bytes each."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _cast(name: str, slot: _Slot, flat: dict[str, np.ndarray], dtype: str) -> np.ndarray:
    leaf = flat[slot.path][slot.index]
    with np.errstate(over="ignore"):  # said below, by name
        tensor = (leaf.T if slot.transposed else leaf).astype(_stored(slot, dtype))
    if np.isfinite(leaf).all() and not np.isfinite(tensor).all():
        largest = np.abs(leaf).max()
        raise LockstepError(f"{name} has a value of {largest:g}, expected one that {dtype} holds")
    # safetensors writes the wrong bytes of an array that is not contiguous, without a word
    return np.ascontiguousarray(tensor)
