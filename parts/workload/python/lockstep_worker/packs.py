"""burn_p2p's parameter packs: a folder with `manifest.json` and `values.f32le`.

The values are the float tensors of a state, one after the other, modules by name and in them keys
by name, as float32 in little-endian order. The layout's hash is burn_p2p's, byte for byte. Ours is
the hash of the values, which older readers ignore; and a tied tensor travels once, where burn_p2p
writes it under each of its names. A state is a torch module, `{"model": module}`,
`{"modules": {name: module}}`, or a dict of NumPy arrays. No torch is imported here unless the
state has brought it.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lockstep_torch import bits

FORMAT = "burn-p2p-python-flattened-parameter-pack-v1"
MANIFEST, VALUES = "manifest.json", "values.f32le"
CHUNK = 1 << 20  # bytes that are read at once


class ArrayState:
    """A dict of NumPy arrays with the two methods of a torch module that packs need."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def state_dict(self) -> dict[str, np.ndarray]:
        """The arrays by name, in a dict of its own."""
        return dict(self.arrays)

    def load_state_dict(self, arrays: dict[str, np.ndarray]) -> None:
        """Take these arrays in their place."""
        self.arrays.update(arrays)


class Layout(NamedTuple):
    """The exchanged part of a state, in order.

    Attributes:
        tensors: name, shape and dtype of each.
        places: module, key and tensor of each.
        excluded: names of floats that stay.
        integers: names of what is no float.
        tied: other names of a tensor that travels, and the name under which it does.
    """

    tensors: list[dict]
    places: list[tuple[Any, str, Any]]
    excluded: list[str]
    integers: list[str]
    tied: dict[str, str]

    @property
    def count(self) -> int:
        """The number of parameters that peers exchange."""
        return sum(math.prod(tensor["shape"]) for tensor in self.tensors)

    def keys(self) -> dict:
        """The fields of a manifest and of a plan that say what travels."""
        return {
            "layout_hash": layout_hash(self.tensors),
            "parameter_count": self.count,
            "included_keys": [tensor["name"] for tensor in self.tensors],
            "excluded_float_keys": self.excluded,
            "ignored_non_float_keys": self.integers,
        }


def layout_hash(tensors: list[dict]) -> str:
    """The hash of names, shapes and dtypes of what travels, in this order."""
    facts = [{**tensor, "numel": math.prod(tensor["shape"])} for tensor in tensors]
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "torch-layout-" + hashlib.sha256(text.encode()).hexdigest()


def plain_filter(state_filter: dict | None) -> dict[str, list[str]]:
    """A filter with both its lists."""
    given = state_filter or {}
    return {key: list(given.get(key) or []) for key in ("include_globs", "exclude_globs")}


def allows(state_filter: dict | None, name: str) -> bool:
    """Return whether a filter includes a tensor: in `include_globs`, not in `exclude_globs`."""
    include, exclude = plain_filter(state_filter).values()
    if include and not any(fnmatchcase(name, glob) for glob in include):
        return False
    return not any(fnmatchcase(name, glob) for glob in exclude)


def layout_of(state: Any, state_filter: dict | None, frozen_travel: bool = True) -> Layout:
    """What of a state travels.

    Args:
        state: a state.
        state_filter: `include_globs` and `exclude_globs` over full names.
        frozen_travel: burn_p2p's way; without it a parameter that needs no gradient stays.

    Raises:
        TypeError, ValueError: it is no state.
    """
    layout, first = Layout([], [], [], [], {}), {}
    for prefix, module in modules_of(state):
        frozen = set() if frozen_travel else frozen_keys(module)
        for key, tensor in sorted(module.state_dict().items()):
            name = f"{prefix}.{key}" if prefix else key
            if not is_float(tensor):
                layout.integers.append(name)
            elif key in frozen or not allows(state_filter, name):
                layout.excluded.append(name)
            elif (place := bits.address(tensor)) in first:
                layout.tied[name] = first[place]
            else:
                first[place] = name
                shape = [int(size) for size in tensor.shape]
                layout.tensors.append({"name": name, "shape": shape, "dtype": dtype_name(tensor)})
                layout.places.append((module, key, tensor))
    return layout


def modules_of(state: Any) -> list[tuple[str, Any]]:
    """The modules of a state with their prefixes, by name.

    Raises:
        TypeError: it is no state.
        ValueError: there are no modules in it, or the name of one is empty or has a dot.
    """
    if not isinstance(state, dict):
        return [("", _with_state_dict(state))]
    if "model" in state and not isinstance(state["model"], np.ndarray):
        return [("", _with_state_dict(state["model"]))]
    if "modules" not in state:
        return [("", _with_state_dict(state))]
    if not state["modules"] or any(not name or "." in name for name in state["modules"]):
        names = list(state["modules"])
        raise ValueError(f"modules of the state: {names}; names without a dot expected, at least 1")
    return [(name, _with_state_dict(state["modules"][name])) for name in sorted(state["modules"])]


def _with_state_dict(module: Any) -> Any:
    if isinstance(module, dict) and all(isinstance(part, np.ndarray) for part in module.values()):
        return ArrayState(module)
    if hasattr(module, "state_dict") and hasattr(module, "load_state_dict"):
        return module
    raise TypeError(
        f"a state of type {type(module).__name__}; a torch module, {{'model': module}}, "
        "{'modules': {name: module}} or a dict of NumPy arrays expected"
    )


def frozen_keys(module: Any) -> set[str]:
    """Return the names of a module's parameters that need no gradient."""
    if isinstance(module, ArrayState):
        return set()
    parameters = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in parameters if not parameter.requires_grad}


def is_float(tensor: Any) -> bool:
    """Return whether a torch tensor or a NumPy array holds floats."""
    if isinstance(tensor, np.ndarray):
        return tensor.dtype.kind == "f" or tensor.dtype.name == "bfloat16"
    return hasattr(tensor, "is_floating_point") and tensor.is_floating_point()


def dtype_name(tensor: Any) -> str:
    """A dtype as torch writes it."""
    return f"torch.{tensor.dtype.name}" if isinstance(tensor, np.ndarray) else str(tensor.dtype)


def float32(tensor: Any) -> np.ndarray:
    """The values of a tensor in one row, as they travel; a copy only where it must be."""
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach().float().cpu().contiguous().numpy()
    return np.ascontiguousarray(tensor, "<f4").reshape(-1)


def raw(tensor: Any) -> np.ndarray:
    """The bytes of a tensor of any dtype."""
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach().cpu().contiguous().reshape(-1)
        tensor = tensor.view(sys.modules["torch"].uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def digest(tensors: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, in this order."""
    hashed = hashlib.sha256()
    for name, tensor in tensors:
        facts = [name, dtype_name(tensor), [int(size) for size in tensor.shape]]
        hashed.update(json.dumps(facts).encode() + b"\n")
        hashed.update(raw(tensor))
    return hashed.hexdigest()


def write(path: str | Path, layout: Layout, schema: str, state_filter: dict | None) -> None:
    """Write the pack of a layout's state into a folder."""
    folder, hashed = Path(path), hashlib.sha256()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / VALUES).open("wb") as file, ThreadPoolExecutor(1) as beside:
        for _, _, tensor in layout.places:
            values = float32(tensor)
            beside.submit(hashed.update, values)  # takes longer than the file
            file.write(values)
    manifest = {"format": FORMAT, "model_schema_hash": str(schema), **layout.keys()}
    manifest |= {"values_f32_le": VALUES, "values_sha256": hashed.hexdigest()}
    manifest |= {"state_dict_filter": plain_filter(state_filter)}
    if layout.tied:
        manifest["tied"] = layout.tied
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def read(path: str | Path) -> tuple[dict, np.ndarray]:
    """The manifest of a pack, and its values, float32 [parameters].

    Raises:
        ValueError: another format, another count, values that are not those it was written with,
            or a name of a file outside its folder.
    """
    folder = Path(path)
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{folder}: format {manifest.get('format')!r}; {FORMAT!r} expected")
    name = manifest["values_f32_le"]
    if name != Path(name).name:
        raise ValueError(f"{folder}: values_f32_le {name!r}; a file in the pack's folder expected")
    size, count = (folder / name).stat().st_size, manifest["parameter_count"]
    if size != 4 * count:
        raise ValueError(f"{folder / name}: {size} bytes; 4 for each of {count} values expected")
    values, found = _read_hashed(folder / name, count)
    if manifest.get("values_sha256", found) != found:
        raise ValueError(
            f"{folder / name}: SHA-256 {found}; its manifest has {manifest['values_sha256']}"
        )
    return manifest, values


def _read_hashed(path: Path, count: int) -> tuple[np.ndarray, str]:
    """The values in a file, and their SHA-256, which is computed while they are read."""
    values, hashed = np.empty(count, "<f4"), hashlib.sha256()
    data = values.view(np.uint8)
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1) as beside:
        for start in range(0, len(data), CHUNK):
            piece = data[start : start + CHUNK]
            if file.readinto(piece) != len(piece):
                raise ValueError(f"{path}: shorter than it was a moment ago")
            beside.submit(hashed.update, piece)
    return values, hashed.hexdigest()


def load(path: str | Path, layout: Layout, schema: str | None = None) -> None:
    """Put the values of a pack into the state of a layout; what does not travel stays as it is.

    Raises:
        ValueError: the pack is damaged, or of another layout or schema.
    """
    manifest, values = read(path)
    found, expected = manifest["layout_hash"], layout_hash(layout.tensors)
    schema_found = manifest.get("model_schema_hash")
    if found != expected or schema not in (None, schema_found):
        raise ValueError(
            f"{path}: layout {found}, schema {schema_found!r}; "
            f"the model's layout {expected}, schema {schema or schema_found!r} expected"
        )
    if len(values) != layout.count:
        raise ValueError(f"{path}: {len(values)} values; {layout.count} expected by the layout")
    new, at = {}, 0
    for module, key, tensor in layout.places:
        piece = values[at : (at := at + math.prod(tensor.shape))].reshape(tensor.shape)
        new.setdefault(id(module), (module, {}))[1][key] = _like(piece, tensor)
    for module, pieces in new.values():
        module.load_state_dict({**module.state_dict(), **pieces})


def _like(values: np.ndarray, tensor: Any) -> Any:
    """Return values in the dtype, and on the device, of a tensor."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return sys.modules["torch"].from_numpy(values).to(tensor.device, tensor.dtype)
