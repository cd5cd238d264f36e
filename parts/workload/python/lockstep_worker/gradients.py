"""The capability `gradient`: parameters, gradients and rows in a file that host and worker map.

A user's object needs `init(seed)`, `gradient(params, rows)` and, to be measured, `measure(params,
rows)`, over dicts of NumPy arrays. An object with `bind(seed, travels)`, which the base classes
have, gives what `ArrayModel` gives here, and so reads and writes the mapped arrays itself.
"""

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lockstep_torch import bits

from . import frames, layout, rows

METHODS = {
    "begin": "gradient",
    "open_arrays": "gradient",
    "init": "gradient",
    "gradient": "gradient",
    "statistics": "gradient",
    "measure": "measure",
    "evaluate_params": "evaluate",
    "save_params": "save",
    "dataset": "dataset",
}  # and the capability that each needs
Travels = Callable[[str], bool]


def offers(workload: Any, capability: str) -> bool:
    """Return whether a user's object has a capability, such as `gradient`."""
    bound = capability in ("gradient", "measure") and hasattr(workload, "bind")
    return bound or callable(getattr(workload, capability, None))


class ArrayModel:
    """A user's functions of gradients over dicts of NumPy arrays, bound to mapped arrays.

    Attributes:
        tensors: name, shape and dtype of what travels, in order.
        stays: why, name and array of all else: `frozen`, `excluded`, `buffer` or `integer`.
        tied: other names of what travels.
    """

    def __init__(self, workload: Any, seed: int, travels: Travels):
        self.workload = workload
        arrays = {name: np.asarray(value) for name, value in sorted(workload.init(seed).items())}
        moves = {name: layout.is_float(value) and travels(name) for name, value in arrays.items()}
        self.initial = {name: value for name, value in arrays.items() if moves[name]}
        self.rest = {name: value for name, value in arrays.items() if not moves[name]}
        self.tensors = [
            {"name": name, "shape": list(value.shape), "dtype": layout.dtype_name(value)}
            for name, value in self.initial.items()
        ]
        self.stays = [
            ("excluded" if layout.is_float(value) else "integer", name, value)
            for name, value in self.rest.items()
        ]
        self.tied: dict[str, str] = {}

    def open(self, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        """Bind the arrays: read parameters here and write gradients there, float32 by name."""
        self.params, self.gradients = params, gradients

    def init(self) -> None:
        """Write the parameters as they begin into the mapped arrays."""
        for name, value in self.initial.items():
            self.params[name][...] = value

    def current(self) -> dict[str, np.ndarray]:
        """Return all mapped arrays, as the user's functions get them."""
        now = {
            name: self.params[name].astype(value.dtype, copy=False)
            for name, value in self.initial.items()
        }
        return {**now, **self.rest}

    def begin(self) -> None:
        """Called before the micro-batches of a gradient of the user's functions."""
        for gradient in self.gradients.values():
            gradient[...] = 0

    def accumulate(self, some: Any, weight: float) -> float:
        """Add the gradient of some rows to the mapped arrays; return what they add to the loss."""
        loss, gradients = self.workload.gradient(self.current(), some)
        if gradients.keys() != self.gradients.keys():
            actual, expected = gradients.keys(), self.gradients.keys()
            missing, extra = sorted(expected - actual), sorted(actual - expected)
            raise ValueError(f"gradients: missing {missing}, not expected {extra}")
        for name, target in self.gradients.items():
            value = np.asarray(gradients[name], np.float32)
            if value.shape != target.shape:
                raise ValueError(f"gradient {name!r}: shape {value.shape}; {target.shape} expected")
            target += value if weight == 1 else np.float32(weight) * value
        return weight * float(loss)

    def finish(self) -> float:
        """Called after the micro-batches of a gradient; return what divides their loss."""
        return 1.0

    def losses(self, some: Any) -> Any:
        """The user's functions' loss of each row, or sums and counts."""
        return self.workload.measure(self.current(), some)


class Session:
    """A host's requests of the capability `gradient`, one method each."""

    def __init__(self, workload: Any):
        self.workload = workload
        self.bound: Any = None
        self.opened = False

    def answer(self, method: str, params: Any) -> dict:
        """The result of one of `METHODS` of the capability."""
        if not offers(self.workload, METHODS[method]):
            raise ValueError(f"{type(self.workload).__name__} has no {METHODS[method]}")
        if method not in ("begin", "dataset") and self.bound is None:
            raise ValueError(f"{method} before begin")
        if method not in ("begin", "dataset", "open_arrays") and not self.opened:
            raise ValueError(f"{method} before open_arrays")
        return getattr(self, method)(params)

    def begin(self, params: Any) -> dict:
        """Build the model for gradients from its config and a seed; say what of it travels."""
        self.spec, self.micro_batch = params["rows"], params["micro_batch"]
        self.width = rows.row_width(self.spec)
        globs, seed = layout.plain_filter(params["state_dict_filter"]), params["seed"]
        if self.micro_batch < 1:
            raise ValueError(f"micro_batch {self.micro_batch}; 1 or more expected")
        bits.use_threads(params.get("threads"))
        bits.seed_generators(seed)
        make = getattr(self.workload, "bind", None) or partial(ArrayModel, self.workload)
        self.bound, self.opened, self.compared = None, False, False  # one model at a time
        self.bound = make(seed, lambda name: layout.allows(globs, name))
        tensors, stays = self.bound.tensors, sorted(self.bound.stays, key=lambda part: part[1])
        if not tensors:
            raise ValueError(
                f"no parameter travels: {len(stays)} tensors, none of them is trainable and let "
                f"through by include_globs {globs['include_globs']} and "
                f"exclude_globs {globs['exclude_globs']}; 1 or more expected"
            )
        return {
            "tensors": tensors,
            "frozen": [{"name": n, "why": why} for why, n, _ in stays if why != "integer"],
            "integers": [name for why, name, _ in stays if why == "integer"],
            "tied": self.bound.tied,
            "parameter_count": sum(_size(tensor) for tensor in tensors),
            "layout_hash": layout.layout_hash(tensors),
            "frozen_sha256": layout.digest((name, value) for _, name, value in stays),
        }

    def open_arrays(self, params: Any) -> dict:
        """Map the host's file of parameters, gradients and rows."""
        count = sum(_size(tensor) for tensor in self.bound.tensors)
        buffer = np.memmap(params["path"], np.uint8, "r+")
        views = []
        for region in ("params", "gradients"):
            offset, length = params[region]
            if length != count or offset + 4 * count > len(buffer):
                raise ValueError(
                    f"{params['path']}: {region} of {length} values at {offset} in {len(buffer)} "
                    f"bytes; {count} values expected"
                )
            views.append(self._views(buffer[offset : offset + 4 * count].view("<f4")))
        offset, size = params["rows"]
        self.words = buffer[offset : offset + size].view("<i4")
        self.bound.open(*views)
        self.opened = True
        return {"ok": True}

    def _views(self, values: np.ndarray) -> dict[str, np.ndarray]:
        views, offset, values = {}, 0, np.asarray(values)
        for tensor in self.bound.tensors:
            piece = values[offset : (offset := offset + _size(tensor))]
            views[tensor["name"]] = piece.reshape(tensor["shape"])
        return views

    def init(self, params: Any) -> dict:
        """Write the model's parameters as they begin into the host's file."""
        self.bound.init()
        return {"ok": True}

    def _micro_batches(self, params: Any) -> list[np.ndarray]:
        """The rows of a gradient in the mapped file, as words [N, W]."""
        count, width = params["rows"], params["width"]
        if count < 1 or width != self.width or count * width > len(self.words):
            raise ValueError(
                f"{count} rows of {width} words, room for {len(self.words)} words; "
                f"1 or more rows of {self.width} words expected"
            )
        words = np.array(self.words[: count * width]).reshape(count, width)
        starts = range(0, count, self.micro_batch)
        return [words[start : start + self.micro_batch] for start in starts]

    def gradient(self, params: Any) -> dict:
        """Write the mean gradient over the host's rows; equal arguments give equal bits."""
        bits.seed_generators(params["seed"])
        self.bound.begin()
        loss = 0.0
        for words in self._micro_batches(params):
            weight = len(words) / params["rows"]
            loss += self.bound.accumulate(rows.decoded(words, self.spec), weight)
        return {"loss": frames.finite(loss / self.bound.finish())}

    def statistics(self, params: Any) -> dict:
        """Compute batch norms' statistics for gradients anew over the rows; return them."""
        bits.seed_generators(0)
        lots = (rows.decoded(words, self.spec) for words in self._micro_batches(params))
        self.bound.count_statistics(lots)
        statistics = self.bound.state.counted.items()
        return {"values": {name: value.tolist() for name, value in statistics}}

    def measure(self, params: Any) -> dict:
        """The mean loss of each of the host's rows, without a gradient, and what counts in it.

        Generators are seeded by the rows: a loss that draws numbers (a diffusion's noise) is the
        same whenever a micro-batch of these rows is measured, and others draw other numbers.
        """
        losses, counts = [], []
        for words in self._micro_batches(params):
            if len(words) > 1 and not self.compared and hasattr(self.bound, "compare_losses"):
                self.bound.compare_losses(rows.decoded(words, self.spec))
                self.compared = True
            bits.seed_generators(zlib.crc32(words))
            result = self.bound.losses(rows.decoded(words, self.spec))
            arrays = result if isinstance(result, tuple) else (result,)
            parts = [np.asarray(values, np.float64) for values in arrays]
            if [part.shape for part in parts] != [(len(words),)] * len(parts):
                shapes = " and ".join(str(part.shape) for part in parts)
                raise ValueError(f"losses of shape {shapes}; ({len(words)},) expected")
            if len(parts) == 2:
                counts += [float(count) for count in parts[1]]
                parts[0] = parts[0] / np.where(parts[1] == 0, 1, parts[1])
            losses += [frames.finite(loss) for loss in parts[0]]
        return {"losses": losses} | ({"counts": counts} if counts else {})

    def evaluate_params(self, params: Any) -> dict:
        """Return the user's metrics at the current parameters."""
        bits.seed_generators(0)
        metrics = self.workload.evaluate(self.bound.current(), params["split"])
        return {"metrics": frames.metrics_of(metrics)}

    def save_params(self, params: Any) -> dict:
        """Let the user's object write the parameters as they are into a folder."""
        self.workload.save(self.bound.current(), params["path"])
        return {"ok": True}

    def dataset(self, params: Any) -> dict:
        """Write the user's data, one file of NumPy an array, [N, ...] each."""
        entries, folder = [], Path(params["path"])
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in self.workload.dataset(params["split"]).items():
            array, file = np.ascontiguousarray(value), f"{name}.npy"
            if Path(file).name != file or array.dtype.hasobject:
                raise ValueError(f"array {name!r} of {array.dtype}; a file's name, no objects")
            np.save(folder / file, array)
            facts = {"dtype": array.dtype.name, "shape": list(array.shape)}
            entries.append({"name": name, "file": file, **facts})
        return {"arrays": entries}


def _size(tensor: dict) -> int:
    return int(np.prod(tensor["shape"], dtype=np.int64))
