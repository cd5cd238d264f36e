"""The base class of a torch model: write `model` and `loss`, all else follows.

    class MyModel(TorchWorkload):
        def model(self):
            return torch.nn.Linear(10, self.config["classes"])

        def loss(self, model, rows):
            return F.cross_entropy(model(rows["x"]), rows["y"])

In a run file: `factory = "my_model:MyModel"`. burn_p2p's hosts can use the same class.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # a GPU that repeats itself

import torch

from . import torch_bound


class TorchWorkload:
    """A model of torch and its loss.

    What a subclass may write beside `model` and `loss`:

    - `row_losses(model, rows)`: the losses of all rows at once, which is faster than one by one.
    - `dataset(split)`: the data of `train` or `held_out`, arrays by name, if the run has none.
    - `evaluate(model, split)`: metrics. Without it, the mean loss over `dataset(split)`.
    - `save(model, folder)`: how the finished model is written.
    - `runtime_device()`: where to compute.

    Args:
        config: the run file's `config`.
    """

    frozen_travel = False  # what needs no gradient stays where it is

    def __init__(self, config: dict):
        self.config = config

    def model(self) -> torch.nn.Module:
        """A new model. Generators are seeded before, and nothing but `config` may decide it."""
        raise NotImplementedError(f"{type(self).__name__} has no model")

    def loss(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The mean loss over some rows: tensors by name, or int64 tokens [N, T]."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def row_losses(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The loss of each row [N]: here that of each row alone, one after the other."""
        return torch.stack([self.loss(model, row).detach() for row in _one_by_one(rows)])

    def runtime_device(self) -> str:
        """Where to compute: `config["device"]`, or a GPU if there is one."""
        found = "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.get("device", found)

    def bind(self, seed: int, travels: Callable[[str], bool]) -> torch_bound.BoundModel:
        """Build the model, to be bound to mapped arrays (gradients.py)."""
        return torch_bound.BoundModel(self, seed, travels)


def _one_by_one(rows: Any) -> list:
    if not isinstance(rows, dict):
        return [rows[i : i + 1] for i in range(len(rows))]
    count = len(next(iter(rows.values())))
    return [{name: part[i : i + 1] for name, part in rows.items()} for i in range(count)]
