"""What burn_p2p's hosts ask of a torch model beside its inner loop: a probe, and files."""

from pathlib import Path

import numpy as np
import torch

try:
    from safetensors import safe_open
    from safetensors.torch import save_file
except ImportError:  # then files are NumPy's
    safe_open = save_file = None


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


def _plain(value: torch.Tensor) -> np.ndarray:
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()  # NumPy has none
