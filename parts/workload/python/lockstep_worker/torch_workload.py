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
from lockstep_torch import bound_model, module_state

from . import jobs, state_blob
from .rows import cut


class TorchWorkload:
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
        """A new model. Generators are seeded before; beside them only `config` may decide it."""
        raise NotImplementedError(f"{type(self).__name__} has no model")

    def loss(self, model: torch.nn.Module, rows: Any) -> torch.Tensor:
        """The mean loss over some rows: tensors by name, or int64 tokens [N, T].

        Or a sum and the number of what counts in it, where rows do not count alike.
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    def row_losses(self, model: torch.nn.Module, rows: Any) -> Any:
        """The loss of each row [N]: here `loss` of one row after the other.

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
        """Return the device to compute on: `config["device"]`, or a GPU if there is one."""
        default = "cuda" if torch.cuda.is_available() else "cpu"
        return self.config.get("device", default)

    def capability_probe(self) -> dict:
        """Return what a host of burn_p2p asks of this machine; nothing is measured."""
        device = torch.device(self.runtime_device()).type
        return {
            "preferred_backends": [device],
            "work_units_per_second": 1.0,
            "target_window_seconds": 1,
        }

    def materialize_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Write all tensors of a model to a file of safetensors, whose package this needs."""
        from safetensors.torch import save_model

        save_model(state, path)

    def load_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Read all tensors of a model from such a file."""
        from safetensors.torch import load_model

        load_model(state, path)

    def bind(self, seed: int, travels: Callable[[str], bool]) -> bound_model.BoundModel:
        """Build the model, to be bound to mapped arrays (gradients.py)."""
        return bound_model.BoundModel(self, seed, travels)

    def init_model(self, device: str) -> torch.nn.Module:
        """A new model on a device."""
        return self.model().to(device)

    def inner_step(self, model: Any, optimizer: torch.optim.Optimizer, rows: Any) -> float:
        """Take one step of an optimizer, and return the loss before it."""
        optimizer.zero_grad()
        loss = bound_model.mean(self.loss(model, rows))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def __getattr__(self, name: str) -> Any:
        """An inner loop for a class with an optimizer, an evaluation for one with data.

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

        Each group's own learning rate is scaled by `job["learning_rate_factors"]`, the run's
        schedule.
        """
        optimizer, blob = self.inner_optimizer(state), jobs.given_state(job)
        rates = jobs.Rates(optimizer, job)
        if blob is not None:
            optimizer.load_state_dict(state_blob.decoded(blob))
        losses = self._steps(state, optimizer, job, rates)
        path = jobs.state_path(job)
        path.write_bytes(state_blob.encoded(optimizer.state_dict()))
        return {
            "steps_completed": len(losses),
            "metrics": {"loss": sum(losses) / max(1, len(losses))},
            "inner_optimizer_state_path": str(path),
            "inner_optimizer_state_encoding": state_blob.ENCODING,
        }

    def _steps(self, model: Any, optimizer: Any, job: dict, rates: jobs.Rates) -> list[float]:
        device, losses = next(model.parameters()).device, []
        with module_state.training(model):
            for step in range(job["num_inner_steps"]):
                rates.scale(rates.factor(step))
                rows = bound_model.on_device(jobs.step_rows(job, step), device)
                losses.append(self.inner_step(model, optimizer, rows))
        return losses

    def _train_window(self, state: torch.nn.Module, batches: list[dict]) -> dict:
        """A step for each file of rows, with a new optimizer."""
        steps = len(jobs.files_of(batches)) or len(batches)
        job, optimizer = {"batches": batches, "num_inner_steps": steps}, self.inner_optimizer(state)
        losses = self._steps(state, optimizer, job, jobs.Rates(optimizer, job))
        return {"loss": sum(losses) / max(1, len(losses))}

    def _evaluate(self, model: torch.nn.Module, split: str) -> dict:
        """The mean loss over the rows of `dataset(split)`."""
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
