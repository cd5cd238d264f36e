"""Which of a host's GPUs a peer's process sees."""

import os
from collections.abc import Sequence


def visible(count: int) -> list[str]:
    """Return the names of the host's `count` GPUs, as CUDA has them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(count)]


def environment(number: int, gpus: Sequence[str], parts: int) -> dict[str, str]:
    """Return what a process is told of the GPUs; processes beyond their number share them.

    Args:
      number: Counts the processes of all peers.
      gpus: The host's GPUs.
      parts: GPUs of a process.
    """
    first = number % max(1, len(gpus) // parts) * parts
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + parts])}
