"""Everything that decides the bits of a result: packages, device, threads, seeds."""

import hashlib
import json
import platform
import random
import sys
from typing import Any

import numpy as np

# Reported where they are imported.
PACKAGES = (
    "accelerate",
    "flax",
    "jax",
    "jaxlib",
    "numpy",
    "optax",
    "peft",
    "torch",
    "transformers",
)


class ContractError(ValueError):
    """The error of a torch model or loss that is not as a workload has to be; one line."""


def environment(device: str) -> dict:
    """Return the versions of imported packages, the machine, the device and its threads."""
    imported = {name: sys.modules[name] for name in PACKAGES if name in sys.modules}
    facts: dict = {"python": platform.python_version(), "machine": platform.machine()}
    facts |= {name: str(getattr(package, "__version__", "?")) for name, package in imported.items()}
    facts |= {"device": device, "threads": None}
    torch = imported.get("torch")
    if torch is not None:
        facts["threads"] = torch.get_num_threads()
        facts["torch_cpu"] = torch.backends.cpu.get_cpu_capability()  # AVX2, AVX512, ...
        if device.startswith("cuda"):
            facts["device"] = f"{device} {torch.cuda.get_device_name(device)}"
    return facts


def use_threads(count: int | None) -> None:
    """Compute with this many threads, which decide bits, if a library takes their number."""
    torch = sys.modules.get("torch")
    if torch is not None and count is not None:
        torch.set_num_threads(count)


def seed_generators(seed: int) -> None:
    """Seed every global generator of random numbers whose package is imported."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed % 2**63)  # those of GPUs too


def seed_of(batches: list) -> int:
    """Return a seed that decides bits, of what is trained on, for a loop whose host sends none."""
    ids = [batch.get("microshard_ids") for batch in batches]
    return int.from_bytes(hashlib.sha256(json.dumps(ids).encode()).digest()[:4], "big")


def plain(model: Any) -> Any:
    """Return the torch module that `torch.compile` wraps: its tensors' names are its own."""
    return getattr(model, "_orig_mod", model)


def address(tensor: Any) -> Any:
    """Return a key that is the same for two names of one torch tensor."""
    if isinstance(tensor, np.ndarray):
        return id(tensor)
    if not tensor.numel() or tensor.is_meta:
        return object()
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.device)


def raw(tensor: Any) -> np.ndarray:
    """Return the bytes of a torch tensor of any dtype."""
    if not isinstance(tensor, np.ndarray):
        tensor = tensor.detach().cpu().contiguous().reshape(-1)
        tensor = tensor.view(sys.modules["torch"].uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)


def real(tensor: Any) -> Any:
    """Return a torch tensor as it travels: a complex one as pairs of real numbers."""
    return sys.modules["torch"].view_as_real(tensor) if tensor.is_complex() else tensor


def like(values: np.ndarray, tensor: Any) -> Any:
    """Return values that travelled as a torch tensor: a complex one, over them, if `tensor` is."""
    torch = sys.modules["torch"]
    result = torch.from_numpy(values)
    return torch.view_as_complex(result) if tensor.is_complex() else result
