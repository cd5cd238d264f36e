"""A Hugging Face folder (config.json, safetensors) as params, and params as such a folder.

The model's `NAMES` says which tensor is which param. Every tensor is used exactly once; where that
fails, one error names all that is missing, unexpected or of another shape.

Both ways go tensor by tensor through files mapped into memory, so neither the folder nor the params
need fit there: what is held at once is one tensor of the folder, and pieces of a few MiB.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import models
from models.architecture import Architecture
from pipeline.errors import LockstepError
from pipeline.stage.artifacts import read_json, write_json
from pipeline.tokens.tokenizer_files import TOKENIZER_FILES
from pipeline.weights import tensorfile
from pipeline.weights.tensorfile import Form, Reader

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = r"[\w-][\w.-]*\.safetensors"  # a file of weights in the same folder
REFUSED = "refused.json"  # stands in the place of weights where the audit failed
# What may stand beside the weights; nothing else is fetched or copied: no code, no pickle.
COMPANIONS = ("generation_config.json", *TOKENIZER_FILES)
FLOATS = ("F32", "BF16", "F16")  # what a tensor may be stored in, as safetensors has it
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}  # its bits are all set in infinity and NaN


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


def model_of(hf_config: dict[str, Any], where: object) -> tuple[Architecture, Any]:
    """Return the model's architecture and its config.

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


def _nothing(nbytes: int) -> None:
    """What is told how many bytes are done, where nobody asks."""


class Folder:
    """A model in a folder: its tensors are checked, and read when their values are asked for.

    Args:
      folder: config.json and safetensors, in one file or in shards.

    Attributes:
      hf_config: config.json, with the `dtype` that the tensors are stored in (float32 where they
        differ).
      forms: of the params, float32, by their paths joined with "/".
      nbytes: of all params.

    Raises:
      LockstepError: a file is missing or damaged, a tensor is missing, extra or of a wrong form, or
        is there twice and not equal.
    """

    def __init__(self, folder: Path):
        hf_config = read_config(folder)
        model, config = model_of(hf_config, folder / CONFIG)
        slots = _slots(model, config)
        self._found = _headers(folder)
        _check_tensors(folder, model, config, slots, self._found)
        self._slots = defaultdict(list)  # of each param, in the order of its values
        for name, slot in slots.items():
            self._slots[slot.path].append((name, slot))
        codes = {
            self._found[name].forms[name].dtype for name, slot in slots.items() if not slot.kept
        }
        dtype = tensorfile.DTYPES[codes.pop()] if len(codes) == 1 else "float32"
        self.hf_config = hf_config | {"dtype": dtype, "torch_dtype": dtype}
        shapes = _param_shapes(model, config)
        self.forms = {path: Form("F32", shape) for path, shape in shapes.items()}
        self.nbytes = sum(form.nbytes for form in self.forms.values())

    def save(self, path: Path, advance: Callable[[int], object] = _nothing) -> None:
        """Writes the params to one safetensors file.

        Args:
          path: of the file.
          advance: is told of each piece of the params, how many bytes it had.

        Raises:
          LockstepError: it cannot be written.
        """
        tensorfile.write(path, self.forms, partial(self.pieces, advance=advance))

    def pieces(
        self, path: str, advance: Callable[[int], object] = _nothing
    ) -> Iterator[np.ndarray]:
        """Yields a param's values in C order, in contiguous pieces of float32."""
        for name, slot in self._slots[path]:
            tensor = self._found[name][name]
            for piece in tensorfile.pieces(tensor, transposed=slot.transposed):
                yield (values := piece.astype(np.float32, copy=False))
                advance(values.nbytes)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a model into memory.

    Args:
      folder: config.json and safetensors, in one file or in shards.

    Returns:
      `Folder.hf_config`, and the params, nested dicts of float32 arrays.

    Raises:
      LockstepError: the folder is not as `Folder` expects it.
    """
    opened = Folder(folder)
    params = {}
    for path, form in opened.forms.items():
        params[path] = np.empty(form.shape, np.float32)
        flat, done = params[path].reshape(-1), 0
        for piece in opened.pieces(path):
            flat[done : done + piece.size] = piece.reshape(-1)
            done += piece.size
    return opened.hf_config, unflatten_dict(params, sep="/")


def write_folder(
    folder: Path,
    hf_config: dict[str, Any],
    params: dict[str, Any] | Reader,
    dtype: str,
    max_shard_bytes: int = 5 * 2**30,
    advance: Callable[[int], object] = _nothing,
) -> None:
    """Writes config.json and safetensors; equal params give equal bytes.

    Args:
      folder: where to; it exists.
      hf_config: the model's config.json; keys that the model does not know stay in it.
      params: nested dicts of arrays; or the file of them, each of which is read as it is written.
      dtype: float32, bfloat16 or float16, of the tensors.
      max_shard_bytes: weights larger than this are written in several files with an index.
      advance: is told of each piece of the params, how many bytes it had.

    Raises:
      LockstepError: a param is missing, extra or of another shape, or is too large for `dtype`.
    """
    model, config = model_of(hf_config, folder / CONFIG)
    slots = _slots(model, config)
    flat: Mapping[str, np.ndarray] = params if isinstance(params, Reader) else _flatten(params)
    shapes = _param_shapes(model, config)
    _check_params(folder, flat, shapes)

    forms = {
        name: tensorfile.form_of(_stored(slots[name], dtype), slots[name].shape)
        for name in sorted(slots)
    }
    sizes = {name: form.nbytes for name, form in forms.items()}
    shards = _shards(sizes, max_shard_bytes)
    files = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        total = {"total_parameters": sum(map(math.prod, shapes.values()))}
        weight_map = {
            name: file for file, names in zip(files, shards, strict=True) for name in names
        }
        metadata = total | {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    for file, names in zip(files, shards, strict=True):
        tensorfile.write(
            folder / file,
            {name: forms[name] for name in names},
            lambda name: _cast(name, slots[name], flat, dtype, advance),
            metadata={"format": "pt"},
        )
    write_config(folder, hf_config, dtype)


def write_config(folder: Path, hf_config: dict[str, Any], dtype: str) -> None:
    """Writes config.json so that transformers 4 and 5 read the same model from it."""
    _, config = model_of(hf_config, folder / CONFIG)
    whole = hf_config | config.to_hf(dtype)
    whole.pop("auto_map", None)  # names remote code, which we neither run nor copy
    write_json(folder / CONFIG, dict(sorted(whole.items())))


# ---- Names ----


def _param_shapes(model: Architecture, config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every param by its path joined with "/"; nothing is computed."""
    shapes = jax.eval_shape(partial(model.init, config, 0))
    return {path: leaf.shape for path, leaf in flatten_dict(shapes, sep="/").items()}


def _slots(model: Architecture, config: Any) -> dict[str, _Slot]:
    """Every tensor that a file of this model holds, by name."""
    slots = {}
    for path, shape in _param_shapes(model, config).items():
        template, transposed = model.names[path]
        first = config.first_layers.get(path.split("/")[0], 0)
        axes = sum(number in template for number in ("{layer}", "{expert}"))
        own = shape[axes:][::-1] if transposed else shape[axes:]
        for index in np.ndindex(shape[:axes]):
            layer, expert = (*index, 0, 0)[:2]  # a template names those that it has
            name = template.format(layer=first + layer, expert=expert)
            kept = path in model.float32
            slots[name] = _Slot(path, index, transposed, own, kept)
    return slots


def _is_ignored(name: str, model: Architecture, config: Any) -> bool:
    found = re.fullmatch(model.ignored, name)
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
        if not isinstance(file, str) or not re.fullmatch(SHARD, file):
            raise LockstepError(
                f"{path}: {name} is in {file!r}, expected a safetensors file in the same folder"
            )
    return weight_map


def _headers(folder: Path) -> dict[str, Reader]:
    """The file of each tensor, by name; each is where the index has it, and only there."""
    found: dict[str, Reader] = {}
    for path in weight_files(folder):
        file = Reader(path)
        for name in file:
            if name in found:
                raise LockstepError(f"{path}: {name} is also in {found[name].path.name}")
            found[name] = file
    if not (folder / WEIGHTS).is_file():
        for name, file in _weight_map(folder).items():
            if name not in found or found[name].path.name != file:
                there = found[name].path.name if name in found else "no file"
                raise LockstepError(f"{folder / INDEX}: {name} is in {there}, expected in {file}")
    return found


def _check_tensors(
    folder: Path,
    model: Architecture,
    config: Any,
    slots: dict[str, _Slot],
    found: dict[str, Reader],
) -> None:
    """Compares what is there with what belongs there, and copies of tied tensors with those."""
    problems, copies = [], {}
    for name in sorted(slots.keys() | found.keys()):
        if name not in found:
            problems.append(f"{name} {list(slots[name].shape)} is missing")
            continue
        path, (dtype, shape) = found[name].path, found[name].forms[name]
        if name not in slots:
            if name in model.tied and model.tied[name] in found:
                copies[name] = model.tied[name]
            elif not _is_ignored(name, model, config):
                problems.append(f"{name} {list(shape)} in {path.name} is not expected")
        elif shape != slots[name].shape:
            expected = list(slots[name].shape)
            problems.append(f"{name} in {path.name} is {list(shape)}, expected {expected}")
        elif dtype not in FLOATS:
            problems.append(f"{name} in {path.name} is {dtype}, expected {', '.join(FLOATS)}")
    if problems:
        raise LockstepError(f"{folder}: tensors against {CONFIG}: {'; '.join(problems)}")
    for name, copied in copies.items():
        if not _equal(found[name][name], found[copied][copied]):
            raise LockstepError(
                f"{found[name].path}: {name} differs from {copied}, expected equal tensors, "
                f"since {CONFIG} says tie_word_embeddings"
            )


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    pairs = zip(tensorfile.pieces(a), tensorfile.pieces(b), strict=False)
    return a.shape == b.shape and all(np.array_equal(*pair) for pair in pairs)


# ---- Writing ----


def _flatten(params: dict[str, Any]) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in flatten_dict(params, sep="/").items()}


def _check_params(
    folder: Path, flat: Mapping[str, np.ndarray], shapes: dict[str, tuple[int, ...]]
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


def _cast(
    name: str,
    slot: _Slot,
    flat: Mapping[str, np.ndarray],
    dtype: str,
    advance: Callable[[int], object],
) -> Iterator[np.ndarray]:
    stored = _stored(slot, dtype)
    for piece in tensorfile.pieces(flat[slot.path][slot.index], transposed=slot.transposed):
        with np.errstate(over="ignore"):  # said below, by name
            values = piece.astype(stored, copy=False)
        if stored.name in EXPONENT and _any_not_finite(values, EXPONENT[stored.name]):
            finite = piece[np.isfinite(piece)]
            if finite.size > np.isfinite(values).sum():
                raise LockstepError(
                    f"{name} has a value of {np.abs(finite).max():g}, expected one that {dtype} "
                    "holds"
                )
        yield values
        advance(piece.nbytes)


def _any_not_finite(values: np.ndarray, exponent: int) -> bool:
    """Whether one is infinite or no number; as integers, a sixth of the time of `np.isfinite`."""
    return bool(((values.view(np.uint16) & exponent) == exponent).any())
