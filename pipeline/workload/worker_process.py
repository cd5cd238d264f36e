"""A workload's process, and what is asked of it: burn_p2p's worker protocol, version 2.

This end listens on the loopback, the process connects. A message is its length in 8 bytes, big
endian, and JSON. A process that does not answer as it should is ended with all that it started, and
one line says what it did. The process has an environment of its own, in which no secret is.
"""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from pipeline.errors import LockstepError, brief
from pipeline.runfile.explain import validate
from pipeline.runfile.table import AsTuple, Table

PYTHON = Path(__file__).parent / "python"  # where Lockstep's own worker is
LOG = "worker.log"
MOST_LOG = 2**24  # bytes that a worker may print
MOST_ANSWER = 2**24  # bytes
VERSIONS = (1, 2)
# What a worker inherits: paths, languages, devices and numbers of threads.
INHERITED = {"PATH", "HOME", "USER", "LANG", "TMPDIR", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE"}
INHERITED_BEGINNINGS = ("LC_", "CUDA_", "NVIDIA_", "ROCR_", "HIP_", "OMP_", "MKL_", "NCCL_")
ShortText = Annotated[str, Field(max_length=500)]


class WorkerError(LockstepError):
    """A workload's process did something else than it was asked."""


@dataclass(frozen=True)
class WorkerCommand:
    """How a worker is started.

    Attributes:
      python: The Python that runs it.
      module: The module that serves the workload.
      factory: module:name of the workload.
      config: What the factory is called with.
      path: Folders where it finds modules.
      env: Variables of its environment besides those it inherits.
      start_seconds: Seconds until it must have connected and said hello.
      answer_seconds: Seconds until it must have answered a request.
    """

    python: str
    module: str
    factory: str
    config: dict
    path: tuple[Path, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float = 120.0
    answer_seconds: float = 600.0

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"workload {self.factory}"

    def environment(self) -> dict[str, str]:
        """Return the whole environment of the process."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in INHERITED or name.startswith(INHERITED_BEGINNINGS)
        }
        path = os.pathsep.join(str(folder) for folder in (PYTHON, *self.path))
        # the same order of sets each time, and no cache beside the code, whose hash is of its files
        fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        return kept | fixed | dict(self.env)


class WorkerHello(Table, extra="ignore"):
    """What a worker says of itself."""

    protocol_version: int
    workload_name: ShortText
    capabilities: Annotated[tuple[ShortText, ...], Field(max_length=100), AsTuple]
    environment: Annotated[dict[ShortText, ShortText | int | None], Field(max_length=100)] = {}
    """What of its process decides bits: versions, device, threads. Another host's worker says
    nothing of it."""


class WorkerProcess:
    """A worker that has said hello; requests are answered one after the other."""

    def __init__(self, command: WorkerCommand, process: subprocess.Popen, folder: Path):
        self.command, self.folder = command, folder
        self._process, self._socket = process, socket.socket()
        self._lock, self._number = threading.Lock(), 0
        self.hello: WorkerHello

    @classmethod
    def start(cls, command: WorkerCommand, folder: Path) -> "WorkerProcess":
        """Start a worker in a folder of its own, and hear its hello.

        Raises:
          WorkerError: It does not start, does not connect in time, or speaks another protocol.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
            worker = cls(command, _spawn(command, folder, port), folder)
            try:
                deadline = time.monotonic() + command.start_seconds
                worker._accept(listening, deadline)
                answer = worker.call("hello", {}, seconds=deadline - time.monotonic())
                worker.hello = validate(WorkerHello, answer, f"{command.name}: hello")
                if worker.hello.protocol_version not in VERSIONS:
                    worker._fail("hello", f"version {worker.hello.protocol_version}", "1 or 2")
            except BaseException:
                worker.kill()
                raise
        return worker

    def call(self, method: str, params: dict, seconds: float | None = None) -> dict[str, Any]:
        """Return the result of a request; a worker that fails in any way but an error is ended.

        Raises:
          WorkerError: It says an error, does not answer in time, or not as it should.
        """
        seconds = self.command.answer_seconds if seconds is None else seconds
        with self._lock:
            self._number += 1
            request = {"id": self._number, "method": method, "params": params}
            try:
                answer = self._exchange(request, time.monotonic() + max(seconds, 0.0))
            except TimeoutError:
                self._fail(method, f"no answer after {seconds:g} seconds", "one in time")
            except OSError as error:
                self._fail(method, self._ended(error), "an answer")
            return self._result(method, answer)

    def close(self) -> None:
        """Ask it to end, and end it where it does not."""
        with contextlib.suppress(WorkerError):
            self.call("shutdown", {}, seconds=1.0)
        self.kill()

    def kill(self) -> None:
        """End the process and all that it started."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    # ---- The connection ----

    def _accept(self, listening: socket.socket, deadline: float) -> None:
        """Take the connection of the process, or of one that it started, and of nobody else."""
        listening.settimeout(0.05)
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._fail("start", self._ended(), "a connection")
            try:
                connection, address = listening.accept()
            except TimeoutError:
                continue
            if _has_connection(self._process.pid, address[1]):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket = connection
                return
            connection.close()
        seconds = self.command.start_seconds
        self._fail("start", f"no connection after {seconds:g} seconds", "one in time")

    def _exchange(self, request: dict, deadline: float) -> bytes:
        body = json.dumps(request, allow_nan=False).encode()
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        self._socket.sendall(struct.pack(">Q", len(body)) + body)
        (length,) = struct.unpack(">Q", self._read(8, deadline))
        if length > MOST_ANSWER:
            text = f"an answer of {length:,} bytes"
            self._fail(request["method"], text, f"at most {MOST_ANSWER:,}")
        return self._read(length, deadline)

    def _read(self, count: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready, _, _ = select.select([self._socket], [], [], min(left, 1.0))
            if (self.folder / LOG).stat().st_size > MOST_LOG:
                self._fail("log", f"more than {MOST_LOG:,} bytes of output", "less")
            if not ready:
                continue
            part = self._socket.recv(min(count - len(data), 2**20))
            if not part:
                raise ConnectionError
            data += part
        return bytes(data)

    def _result(self, method: str, answer: bytes) -> dict[str, Any]:
        try:
            content = json.loads(answer, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            self._fail(method, f"an answer that is no JSON: {error}", "JSON")
        if not isinstance(content, dict) or content.get("id") != self._number:
            self._fail(method, "an answer to another request", f"one with id {self._number}")
        if content.get("ok") is False:
            said = str(content.get("error", "")).strip().split("\n", 1)[0]
            raise WorkerError(f"{self.command.name}: {method}: {brief(said, 600) or 'an error'}")
        result = content.get("result")
        if content.get("ok") is not True or not isinstance(result, dict):
            self._fail(method, f"ok = {content.get('ok')!r} and {type(result).__name__}", "a table")
        return result

    def _fail(self, method: str, found: str, expected: str) -> None:
        """End the process, and raise why."""
        self.kill()
        raise WorkerError(f"{self.command.name}: {method}: found {found}, expected {expected}")

    def _ended(self, error: OSError | None = None) -> str:
        """How the process ended, and the last line that it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if code is None:
            return f"a lost connection ({type(error).__name__})"
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        last = last_line(self.folder / LOG)
        return f"its end with {how}" + (f": {last}" if last else "")


def last_line(path: Path) -> str:
    """Return the last line of a log, shortened; empty where there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
        return brief(lines[-1].strip(), 300) if lines else ""
    return ""


def _spawn(command: WorkerCommand, folder: Path, port: int) -> subprocess.Popen:
    arguments = [command.python, "-m", command.module, "--factory", command.factory]
    arguments += ["--config-json", json.dumps(command.config)]
    arguments += ["--connect-host", "127.0.0.1", "--connect-port", str(port)]
    with open(folder / LOG, "wb") as log:
        try:
            return subprocess.Popen(
                arguments,
                cwd=folder,
                env=command.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(
                f"[runtime] worker_python is {command.python!r}, expected a Python that starts: "
                f"{error.strerror}"
            ) from error


def _has_connection(leader: int, port: int) -> bool:
    """Whether a process of this session has the local end of a connection from such a port.

    Another user of this machine can connect to the loopback too. Where the system does not say, as
    outside Linux, whoever comes first is believed.
    """
    try:
        with open("/proc/net/tcp", encoding="ascii") as file:
            lines = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return True
    sockets = {f"socket:[{line[9]}]" for line in lines if int(line[1].split(":")[1], 16) == port}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(folder.name)) != leader:
                continue
            if any(os.readlink(link) in sockets for link in (folder / "fd").iterdir()):
                return True
    return False


def _no_constant(name: str) -> float:
    raise ValueError(f"{name}, which JSON has not")
