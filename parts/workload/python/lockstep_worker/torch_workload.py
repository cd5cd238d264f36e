"""The base class of a torch model: write `model` and `loss`, all else follows.

    class MyModel(TorchWorkload):
        def model(self):
            return torch.nn.Linear(10, self.config["classes"])

        def loss(self, model, rows):
            return F.cross_entropy(model(rows["x"]), rows["y"])

In a run file: `factory = "my_model:MyModel"`. burn_p2p's hosts can use the same class, in the
worker of theirs too.
"""

from collections.abc import Callable
from typing import Any

import torch
from lockstep_torch import bound_model

from . import jobs, state_blob, torch_hooks
from .rows import cut


class TorchWorkload(torch_hooks.TorchHooks):
    """A model of torch and its loss.

    What a subclass may write beside `model` and `loss`:

    - `row_losses(model, rows)`: the losses of all rows at once, which is faster than one by one.
    - `inner_optimizer(model)`: an optimizer of torch, and then the inner loop is the worker's:
      `run_inner_loop` takes its steps, and its state goes on from one loop to the next.
    - `inner_step(model, optimizer, rows)`: one such step, if it is another than the usual one.
    - `run_inner_loop(model, job)`: the whole loop, as burn_p2p says.
    - `dataset(split)`: the data of `train` or `held_out`, arrays by name, if the run has none.
    - `evaluate(model, split)`: metrics. Without it, the mean loss over `dataset(split)`.
    - `save(model, folder)`: how the finished model is written.
    - `runtime_device()`: where to compute.
    - `suggests`: a dict of what `lockstep new` writes for it: `learning_rate`, `batch` (rows of a
      peer's local step), `passes` (over the data).

    Args:
        config: the run file's `config`.
    """

    frozen_travel = False  # what needs no gradient stays where it is

    def __init__(self, config: dict):
        self.config = config

    def model(self) -> torch.nn.Module:
        """A new model. Generators are seeded before; beside them only `config` may decide it."""
        raise NotImplementedError(f"{type(self).__name__} has no model")

    def loss(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The mean loss over some rows: tensors by name, or int64 tokens [N, T]."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def row_losses(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The loss of each row [N]: here that of each row alone, one after the other."""
        count = len(next(iter(rows.values())) if isinstance(rows, dict) else rows)
        alone = (cut(rows, i, i + 1) for i in range(count))
        return torch.stack([self.loss(model, row).detach().float() for row in alone])

    def runtime_device(self) -> str:
        """Return the device to compute on: `config["device"]`, or a GPU if there is one."""
        found = "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.get("device", found)

    def bind(self, seed: int, travels: Callable[[str], bool]) -> bound_model.BoundModel:
        """Build the model, to be bound to mapped arrays (gradients.py)."""
        return bound_model.BoundModel(self, seed, travels)

    def init_model(self, device: str) -> torch.nn.Module:
        """A new model on a device."""
        return self.model().to(device)

    def inner_step(self, model: Any, optimizer: torch.optim.Optimizer, rows: Any) -> float:
        """Take one step of an optimizer, and return the loss before it."""
        optimizer.zero_grad()
        loss = self.loss(model, rows)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def __getattr__(self, name: str) -> Any:
        """An inner loop for who has an optimizer, an evaluation for who has data.

        Hosts ask what an object has. So one without these does not seem to have what follows.
        """
        needed = {
            "run_inner_loop": "inner_optimizer",
            "train_window": "inner_optimizer",
            "evaluate": "dataset",
        }
        if name in needed and hasattr(type(self), needed[name]):
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__!r} has no {name!r}")

    def _run_inner_loop(self, state: torch.nn.Module, job: dict) -> dict:
        """Take a job's steps on its rows, from its optimizer's state to the next.

        `job["learning_rates"]`, if there, is the learning rate of each step for all parameters.
        """
        optimizer, given = self.inner_optimizer(state), jobs.given_state(job)
        if given is not None:
            optimizer.load_state_dict(state_blob.decoded(given))
        losses = self._steps(state, optimizer, job)
        path = jobs.state_path(job)
        path.write_bytes(state_blob.encoded(optimizer.state_dict()))
        return {
            "steps_completed": len(losses),
            "metrics": {"loss": sum(losses) / max(1, len(losses))},
            "inner_optimizer_state_path": str(path),
            "inner_optimizer_state_encoding": state_blob.ENCODING,
        }

    def _steps(self, model: torch.nn.Module, optimizer: Any, job: dict) -> list[float]:
        device = next(model.parameters()).device
        rates, losses, was = job.get("learning_rates"), [], model.training
        model.train()
        for step in range(job["num_inner_steps"]):
            for group in optimizer.param_groups if rates is not None else ():
                group["lr"] = rates[step]
            rows = bound_model.on_device(jobs.step_rows(job, step), device)
            losses.append(self.inner_step(model, optimizer, rows))
        model.train(was)
        return losses

    def _train_window(self, state: torch.nn.Module, batches: list[dict]) -> dict:
        """A step for each file of rows, with a new optimizer."""
        steps = len(jobs.files_of(batches)) or len(batches)
        job = {"batches": batches, "num_inner_steps": steps}
        losses = self._steps(state, self.inner_optimizer(state), job)
        return {"loss": sum(losses) / max(1, len(losses))}

    def _evaluate(self, model: torch.nn.Module, split: str) -> dict:
        """The mean loss over the rows of `dataset(split)`."""
        rows, device = self.dataset(split), next(model.parameters()).device
        count, size, was = len(next(iter(rows.values()))), 64, model.training
        total = 0.0
        model.eval()
        with torch.no_grad():
            for start in range(0, count, size):
                some = bound_model.on_device(cut(rows, start, start + size), device)
                total += float(self.row_losses(model, some).double().sum())
        model.train(was)
        return {"loss": total / count}
