"""The memory that a call takes: what the process holds at its peak, beyond what it held before."""

from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(call: Callable[[], object]) -> int:
    """Calls, and returns the bytes of memory that were resident at the most, less those before.

    Files that are mapped into memory count as soon as they are read there, as all else does.
    """
    forget_peak()
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def forget_peak() -> None:
    """Has the peak so far be forgotten."""
    RESET.write_text("5")


def status(key: str) -> int:
    """Returns what the system says of this process's memory: VmRSS now, VmHWM at its peak."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
