"""The one answer to what becomes of each tensor of a torch model.

Gradients, packs, inner loops, `simulate` and exports share it:

    trained   parameters that take a gradient and that the run's patterns include: they travel
    counted   statistics of batch norms, which no gradient reads: they are computed anew, by
              forward passes over rows that a seed draws, before anything reads them; and the
              vectors of torch's spectral norms, which follow from the weights (`settle`)
    fixed     all else stays as the model began with it

A complex parameter travels as pairs of real numbers, in a last axis of 2.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList

from . import bits

STATISTICS = "statistics"  # why a tensor of floats does not travel, beside those of `ModuleState`
ITERATIONS = 30  # of a spectral norm's power method: torch begins with 15


class ModuleState(NamedTuple):
    """The tensors of a model, by what becomes of them.

    Attributes:
        trained: the parameters over one memory, by the first of their names that may travel.
        tied: other names of what travels, and the name under which it does.
        counted: statistics of batch norms by name, with the integers that count their batches, and
            the vectors of spectral norms.
        fixed: why, name and tensor of all else: `frozen`, `excluded`, `buffer` or `integer`.
    """

    trained: dict[str, list[torch.nn.Parameter]]
    tied: dict[str, str]
    counted: dict[str, torch.Tensor]
    fixed: list[tuple[str, str, torch.Tensor]]

    @property
    def tensors(self) -> list[dict]:
        """Name, shape and dtype of the module's tensors that travel, in order."""
        return [
            {"name": name, "shape": list(bits.real(tied[0]).shape), "dtype": str(tied[0].dtype)}
            for name, tied in self.trained.items()
        ]

    @property
    def stays(self) -> list[tuple[str, str, torch.Tensor]]:
        """Why, name and tensor of all of the module that does not travel."""
        counted = [
            (STATISTICS if value.is_floating_point() else "integer", name, value)
            for name, value in self.counted.items()
        ]
        return self.fixed + counted


def state_of(model: torch.nn.Module, travels: Callable[[str], bool]) -> ModuleState:
    """Return what becomes of each tensor; `travels` says which names the run's patterns include."""
    trained: dict[str, list[torch.nn.Parameter]] = {}
    first: dict[Any, str] = {}
    model = bits.plain(model)
    named = sorted(model.named_parameters(remove_duplicate=False))
    addresses = {name: bits.address(parameter) for name, parameter in named}
    for name, parameter in named:
        if parameter.requires_grad and travels(name) and addresses[name] not in first:
            first[addresses[name]] = name
            trained[name] = []
    tied, fixed = {}, []
    for name, parameter in named:
        home = first.get(addresses[name])
        if home is None:
            fixed.append(("excluded" if parameter.requires_grad else "frozen", name, parameter))
            continue
        if name != home:
            tied[name] = home
        if not any(parameter is other for other in trained[home]):
            trained[home].append(parameter)
    norms = (*_norms(model), *_spectral_norms(model))
    statistics = {id(buffer) for norm in norms for buffer in norm.buffers()}
    counted = {}
    for name, buffer in sorted(model.named_buffers()):
        if id(buffer) in statistics:
            counted[name] = buffer
        else:
            number = buffer.is_floating_point() or buffer.is_complex()
            fixed.append(("buffer" if number else "integer", name, buffer))
    return ModuleState(trained, tied, counted, fixed)


@contextmanager
def training(model: torch.nn.Module, mode: bool = True) -> Iterator[None]:
    """Put a torch module into a mode, and each of those in it back into the one it had."""
    modes = [(module, module.training) for module in model.modules()]
    model.train(mode)
    try:
        yield
    finally:
        for module, before in modes:
            module.training = before


def _norms(model: torch.nn.Module) -> list[Any]:
    """Return the norms whose statistics move in training: not those that a model keeps still."""
    with training(model):
        return [
            module
            for module in model.modules()
            if isinstance(module, _NormBase) and module.running_mean is not None and module.training
        ]


def count_statistics(model: torch.nn.Module, lots: Iterable[Any], forward: Callable) -> None:
    """Recompute the statistics of batch norms: their mean over some lots of rows.

    As `torch.optim.swa_utils.update_bn` does. `forward(model, rows)` is any pass over a lot.
    """
    norms = _norms(model)
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all lots, instead of a moving one
        with training(model):
            for rows in lots:
                forward(model, rows)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _spectral_norms(model: torch.nn.Module) -> list[Any]:
    """Return the chains of parametrizations of a weight that have a spectral norm."""
    chains = [module for module in model.modules() if isinstance(module, ParametrizationList)]
    return [chain for chain in chains if any(isinstance(part, SpectralNorm) for part in chain)]


def settle(model: torch.nn.Module) -> None:
    """Compute the vectors of spectral norms at the weights as they are, and hold them there.

    So they follow from the weights alone, until the model is put into a mode again.
    """
    for norm in _spectral_norms(model):
        norm.train()
        with torch.no_grad():
            vectors = [v for part in norm if isinstance(part, SpectralNorm) for v in part.buffers()]
            for vector in vectors:  # whatever they were before
                vector.copy_(torch.linspace(1, 2, len(vector)))
            for _ in range(ITERATIONS):
                norm()
        norm.eval()


class Movement:
    """Notices a step that writes into what of a module stays, or a gradient into its params.

    Tensors are told apart by their bytes. What no state dict has, such as a mask that
    a first pass makes, does not count.

    Args:
        model: the model.
        state: what becomes of its tensors.
        of_gradient: whether the step computes a gradient alone, so that no parameter moves.
    """

    def __init__(self, model: torch.nn.Module, state: ModuleState, *, of_gradient: bool):
        self._model = bits.plain(model)
        keys = self._model.state_dict().keys()
        names = [name for _, name, _ in state.fixed] + [*state.trained] * of_gradient
        self._names = [name for name in names if name in keys]
        self._before = self._hashes()

    def check(self) -> None:
        """Check that nothing of the torch module has moved.

        Raises:
            ContractError: something has; it is named.
        """
        hashes = self._hashes()
        moved = [name for name in self._names if hashes[name] != self._before[name]]
        if moved:
            more = f" and {len(moved) - 1} more" * (len(moved) > 1)
            raise bits.ContractError(
                f"{moved[0]}{more} changed during a step; expected a model and a loss that write "
                "only the statistics of batch norms, since no other change is kept between steps"
            )

    def _hashes(self) -> dict[str, bytes | None]:
        state = self._model.state_dict()
        return {name: _hash(state.get(name)) for name in self._names}


def _hash(tensor: torch.Tensor | None) -> bytes | None:
    absent = tensor is None or tensor.is_meta
    return None if absent else hashlib.sha256(bits.raw(tensor)).digest()
