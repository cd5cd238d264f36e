"""A torch model bound to mapped arrays: parameters are read there, gradients written there.

On a CPU a float32 parameter *is* the mapped memory, and its `.grad` too, so that nothing is copied.
Parameters of another dtype, or on another device, travel as float32 and are copied.
"""

import os
from typing import Any

import numpy as np

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or a GPU does not repeat itself

import torch

from . import bits


def on_device(rows: Any, device: torch.device) -> Any:
    """Decoded rows as tensors; paths stay paths."""
    if isinstance(rows, dict):
        return {name: on_device(part, device) for name, part in rows.items()}
    return torch.from_numpy(rows).to(device) if isinstance(rows, np.ndarray) else rows


class Travelling:
    """The exchanged arrays of a model, by name in order, and its other names.

    A tensor with several names, or several parameters over one memory, travels once: under the
    first of its names that may.
    """

    def __init__(self, model: torch.nn.Module, travels: Any):
        self.parameters: dict[str, list[torch.nn.Parameter]] = {}
        self.tied: dict[str, str] = {}
        first: dict[Any, str] = {}
        named = sorted(model.named_parameters(remove_duplicate=False))
        places = {name: bits.address(parameter) for name, parameter in named}
        for name, parameter in named:
            if parameter.requires_grad and travels(name) and places[name] not in first:
                first[places[name]] = name
                self.parameters[name] = []
        self.stays: list[tuple[str, str, torch.Tensor]] = []
        for name, parameter in named:
            home = first.get(places[name])
            if home is None:
                why = "excluded" if parameter.requires_grad else "frozen"
                self.stays.append((why, name, parameter))
                continue
            if name != home:
                self.tied[name] = home
            if not any(parameter is known for known in self.parameters[home]):
                self.parameters[home].append(parameter)
        for name, buffer in sorted(model.named_buffers()):
            why = "buffer" if buffer.is_floating_point() else "integer"
            self.stays.append((why, name, buffer))


class BoundModel:
    """A workload's model, bound as `gradients.ArrayModel` says."""

    def __init__(self, workload: Any, seed: int, travels: Any):
        self.workload, self.seed, self.travels = workload, seed, travels
        self.device = torch.device(workload.runtime_device())
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.model = workload.model().to(self.device)
        found = Travelling(self.model, travels)
        self.parameters, self.tied, self.stays = found.parameters, found.tied, found.stays
        self.tensors = [
            {"name": name, "shape": list(ones[0].shape), "dtype": str(ones[0].dtype)}
            for name, ones in self.parameters.items()
        ]
        # What the model writes into while it computes, as it was.
        self.buffers = [
            (module, key, buffer, buffer.clone())
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.initial: dict[str, torch.Tensor] | None = None

    def open(self, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        """Read parameters here and write gradients there, float32 by name."""
        self.initial = {name: ones[0].data for name, ones in self.parameters.items()}
        self.params = {name: torch.from_numpy(view) for name, view in params.items()}
        self.gradients = {name: torch.from_numpy(view) for name, view in gradients.items()}

    def init(self) -> None:
        """Write the parameters as they begin."""
        if self.initial is None:  # they have been let go of
            bits.seed_generators(self.seed)
            made = Travelling(self.workload.model(), self.travels).parameters
            self.initial = {name: ones[0].data for name, ones in made.items()}
        for name, value in self.initial.items():
            self.params[name].copy_(value)

    def state(self) -> torch.nn.Module:
        """The model with the parameters as they are now."""
        self._take_params()
        return self.model

    def _take_params(self) -> None:
        self.initial = None
        for name, ones in self.parameters.items():
            for parameter in ones:
                if _mappable(parameter):
                    parameter.data = self.params[name]
                else:
                    parameter.data.copy_(self.params[name])

    def begin(self) -> None:
        """Called before the micro-batches of a gradient."""
        self._take_params()
        self.model.train()
        for name, ones in self.parameters.items():
            self.gradients[name].zero_()
            for parameter in ones:
                parameter.grad = self.gradients[name] if _mappable(parameter) else None

    def accumulate(self, rows: Any, weight: float) -> float:
        """Add the gradient of some rows, weighted; their mean loss."""
        loss = self.workload.loss(self.model, on_device(rows, self.device))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
            raise ValueError(f"loss: {found}; a tensor with one value expected")
        (loss if weight == 1 else loss * weight).backward()
        return float(loss.detach())

    def finish(self) -> None:
        """Write the missing gradients, and restore buffers."""
        for name, ones in self.parameters.items():
            into = self.gradients[name]
            for parameter in ones:
                grad = parameter.grad
                if grad is not None and grad.data_ptr() != into.data_ptr():
                    into += grad.to_dense().to(into.device, into.dtype)
        self._restore()

    def losses(self, rows: Any) -> np.ndarray:
        """The mean loss of each row, in evaluation's mode."""
        self._take_params()
        was = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                found = self.workload.row_losses(self.model, on_device(rows, self.device))
        finally:
            self.model.train(was)
            self._restore()
        return found.detach().double().cpu().numpy()

    def _restore(self) -> None:
        with torch.no_grad():
            for module, key, buffer, before in self.buffers:
                buffer.copy_(before)
                module._buffers[key] = buffer


def _mappable(parameter: torch.Tensor) -> bool:
    return parameter.dtype == torch.float32 and parameter.device.type == "cpu"
