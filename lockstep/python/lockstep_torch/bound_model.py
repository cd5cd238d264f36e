"""A torch model bound to mapped arrays: parameters are read there, gradients written there.

On a CPU a float32 parameter *is* the mapped memory, and its `.grad` too, so that nothing is copied.
Parameters of another dtype, or on another device, travel as float32 and are copied; a complex64
one is a view of its pairs.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or a GPU does not repeat itself

import torch

from . import bits, module_state

LOSS_APART = 1e-3  # share by which a loss may differ from itself, row by row
WATCHED = 2  # points at which it is seen whether a step moves what stays: a copy of the parameters
# that follows them is still where they are at the first


def on_device(rows: Any, device: torch.device) -> Any:
    """Return decoded rows as torch tensors; paths stay paths."""
    if isinstance(rows, dict):
        return {name: on_device(part, device) for name, part in rows.items()}
    return torch.from_numpy(rows).to(device) if isinstance(rows, np.ndarray) else rows


def parts(loss: Any) -> tuple[torch.Tensor, float | None]:
    """Return what a bound model's loss function gave, and what counts in it: None if it is a mean.

    Raises:
        ContractError: it is neither a tensor of one value nor a sum and the number of what counts.
    """
    value, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        kind = f"{value.dtype} of shape {list(value.shape)}" if torch.is_tensor(value) else value
        raise bits.ContractError(
            f"loss: found {kind!r}; expected the mean loss as a tensor with one value, or the sum "
            "and the number of its terms"
        )
    return value, None if count is None else _counted(count)


def _counted(count: Any) -> float:
    """Return the number of what counts in the sum of a torch loss."""
    try:
        number = torch.as_tensor(count)
        if number.numel() == 1 and not number.is_complex():
            return float(number.detach())
        found = f"{number.dtype} of shape {list(number.shape)}"
    except (TypeError, ValueError, RuntimeError):  # of what is no number
        found = type(count).__name__
    raise bits.ContractError(
        f"loss: found a count of {found}; expected the number of what counts in the sum"
    )


def mean(loss: Any) -> torch.Tensor:
    """Return the mean that a bound model's loss function returned, or that follows from its sum."""
    value, count = parts(loss)
    return value / count if count else value


class BoundModel:
    """The model of a user's code, bound as `gradients.ArrayModel` says."""

    def __init__(self, code: Any, seed: int, travels: Any):
        self.code, self.seed, self.travels = code, seed, travels
        self.device = torch.device(code.runtime_device())
        if self.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        self.model = code.model().to(self.device)
        self.state = module_state.state_of(self.model, travels)
        self.tensors, self.stays = self.state.tensors, self.state.stays
        self.parameters, self.tied = self.state.trained, self.state.tied
        self._movement: module_state.Movement | None = None
        self._watched_at = set[float]()  # sums of the parameters
        # What the model writes into while it computes, as it was.
        self.buffers = [
            (module, key, buffer, buffer.clone())
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.initial: dict[str, torch.Tensor] | None = None

    def open(self, params: dict[str, np.ndarray], gradients: dict[str, np.ndarray]) -> None:
        """Bind the torch model: read parameters here and write gradients there, float32 by name."""
        self.initial = {name: tied[0].data for name, tied in self.parameters.items()}
        self.params, self.gradients = (
            {n: bits.like(view, self.parameters[n][0]) for n, view in views.items()}
            for views in (params, gradients)
        )

    def init(self) -> None:
        """Write the bound torch model's parameters as they begin."""
        if self.initial is None:  # they have been let go of
            bits.seed_generators(self.seed)
            fresh = module_state.state_of(self.code.model(), self.travels).trained
            self.initial = {name: tied[0].data for name, tied in fresh.items()}
        for name, value in self.initial.items():
            self.params[name].copy_(value)

    def current(self) -> torch.nn.Module:
        """Return the bound torch model with the parameters as they are now."""
        self._take_params()
        return bits.plain(self.model)

    def _take_params(self) -> None:
        self.initial = None
        for name, tied in self.parameters.items():
            for parameter in tied:
                if _mappable(parameter):
                    parameter.data = self.params[name]
                else:
                    parameter.data.copy_(self.params[name])
        module_state.settle(self.model)

    def begin(self) -> None:
        """Called before the micro-batches of a gradient of the bound torch model."""
        self.model.train()
        self._take_params()
        if len(self._watched_at) < WATCHED:
            sums = (bits.real(value).double().abs().sum() for value in self.params.values())
            self._watched_at.add(float(sum(sums)))
            self._movement = module_state.Movement(self.model, self.state, of_gradient=True)
        self.counted: float | None = None  # of a gradient, if `loss` gives sums
        for name, tied in self.parameters.items():
            self.gradients[name].zero_()
            for parameter in tied:
                parameter.grad = self.gradients[name] if _mappable(parameter) else None

    def accumulate(self, rows: Any, weight: float) -> float:
        """Add the torch model's gradient of some rows; return what they add to the loss."""
        loss, count = parts(self.code.loss(self.model, on_device(rows, self.device)))
        self._last = rows
        if count is None:
            (loss if weight == 1 else loss * weight).backward()
            return weight * float(loss.detach())
        loss.backward()
        self.counted = count + (self.counted or 0.0)
        return float(loss.detach())

    def finish(self) -> float:
        """Write the torch model's missing gradients, restore buffers; return what divides the loss.

        That is what all micro-batches count, if `loss` gives sums: so the size of a micro-batch
        changes nothing beyond rounding.
        """
        for name, tied in self.parameters.items():
            target = self.gradients[name]
            for parameter in tied:
                grad = parameter.grad
                if grad is not None and grad.data_ptr() != target.data_ptr():
                    target += grad.to_dense().to(target.device, target.dtype)
            if self.counted:
                target /= self.counted
        if self._movement is not None:
            self._movement.check()
            self._movement = None
            if self.counted is not None:
                self._check_count()
        self._restore()
        return self.counted or 1.0

    def _check_count(self) -> None:
        """Check that what counts in the last rows, by which peers weigh, is theirs at zeros too."""
        counts = []
        with torch.no_grad():
            for zeros in (False, True):
                for parameter in (p for tied in self.parameters.values() for p in tied if zeros):
                    parameter.data = torch.zeros_like(parameter.data)
                bits.seed_generators(0)
                loss = self.code.loss(self.model, on_device(self._last, self.device))
                counts.append(parts(loss)[1])
        self._take_params()
        if counts[0] != counts[1]:
            raise bits.ContractError(
                f"loss: counts {counts[0]:.6g} in some rows and, with parameters of zeros, "
                f"{counts[1]:.6g} in the same; expected a count that depends on the rows alone"
            )

    def count_statistics(self, lots: Any) -> None:
        """Recompute the bound model's batch norms, at its current parameters, over lots of rows.

        They stand until they are computed again: a gradient puts back what it moves of them.
        """
        self._take_params()
        batches = (on_device(rows, self.device) for rows in lots)
        module_state.count_statistics(self.model, batches, self.code.loss)
        counted = {id(buffer) for buffer in self.state.counted.values()}
        for _, _, buffer, before in self.buffers:
            if id(buffer) in counted:
                before.copy_(buffer)
        self._restore()
        module_state.settle(self.model)

    def losses(self, rows: Any) -> Any:
        """Return the bound torch model's loss of each row, or sums and counts."""
        result = self._evaluated(self.code.row_losses, rows)
        tensors = result if isinstance(result, tuple) else (result,)
        arrays = tuple(tensor.detach().double().cpu().numpy() for tensor in tensors)
        return arrays if isinstance(result, tuple) else arrays[0]

    def compare_losses(self, rows: Any) -> None:
        """Compare a torch model's loss of rows together with the mean of their losses apart.

        A loss that draws numbers is not compared.

        Raises:
            ContractError: they differ, so that what is measured is not what is trained.
        """
        drawn = []
        for seed in range(2):
            bits.seed_generators(seed)
            drawn.append(float(mean(self._evaluated(self.code.loss, rows))))
        result = self.losses(rows)
        losses, counts = result if isinstance(result, tuple) else (result, np.ones(len(result)))
        apart, together = float(losses.sum() / (counts.sum() or 1)), drawn[0]
        if drawn[0] == drawn[1] and abs(apart - together) > LOSS_APART * max(abs(together), 0.01):
            raise bits.ContractError(
                f"row_losses: the mean over {len(losses)} rows is {apart:.6g}, and loss of the "
                f"same rows {together:.6g}; expected the same: write row_losses(model, rows) with "
                "each row's part of a mean over rows, or let loss return a sum and what counts"
            )

    def _evaluated(self, function: Callable, rows: Any) -> Any:
        """Return what a function of the torch model and of rows gives in evaluation mode."""
        self._take_params()
        try:
            with torch.no_grad(), module_state.training(self.model, mode=False):
                return function(self.model, on_device(rows, self.device))
        finally:
            self._restore()

    def _restore(self) -> None:
        with torch.no_grad():
            for module, key, buffer, before in self.buffers:
                buffer.copy_(before)
                module._buffers[key] = buffer


def _mappable(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float32, torch.complex64) and parameter.device.type == "cpu"
