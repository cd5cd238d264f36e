"""Requests of burn_p2p's hosts to a torch model besides its inner loop: files, merges."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

try:
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError:  # then files are NumPy's
    safe_open = save_file = None

MEANS = ("WeightedMean", "Ema", "QualityWeightedEma")
POLICIES = (*MEANS, "TrimmedMean", "NormClippedWeightedMean")
ROOT_EMA = 0.35  # of a merged model, the rest of the base: what burn_p2p's own backend takes


class TorchHooks:
    """The hooks of `TorchWorkload` that need no more than its model."""

    def capability_probe(self) -> dict:
        """Return what this machine reports of itself; nothing is measured."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return {
            "preferred_backends": [device],
            "work_units_per_second": 1.0,
            "target_window_seconds": 1,
        }

    def materialize_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Write all tensors of a model to a file: safetensors, or NumPy's where that is not."""
        tensors = {
            name: value.detach().cpu().contiguous().clone()
            for name, value in state.state_dict().items()
        }
        if save_file is not None:
            save_file(tensors, path)
            return
        with Path(path).open("wb") as file:
            np.savez(file, **{name: _plain(value) for name, value in tensors.items()})

    def load_model_artifact_path(self, state: torch.nn.Module, path: str) -> None:
        """Read all tensors of a model from such a file."""
        with Path(path).open("rb") as file:
            zipped = file.read(2) == b"PK"
        if zipped:
            with np.load(path, allow_pickle=False) as arrays:
                tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        elif safe_open is None:
            raise ValueError(f"{path}: no file of NumPy, and safetensors is not installed")
        else:
            with safe_open(path, "pt") as found:
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
        state.load_state_dict(tensors)

    def merge_candidate_models(
        self, base: torch.nn.Module, candidates: list[dict], policy: Any
    ) -> torch.nn.Module | None:
        """The candidates merged as the policy is called; what is no float is the base's.

        `TrimmedMean` leaves out the largest and the smallest value of each element where there are
        three candidates or more, and knows no weights. `NormClippedWeightedMean` first clips each
        candidate's difference from the base, as a whole, to the median of their L2 norms. The
        others are means by sample weight, `QualityWeightedEma` times the quality that the host
        gives, which must grow as a loss falls.

        Raises:
            ValueError: a policy of another name.
        """
        if policy not in POLICIES:
            raise ValueError(f"merge policy {policy!r}; one of {list(POLICIES)} expected")
        quality = policy == "QualityWeightedEma"
        weights = [c["sample_weight"] * (c["quality_weight"] if quality else 1) for c in candidates]
        if not sum(weights) > 0:
            return None
        shares = [weight / sum(weights) for weight in weights]
        models = [candidate["model"] for candidate in candidates]
        if policy == "TrimmedMean":
            cut = int(len(models) > 2)
            return self._made(
                base,
                lambda of: torch.stack(of).sort(dim=0).values[cut : len(of) - cut].mean(dim=0),
                models,
            )
        if policy == "NormClippedWeightedMean":
            norms = np.array([_distance(base, model) for model in models])
            kept = np.minimum(1.0, np.median(norms) / np.maximum(norms, np.finfo(float).tiny))
            shares = [share * float(k) for share, k in zip(shares, kept, strict=True)]
            models, shares = [base, *models], [1 - sum(shares), *shares]
        return self._mean(base, models, shares)

    def apply_single_root_ema(
        self, base: torch.nn.Module, merged: torch.nn.Module, policy: Any
    ) -> torch.nn.Module:
        """A merged model, drawn to the base under a policy that has `Ema` in its name."""
        if policy not in MEANS[1:]:
            return merged
        return self._mean(merged, [base, merged], [1 - ROOT_EMA, ROOT_EMA])

    def reconcile_canonical_model(
        self, local: torch.nn.Module, canonical: torch.nn.Module, strategy: Any
    ) -> torch.nn.Module:
        """The canonical model, or as much of it as `{"RootEma": {"canonical_weight": w}}` says."""
        if strategy == "Replace":
            return canonical
        weight = strategy["RootEma"]["canonical_weight"]
        return self._mean(canonical, [local, canonical], [1 - weight, weight])

    def _mean(self, like: torch.nn.Module, models: list, shares: list[float]) -> torch.nn.Module:
        """A new model with the mean of floats, summed in float64, and the rest of `like`."""

        def mean(of: list[torch.Tensor]) -> torch.Tensor:
            return sum(x * share for x, share in zip(of, shares, strict=True))

        return self._made(like, mean, models)

    def _made(self, like: torch.nn.Module, merge: Callable, models: list) -> torch.nn.Module:
        """A new model of what `merge` makes of floats in float64; the rest is `like`'s."""
        states = [model.state_dict() for model in models]
        merged = {
            name: merge([state[name].double() for state in states])
            if value.is_floating_point()
            else value
            for name, value in like.state_dict().items()
        }
        made = self.model().to(next(iter(merged.values())).device)
        made.load_state_dict(merged)
        return made

    def model(self) -> torch.nn.Module:
        """A new model."""
        raise NotImplementedError


def _distance(base: torch.nn.Module, model: torch.nn.Module) -> float:
    """The L2 norm of the difference of all floats."""
    there = base.state_dict()
    squares = [
        float((value.double() - there[name].double()).square().sum())
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    ]
    return sum(squares) ** 0.5


def _plain(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has none
