"""What of a state travels in burn_p2p's parameter packs (pack_files.py).

The values are tensors one after the other, modules by name and in them keys by name. The layout's
hash is burn_p2p's, byte for byte; a tied tensor travels once, where burn_p2p writes it under each
of its names. A state is a torch module, `{"model": module}`, `{"modules": {name: module}}`, or a
dict of NumPy arrays. No torch is imported here unless the state has brought it.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from lockstep_torch import bits

from . import pack_files
from .layout import allows, dtype_name, is_float, layout_hash, plain_filter


class ArrayState:
    """A dict of NumPy arrays with the two methods of a torch module that packs need."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def state_dict(self) -> dict[str, np.ndarray]:
        """The arrays that packs hold by name, in a dict of its own."""
        return dict(self.arrays)

    def load_state_dict(self, arrays: dict[str, np.ndarray]) -> None:
        """Take a pack's arrays in the place of these."""
        self.arrays.update(arrays)


class Layout(NamedTuple):
    """The part of a state that packs exchange, in order.

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
        """The number of parameters in a pack."""
        return sum(math.prod(tensor["shape"]) for tensor in self.tensors)

    def keys(self) -> dict:
        """The fields of a pack's manifest and of a plan that say what travels."""
        return {
            "layout_hash": layout_hash(self.tensors),
            "parameter_count": self.count,
            "included_keys": [tensor["name"] for tensor in self.tensors],
            "excluded_float_keys": self.excluded,
            "ignored_non_float_keys": self.integers,
        }


def layout_of(state: Any, state_filter: dict | None, by_gradient: bool = False) -> Layout:
    """The part of a state that travels in packs.

    Args:
        state: a state.
        state_filter: `include_globs` and `exclude_globs` over full names.
        by_gradient: whether what travels is what takes a gradient (`module_state`); else all floats
            do, as with burn_p2p.

    Raises:
        TypeError, ValueError: it is no state.
    """
    layout, first = Layout([], [], [], [], {}), {}
    for prefix, module in modules_of(state):
        start = f"{prefix}." if prefix else ""
        if by_gradient and not isinstance(module, ArrayState):
            _add_trained(layout, start, module, state_filter)
            continue
        for key, tensor in sorted(module.state_dict().items()):
            name = start + key
            if not is_float(tensor):
                layout.integers.append(name)
            elif not allows(state_filter, name):
                layout.excluded.append(name)
            elif (place := bits.address(tensor)) in first:
                layout.tied[name] = first[place]
            else:
                first[place] = name
                shape = [int(size) for size in tensor.shape]
                layout.tensors.append({"name": name, "shape": shape, "dtype": dtype_name(tensor)})
                layout.places.append((module, key, tensor))
    return layout


def _add_trained(layout: Layout, start: str, module: Any, state_filter: dict | None) -> None:
    from lockstep_torch import module_state

    state = module_state.state_of(module, lambda key: allows(state_filter, start + key))
    layout.tensors.extend({**tensor, "name": start + tensor["name"]} for tensor in state.tensors)
    layout.places.extend((module, key, tensors[0]) for key, tensors in state.trained.items())
    layout.tied.update({start + key: start + home for key, home in state.tied.items()})
    for why, key, _ in state.stays:
        (layout.integers if why == "integer" else layout.excluded).append(start + key)


def modules_of(state: Any) -> list[tuple[str, Any]]:
    """The modules of a state that packs hold, with their prefixes, by name.

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
    module = bits.plain(module)
    if isinstance(module, dict) and all(isinstance(part, np.ndarray) for part in module.values()):
        return ArrayState(module)
    if hasattr(module, "state_dict") and hasattr(module, "load_state_dict"):
        return module
    raise TypeError(
        f"a state of type {type(module).__name__}; a torch module, {{'model': module}}, "
        "{'modules': {name: module}} or a dict of NumPy arrays expected"
    )


def float32(tensor: Any) -> np.ndarray:
    """The values of a tensor in one row, as packs hold them; a copy only where it must be."""
    if not isinstance(tensor, np.ndarray):
        tensor = bits.real(tensor.detach()).float().cpu().contiguous().numpy()
    return np.ascontiguousarray(tensor, "<f4").reshape(-1)


def write(path: str | Path, layout: Layout, schema: str, state_filter: dict | None) -> None:
    """Write the pack of a layout's state into a folder."""
    facts = {"model_schema_hash": str(schema), **layout.keys()}
    facts |= {"state_dict_filter": plain_filter(state_filter)}
    facts |= {"tied": layout.tied} if layout.tied else {}
    pack_files.write(Path(path), (float32(tensor) for _, _, tensor in layout.places), facts)


def load(path: str | Path, layout: Layout, schema: str | None = None) -> None:
    """Put the values of a pack into the state of a layout; what does not travel stays as it is.

    Raises:
        ValueError: the pack is damaged, or of another layout or schema.
    """
    expected = layout_hash(layout.tensors)
    values = pack_files.read(Path(path), expected, schema, layout.count)
    new, offset = {}, 0
    for module, key, tensor in layout.places:
        shape = tensor.shape if isinstance(tensor, np.ndarray) else bits.real(tensor).shape
        piece = values[offset : (offset := offset + math.prod(shape))].reshape(shape)
        new.setdefault(id(module), (module, {}))[1][key] = _like(piece, tensor)
    for module, pieces in new.values():
        module.load_state_dict({**module.state_dict(), **pieces})


def _like(values: np.ndarray, tensor: Any) -> Any:
    """Return a pack's values in the dtype, and on the device, of a tensor."""
    if isinstance(tensor, np.ndarray):
        return values.astype(tensor.dtype)
    return bits.like(values, tensor).to(tensor.device, tensor.dtype)
