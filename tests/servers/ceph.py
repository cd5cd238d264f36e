"""Ceph's gateway, a store that others made and that checks signatures, where it is installed."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

START = Path(__file__).with_suffix(".sh")
NEEDED = "ceph-mon", "ceph-osd", "ceph", "monmaptool", "radosgw", "radosgw-admin"
ENDS = 30  # seconds that a process has to end


def lacking() -> list[str]:
    """The programs that are not installed."""
    return [name for name in NEEDED if shutil.which(name) is None]


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A store, in a folder with a short name, for sockets lie there; its address."""
    gateway, monitor = _free_ports(2)
    try:
        with open(folder / "said", "wb") as said:
            command = ["sh", str(START), str(folder), str(gateway), str(monitor)]
            subprocess.run(command, check=True, stdout=said, stderr=said, timeout=300)
        yield f"http://127.0.0.1:{gateway}"
    finally:
        for path in sorted((folder / "run").glob("*.pid")):
            _end(int(path.read_text()))


def _end(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGTERM)
        until = time.monotonic() + ENDS
        while time.monotonic() < until:
            os.kill(process, 0)
            time.sleep(0.1)
        os.kill(process, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
