"""A Hugging Face folder (config.json, safetensors) as params, and params as such a folder.

The names of the architecture say which tensor is which param. Every tensor is used exactly once;
otherwise one error names all that are missing, unexpected or of another shape.

Both ways go tensor by tensor through files mapped into memory, so neither the folder nor the params
need fit there: one tensor of the folder is in memory at a time, and pieces of a few MiB.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import models
from lockstep.errors import LockstepError, shown
from lockstep.files import read_json, write_json
from lockstep.transcript import tensorfile
from lockstep.transcript.tensorfile import TensorFile, TensorSpec
from models.architecture import Architecture
from pipeline.tokens.tokenizer_files import GENERATION, TOKENIZER_FILES

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = r"[\w-][\w.-]*\.safetensors"  # a file of weights in the same folder
REFUSED = "refused.json"  # written in place of weights where the audit failed
# What may stand beside the weights; nothing else is fetched or copied: no code, no pickle.
COMPANIONS = (GENERATION, *TOKENIZER_FILES)
SMALL = (CONFIG, INDEX, *COMPANIONS)
# The model_types of each architecture in Psyche's words; HfAuto accepts all that are known.
ARCHITECTURES = {
    "HfLlama": ("llama",),
    "HfDeepseek": ("deepseek_v2", "deepseek_v3"),
    "HfAuto": None,
}
MOST_TENSORS = 10**6  # the most of one kind; DeepSeek V3 has 15,000
FLOATS = ("F32", "BF16", "F16")  # dtypes that a tensor may be stored in, as safetensors names them
EXPONENT_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00}  # all set in the bits of infinity and NaN


def why_refused(folder: Path) -> str | None:
    """Return why the audit refused the weights of a folder, or None if it did not."""
    path = folder / REFUSED
    if not path.is_file():
        return None
    why = read_json(path).get("why")
    return shown(why) if isinstance(why, str) else "without a reason"


# ---- config.json ----


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a Hugging Face folder."""
    if not folder.is_dir():
        raise LockstepError(f"{folder}: no such folder, expected config.json and safetensors in it")
    return read_json(folder / CONFIG)


def write_config(folder: Path, hf_config: dict[str, Any], dtype: str) -> None:
    """Write config.json so that transformers 4 and 5 read the same model from it."""
    write_json(folder / CONFIG, whole_config(hf_config, dtype, folder / CONFIG))


def whole_config(hf_config: dict[str, Any], dtype: str, where: object) -> dict[str, Any]:
    """Return the content of such a config.json; errors call the given one `where`."""
    _, config = model_of(hf_config, where)
    content = hf_config | config.to_hf(dtype)
    content.pop("auto_map", None)  # names remote code, which we neither run nor copy
    return dict(sorted(content.items()))


def model_of(hf_config: dict[str, Any], where: object) -> tuple[Architecture, Any]:
    """Return the architecture of a model and its config, which errors call `where`."""
    try:
        model = models.get(hf_config.get("model_type"))
        return model, model.Config.from_hf(hf_config)
    except models.ModelError as error:
        raise LockstepError(f"{where}: {error}") from error


def check_architecture(architecture: str, hf_config: dict[str, Any], where: object) -> None:
    """Check that a config.json is of the architecture that a run file names."""
    model_type, expected = hf_config.get("model_type"), ARCHITECTURES[architecture]
    if expected is not None and model_type not in expected:
        names = " or ".join(map(repr, expected))
        raise LockstepError(
            f"{where}: model_type is {model_type!r}, expected {names} as "
            f"model.LLM.architecture = {architecture}; HfAuto accepts any that is known"
        )


# ---- Which tensor is which param ----


class Slot(NamedTuple):
    """The part of a param that one tensor of a file holds.

    `path` is the param's, joined with "/", and `index` the layer and expert in it, as many of them
    as it has. The tensor has this shape, and may be stored transposed; or in float32, whatever the
    dtype of the others.
    """

    path: str
    index: tuple[int, ...]
    transposed: bool
    shape: tuple[int, ...]
    float32: bool


def param_shapes(model: Architecture, config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every param of a Hugging Face model by its path joined with "/"."""
    return {path: x.shape for path, x in flatten_dict(model.shapes(config), sep="/").items()}


def _slots_of(model: Architecture, config: Any) -> dict[str, Slot]:
    """Return the slot of every tensor that a Hugging Face file of this model holds, by name."""
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


def _check_tensors(
    model: Architecture,
    config: Any,
    slots: Mapping[str, Slot],
    files: Mapping[str, TensorFile],
    where: str,
) -> dict[str, str]:
    """Compare the tensors of Hugging Face files, by name, with the slots of a model.

    Return copies of tied tensors: name -> name of the tensor that it must equal.
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


def _check_params(
    params: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Compare params with the shapes of a Hugging Face model, by path."""
    problems = [f"{path} is missing" for path in sorted(shapes.keys() - params.keys())]
    problems += [f"{path} is not expected" for path in sorted(params.keys() - shapes.keys())]
    for path in sorted(shapes.keys() & params.keys()):
        if params[path].shape != shapes[path]:
            shape, expected = list(params[path].shape), list(shapes[path])
            problems.append(f"{path} is {shape}, expected {expected}")
    if problems:
        raise LockstepError(f"{where}: {'; '.join(problems)}")


# ---- Reading ----


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a Hugging Face folder: one, or those of its index.

    Raises:
      LockstepError: There are none, or the index is damaged or names a file elsewhere.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise LockstepError(f"{folder}: found neither {WEIGHTS} nor {INDEX}, expected one of them")
    return [folder / name for name in sorted(set(_weight_map(folder / INDEX).values()))]


def named_shards(index: Path, present: Collection[str], where: str) -> list[str]:
    """Return the weight files that a Hugging Face index names, all `present` in `where`."""
    named = sorted({*_weight_map(index).values()})
    if absent := [name for name in named if name not in present]:
        raise LockstepError(f"{where}: {INDEX} names {absent[0]}, expected it there")
    return named


class HfFolder:
    """A model in a Hugging Face folder; its tensors' values are read when needed.

    Attributes:
      hf_config: Content of config.json, with the `dtype` that the tensors are stored in (float32
        where they differ).
      specs: Specs of the params in float32, by their paths joined with "/".
      nbytes: Size of all params in float32.

    Raises:
      LockstepError: A file is missing or damaged; a tensor is missing, unexpected or of another
        shape or dtype; or two copies of a tied tensor differ.
    """

    def __init__(self, folder: Path):
        hf_config = read_config(folder)
        model, config = model_of(hf_config, folder / CONFIG)
        slots = _slots_of(model, config)
        self._files = _files_by_tensor(folder)
        where = f"{folder}: tensors against {CONFIG}"
        for name, original in _check_tensors(model, config, slots, self._files, where).items():
            a, b = self._files[name][name], self._files[original][original]
            pieces = zip(tensorfile.pieces(a), tensorfile.pieces(b), strict=False)
            if a.shape != b.shape or not all(np.array_equal(*pair) for pair in pieces):
                raise LockstepError(
                    f"{self._files[name].path}: {name} differs from {original}, expected equal "
                    f"tensors, since {CONFIG} says tie_word_embeddings"
                )
        self._slots = defaultdict(list)  # tensors of each param, in the order of its values
        for name, slot in slots.items():
            self._slots[slot.path].append((name, slot))
        stored = (name for name, slot in slots.items() if not slot.float32)
        codes = {self._files[name].specs[name].dtype for name in stored}
        dtype = tensorfile.DTYPE_OF_CODE[codes.pop()] if len(codes) == 1 else "float32"
        self.hf_config = hf_config | {"dtype": dtype, "torch_dtype": dtype}
        shapes = param_shapes(model, config)
        self.specs = {path: TensorSpec("F32", shape) for path, shape in shapes.items()}
        self.nbytes = sum(spec.nbytes for spec in self.specs.values())

    def save(self, path: Path, advance: Callable[[int], object] = lambda _: None) -> None:
        """Write the params to one safetensors file; call `advance` with the bytes of each piece."""
        tensorfile.write(path, self.specs, partial(self.pieces, advance=advance))

    def pieces(
        self, path: str, advance: Callable[[int], object] = lambda _: None
    ) -> Iterator[np.ndarray]:
        """Yield the values of a Hugging Face param in C order, in contiguous pieces of float32."""
        for name, slot in self._slots[path]:
            tensor = self._files[name][name]
            for piece in tensorfile.pieces(tensor, transposed=slot.transposed):
                values = piece.astype(np.float32, copy=False)
                if not np.isfinite(values).all():
                    worst = values[~np.isfinite(values)][0]
                    raise LockstepError(
                        f"{self._files[name].path}: {name} has a value of {worst}, expected numbers"
                    )
                yield values
                advance(values.nbytes)


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `HfFolder.hf_config` and all params, nested dicts of float32 arrays, into memory."""
    source = HfFolder(folder)
    params = {}
    for path, spec in source.specs.items():
        params[path] = np.empty(spec.shape, np.float32)
        flat, end = params[path].reshape(-1), 0
        for piece in source.pieces(path):
            start, end = end, end + piece.size
            flat[start:end] = piece.reshape(-1)
    return source.hf_config, unflatten_dict(params, sep="/")


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LockstepError(f"{path}: found no weight_map, expected tensor names and their files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not re.fullmatch(SHARD, file):
            raise LockstepError(
                f"{path}: {name} is in {file!r}, expected a safetensors file in the same folder"
            )
    return weight_map


def _files_by_tensor(folder: Path) -> dict[str, TensorFile]:
    """Return the file of each tensor by name, checked against the index where there is one."""
    files: dict[str, TensorFile] = {}
    for path in weight_files(folder):
        file = TensorFile(path)
        for name in file:
            if name in files:
                raise LockstepError(f"{path}: {name} is also in {files[name].path.name}")
            files[name] = file
    if not (folder / WEIGHTS).is_file():
        for name, expected in _weight_map(folder / INDEX).items():
            actual = files[name].path.name if name in files else "no file"
            if actual != expected:
                raise LockstepError(
                    f"{folder / INDEX}: {name} is in {actual}, expected in {expected}"
                )
    return files


# ---- Writing ----


def write_folder(
    folder: Path,
    hf_config: dict[str, Any],
    params: dict[str, Any] | TensorFile,
    dtype: str,
    max_shard_bytes: int = 5 * 2**30,
    advance: Callable[[int], object] = lambda _: None,
) -> None:
    """Write a Hugging Face folder's config.json and safetensors; same params, same bytes.

    Args:
      folder: Existing folder to write to.
      hf_config: Content of the model's config.json; keys that the model does not know are kept.
      params: Nested dicts of arrays; or a file of them, each of which is read as it is written.
      dtype: Dtype of the tensors: float32, bfloat16 or float16.
      max_shard_bytes: Size above which weights are split into several files with an index.
      advance: Called with the number of bytes of each piece of the params.

    Raises:
      LockstepError: A param is missing, unexpected, of another shape, or too large for `dtype`.
    """
    model, config = model_of(hf_config, folder / CONFIG)
    slots = _slots_of(model, config)
    flat = params if isinstance(params, TensorFile) else flatten_dict(params, sep="/")
    shapes = param_shapes(model, config)
    _check_params(flat, shapes, f"{folder}: params against {CONFIG}")

    specs = {
        name: tensorfile.spec_of("float32" if slot.float32 else dtype, slot.shape)
        for name, slot in sorted(slots.items())
    }
    shards = _shards({name: spec.nbytes for name, spec in specs.items()}, max_shard_bytes)
    files = [WEIGHTS]
    if len(shards) > 1:
        count = len(shards)
        files = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        metadata = {
            "total_parameters": sum(map(math.prod, shapes.values())),
            "total_size": sum(spec.nbytes for spec in specs.values()),
        }
        weight_map = {n: file for file, names in zip(files, shards, strict=True) for n in names}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})
    for file, names in zip(files, shards, strict=True):
        tensorfile.write(
            folder / file,
            {name: specs[name] for name in names},
            lambda name: _cast(name, slots[name], flat, dtype, advance),
            metadata={"format": "pt"},
        )
    write_config(folder, hf_config, dtype)


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Fill one safetensors file after the other, in the order of `sizes`, of `limit` bytes each."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _cast(
    name: str,
    slot: Slot,
    params: Mapping[str, np.ndarray],
    dtype: str,
    advance: Callable[[int], object],
) -> Iterator[np.ndarray]:
    stored = np.dtype("float32" if slot.float32 else dtype)
    tensor = np.asarray(params[slot.path])[slot.index]
    for piece in tensorfile.pieces(tensor, transposed=slot.transposed):
        with np.errstate(over="ignore"):  # reported below, by name
            values = piece.astype(stored, copy=False)
        exponent = EXPONENT_BITS.get(stored.name)
        # infinite or NaN, compared as integers: 6 times as fast as `np.isfinite`
        if exponent and ((values.view(np.uint16) & exponent) == exponent).any():
            finite = piece[np.isfinite(piece)]
            if finite.size > np.isfinite(values).sum():
                raise LockstepError(
                    f"{name} has a value of {np.abs(finite).max():g}, expected one that {dtype} "
                    "holds"
                )
        yield values
        advance(piece.nbytes)
