"""A torch module that `simulate` trains: gradients are torch's, all else is as with JAX.

It is bound as a workload's worker binds its model, but in this process: peers take turns with one
module, so however many there are, there is one model and one torch.
"""

import copy
import hashlib
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.simulation.arguments import check_call
from lockstep.simulation.examples import PeerData
from lockstep.simulation.loss_task import PeerRows

TorchLoss = Callable[[Any, Any], Any]
"""loss_fn(module, batch) -> scalar tensor, or a sum and the number of what counts in it."""
COUNTED_EXAMPLES = 1024  # examples over which the statistics of batch norms are computed


def is_module(params: Any) -> bool:
    """Return whether `params` is a torch module; if so, torch is imported already."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(params, torch.nn.Module)


class _BoundModule(NamedTuple):
    """A torch module as `BoundModel` asks for it."""

    module: Any
    loss: TorchLoss

    def model(self) -> Any:
        return self.module

    def runtime_device(self) -> str:
        return str(next(self.module.parameters()).device)


class TorchModule:
    """Computes a module's losses and gradients, as a `Gradient`; has the shapes of its `Task` too.

    The module's params change while it is trained.
    """

    measures = True
    shards = Path()  # no examples of `simulate` are files
    rows_to_count = None  # they are examples, `count_over`

    def __init__(self, module: Any, loss_fn: TorchLoss, micro_batch: int):
        from lockstep.python.lockstep_torch import bits, bound_model

        check_call(loss_fn, "loss_fn", "loss_fn(module, batch) -> scalar", module, None)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise LockstepError(
                f"simulate: params is a {type(module).__name__} without a param that requires a "
                "gradient, expected a module to train"
            )
        self.micro_batch, self._bits, self._loss_fn = micro_batch, bits, loss_fn
        self._parts = bound_model.parts
        self._bound = bound_model.BoundModel(_BoundModule(module, loss_fn), 0, lambda name: True)
        self._params, self._grads = (
            {spec["name"]: np.zeros(spec["shape"], np.float32) for spec in self._bound.tensors}
            for _ in range(2)
        )
        self._bound.open(self._params, self._grads)
        self._bound.init()
        self.first = self._tree(self._params)
        self.sums = False  # until a gradient shows it
        self._counts: dict[int, float] = {}  # what counts in a gradient, by its seed
        self._to_count: list[Any] = []
        self._counted = b""  # hash of the params at which statistics stand

    def count_over(self, data: Sequence[PeerData]) -> None:
        """Compute a torch module's statistics of batch norms over these, before measuring."""
        if self._bound.state.counted:
            size = self.micro_batch
            batches = -(-COUNTED_EXAMPLES // (size * len(data)))
            for peer in data:
                starts = range(0, min(batches * size, peer.examples.count), size)
                self._to_count += [peer.take(np.arange(at, at + size)).examples for at in starts]

    # ---- The task ----

    @property
    def shapes(self) -> Tree:
        """Shapes and dtypes of the torch module's params: nested by the parts of their names."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.first)

    @property
    def nesting(self) -> "TorchModule":
        """How a torch module's params are named for others: `restored`."""
        return self

    def restored(self, nested: Tree) -> dict[str, Any]:
        """Return the torch module's state dict at these params: with what stays, and statistics."""
        self._take(nested)
        self._count()
        return copy.deepcopy(self._bound.current().state_dict())

    # ---- What it computes ----

    @property
    def environment(self) -> dict[str, str]:
        """What can change the bits of a result in torch."""
        facts = self._bits.environment(str(self._bound.device))
        return {f"torch_{name}": str(value) for name, value in facts.items()}

    def gradient(self, params: Tree, rows_N: PeerRows, seed: int) -> tuple[float, Tree]:
        """Return the mean loss of some examples, and torch's gradient: NumPy arrays."""
        self._take(params)
        self._bits.seed_generators(seed)
        self._bound.begin()
        total, count = 0.0, len(rows_N.peer)
        try:
            for first in range(0, count, self.micro_batch):
                batch = jax.tree.map(lambda x, at=first: x[at : at + self.micro_batch], rows_N)
                weight = len(batch.peer) / count
                total += self._bound.accumulate(self._tensors(batch.examples), weight)
            loss = total / self._bound.finish()
            self.sums = self._bound.counted is not None
            if self.sums:
                self._counts[seed] = self._bound.counted
            return loss, self._tree(self._grads)
        except self._bits.ContractError as error:
            raise LockstepError(f"simulate: {error}") from None

    def count(self, params: Tree, rows_N: PeerRows, seed: int) -> float:
        """Return how much counts in such a gradient of torch, with `sums`."""
        if seed not in self._counts:  # a liar has taken another one
            self.gradient(params, rows_N, seed)
        return self._counts.pop(seed)

    def measure(self, params: Tree, batch: Tree) -> float | tuple[float, float]:
        """Return a torch module's mean loss of a batch, or sum and count, in evaluation mode."""
        torch = sys.modules["torch"]
        self._take(params)
        self._count()
        module = self._bound.current()
        module.eval()
        # a loss that draws numbers draws the same ones whenever these examples are measured
        seed = 0
        for leaf in jax.tree.leaves(batch):
            seed = zlib.crc32(np.ascontiguousarray(leaf), seed)
        self._bits.seed_generators(seed)
        with torch.no_grad():
            loss, count = self._parts(self._loss_fn(module, self._tensors(batch)))
        return float(loss) if count is None else (float(loss), count)

    def _count(self) -> None:
        """Compute a torch module's batch-norm statistics, unless they stand at these params."""
        if self._to_count:
            digest = hashlib.sha256(b"".join(self._params.values())).digest()
            if digest != self._counted:
                self._bits.seed_generators(0)
                self._bound.count_statistics(map(self._tensors, self._to_count))
                self._counted = digest

    def close(self) -> None:
        """There is no process: torch runs in this one."""

    # ---- Arrays and tensors ----

    def _take(self, params: Tree) -> None:
        for name, leaf in flatten_dict(params, sep=".").items():
            self._params[name][...] = leaf

    def _tree(self, arrays: dict[str, np.ndarray]) -> Tree:
        """Return copies of a torch module's tensors, nested."""
        copies = {tuple(name.split(".")): array.copy() for name, array in arrays.items()}
        return unflatten_dict(copies)

    def _tensors(self, batch: Tree) -> Any:
        """Return a batch as torch tensors, integers in 64 bits, which torch's losses expect."""
        torch = sys.modules["torch"]

        def tensor(x: np.ndarray) -> Any:
            wide = x.astype(np.int64) if x.dtype.kind in "iu" and x.dtype != np.uint8 else x
            return torch.from_numpy(np.ascontiguousarray(wide)).to(self._bound.device)

        return jax.tree.map(tensor, batch)
