"""The memory that a call takes: what the process holds at its peak, beyond what it held before."""

from collections.abc import Callable
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(call: Callable[[], object]) -> int:
    """Calls, and returns the bytes of memory that were resident at the most, less those before.

    Files that are mapped into memory count as soon as they are read there, as all else does.
    """
    RESET.write_text("5")  # the peak so far is forgotten
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[key].split()[0]) * 1024
