"""burn_p2p's methods of a torch model; base of `TorchWorkload`, where this part is there.

burn_p2p's hosts can use the same class, in the worker of theirs too.
"""

from typing import Any

import torch
from lockstep_torch import bound_model, module_state

from . import jobs, state_blob


class TorchModels:
    """Models on a device, their artifacts, and local steps by an optimizer of torch."""

    offers = {"run_inner_loop": "inner_optimizer", "train_window": "inner_optimizer"}

    def capability_probe(self) -> dict:
        """Return what a host of burn_p2p asks of this machine with torch; measures nothing."""
        device = torch.device(self.runtime_device()).type
        return {
            "preferred_backends": [device],
            "work_units_per_second": 1.0,
            "target_window_seconds": 1,
        }

    def materialize_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Write all tensors of a torch model to a file of safetensors; needs its package."""
        from safetensors.torch import save_model

        save_model(state, path)

    def load_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Read all tensors of a torch model from a file of safetensors."""
        from safetensors.torch import load_model

        load_model(state, path)

    def init_model(self, device: str) -> torch.nn.Module:
        """Make a new torch model on a device."""
        return self.model().to(device)

    def inner_step(self, model: Any, optimizer: torch.optim.Optimizer, rows: Any) -> float:
        """Take one step of a torch optimizer, and return the loss before it."""
        optimizer.zero_grad()
        loss = bound_model.mean(self.loss(model, rows))
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def _run_inner_loop(self, state: torch.nn.Module, job: dict) -> dict:
        """Take a job's steps of torch on its rows, from its optimizer's state to the next.

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
        """Take a step of torch for each file of rows, with a new optimizer."""
        steps = len(jobs.files_of(batches)) or len(batches)
        job, optimizer = {"batches": batches, "num_inner_steps": steps}, self.inner_optimizer(state)
        losses = self._steps(state, optimizer, job, jobs.Rates(optimizer, job))
        return {"loss": sum(losses) / max(1, len(losses))}
