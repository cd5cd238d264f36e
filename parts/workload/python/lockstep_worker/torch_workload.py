"""The base class of a torch model: write `model` and `loss`, all else follows.

    class MyModel(TorchWorkload):
        def model(self):
            return torch.nn.Linear(10, self.config["classes"])

        def loss(self, model, rows):
            return F.cross_entropy(model(rows["x"]), rows["y"])

In a run file: `factory = "my_model:MyModel"`.
"""

from collections.abc import Callable
from typing import Any

import torch
from lockstep_torch import bound_model, module_state

from . import brought
from .rows import cut

_models = brought("torch_models")  # inner loops, and what burn_p2p's hosts ask of a class


class TorchWorkload(_models.TorchModels if _models else object):
    """A model of torch and its loss.

    What a subclass may write beside `model` and `loss`:

    - `row_losses(model, rows)`: the losses of all rows at once, which is faster than one by one,
      and needed where a row's loss depends on other rows; their mean is `loss`. Where `loss` gives
      a sum and a count, it gives sums and counts.
    - `inner_optimizer(model)`: an optimizer of torch, and then the inner loop is the worker's:
      `run_inner_loop` takes its steps, and its state goes on from one loop to the next.
    - `inner_step(model, optimizer, rows)`: one such step, if it is another than the usual one.
    - `run_inner_loop(model, job)`: the whole loop, as burn_p2p says.
    - `dataset(split)`: the data of `train` or `held_out`, arrays by name, if the run has none.
    - `evaluate(model, split)`: metrics. Without it, the mean loss over `dataset(split)`.
    - `save(model, folder)`: how the finished model is written.
    - `runtime_device()`: where to compute.
    - `suggests`: a dict of what `lockstep new` writes for it: `learning_rate` (of AdamW), `batch`
      (rows of a peer's local step), `passes` (over the data), `inner` (of the table `[workload]`).

    Args:
        config: the run file's `config`.
    """

    def __init__(self, config: dict):
        self.config = config

    def model(self) -> torch.nn.Module:
        """Return a new torch model; generators are seeded, beside them only `config` decides."""
        raise NotImplementedError(f"{type(self).__name__} has no model")

    def loss(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The torch model's mean loss over some rows: tensors by name, or int64 tokens [N, T].

        Or a sum and the number of what counts in it, where rows do not count alike.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def row_losses(self, model: torch.nn.Module, rows: Any) -> Any:
        """The torch model's loss of each row [N]: here `loss` of one row after the other.

        Or, where `loss` gives a sum and a number, sums [N] and numbers [N].
        """
        count = len(next(iter(rows.values())) if isinstance(rows, dict) else rows)
        alone = (cut(rows, i, i + 1) for i in range(count))
        values, counts = zip(
            *(bound_model.parts(self.loss(model, row)) for row in alone), strict=True
        )
        losses = torch.stack([loss.detach().float().reshape(()) for loss in values])
        return losses if None in counts else (losses, torch.tensor(counts))

    def runtime_device(self) -> str:
        """Return torch's device to compute on: `config["device"]`, or a GPU if there is one."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.get("device", default)

    def bind(self, seed: int, travels: Callable[[str], bool]) -> bound_model.BoundModel:
        """Build the torch model, to be bound to mapped arrays (gradients.py)."""
        return bound_model.BoundModel(self, seed, travels)

    def __getattr__(self, name: str) -> Any:
        """An inner loop for a class with an optimizer, an evaluation for one with data.

        Hosts ask what an object has. So one without these does not seem to have what follows.
        """
        needed = {"evaluate": "dataset", **getattr(type(self), "offers", {})}
        if name in needed and hasattr(type(self), needed[name]):
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__!r} has no {name!r}")

    def _evaluate(self, model: torch.nn.Module, split: str) -> dict:
        """The torch model's mean loss over the rows of `dataset(split)`."""
        rows, device = self.dataset(split), next(model.parameters()).device
        count, size, total, counted = len(next(iter(rows.values()))), 64, 0.0, 0.0
        with torch.no_grad(), module_state.training(model, mode=False):
            for start in range(0, count, size):
                batch = bound_model.on_device(cut(rows, start, start + size), device)
                result = self.row_losses(model, batch)
                losses, counts = result if isinstance(result, tuple) else (result, None)
                total += float(losses.double().sum())
                counted += len(losses) if counts is None else float(counts.double().sum())
        return {"loss": total / (counted or 1)}
