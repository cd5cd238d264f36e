"""The process of a user's workload, seen from our end: start, calls, end.

We listen on a random port of loopback, start the worker, and it connects. Only the child, or a
process that it started, is let in (`ChildGroup.owns`): burn_p2p's own worker cannot show a token,
but the system tells whose socket it is. Calls are serial. A worker that answers with an error goes
on; one that does anything else than answer is killed with all that it started, since nobody knows
what its next answer would belong to.
"""

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import lockstep
from lockstep.errors import LockstepError
from lockstep.tables.validation import validate
from parts.workload.process import messages
from parts.workload.process.child_group import ChildGroup, environment_of
from parts.workload.process.messages import (
    NoWorkerError,
    RefusedError,
    WorkerDiedError,
    WorkerError,
    WorkerHello,
    WorkerResult,
)
from parts.workload.python.lockstep_worker import frames
from pipeline.joints import FOLDER

# what a worker may import of ours: all that parts have for it
PYTHON = *sorted(FOLDER.glob("*/python")), Path(lockstep.__file__).parent / "python"
LOG, COMMAND_LOG = "worker.log", "command.log"
LOOK_SECONDS = 0.1  # between two looks at whether it still runs
SHUTDOWN_SECONDS = 2.0
BYTES_AT_ONCE = 2**20


@dataclass(frozen=True)
class WorkerCommand:
    """How to start a worker.

    Attributes:
      python: An interpreter; a path is relative to the current folder.
      module: The worker's module, ours or burn_p2p's.
      factory: `module:attr` of what the user wrote.
      config: What it is called with, plain JSON.
      path: Entries of PYTHONPATH after ours.
      env: The user's additions to its environment.
      start_seconds: At most, from its start to its hello.
      answer_seconds: At most, for any other answer.
    """

    python: str
    module: str
    factory: str
    config: dict
    path: tuple[Path, ...]
    env: Mapping[str, str]
    start_seconds: float
    answer_seconds: float

    @property
    def name(self) -> str:
        """The worker's name in errors."""
        return f"workload {self.factory}"

    def environment(self) -> dict[str, str]:
        """Return the environment of the worker's process, and of a command in its place.

        Raises:
          LockstepError: An addition of the user's has no possible name, or is PYTHONPATH.
        """
        folder = os.path.dirname(self.python)  # torchrun, say, of the same packages
        return environment_of((*PYTHON, *self.path), self.env, programs=[folder] if folder else [])


@dataclass
class WorkerProcess:
    """A worker's process that has answered `hello`."""

    command: WorkerCommand
    folder: Path
    group: ChildGroup
    connection: socket.socket
    hello: WorkerHello = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _number: int = field(default=0, init=False)
    _lost: str = field(default="", init=False)  # why it does not run any more

    @classmethod
    def start(cls, command: WorkerCommand, folder: Path) -> "WorkerProcess":
        """Start a worker's process in a folder of its own, and wait for its hello.

        Its log is `worker.log` in it, and the log before it `worker.log.before`. The folder is
        not emptied: what a worker before left in it is still there.

        Raises:
          WorkerError: It does not start, connect or say hello in time, or it says nonsense.
        """
        deadline = time.monotonic() + command.start_seconds
        environment = command.environment()
        with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
            line = _line(command, listener.getsockname()[1])
            try:
                group = ChildGroup.start(line, folder, environment, folder / LOG)
            except LockstepError as error:
                raise NoWorkerError(f"{command.name}: start: {error}") from None
            try:
                connection = _accepted(command, group, listener, deadline)
            except BaseException:
                group.kill()
                raise
        worker = cls(command, folder, group, connection)
        try:
            worker.hello = worker.greet(max(0.0, deadline - time.monotonic()))
        except BaseException:
            worker.close()
            raise
        return worker

    @property
    def running(self) -> bool:
        """Whether the worker's process takes calls: it has not ended, and was not killed."""
        return not self._lost and self.group.child.poll() is None

    def greet(self, seconds: float | None = None) -> WorkerHello:
        """Return what the worker says of itself by now.

        Raises:
          WorkerError: As in `call`, or it says nonsense.
        """
        answer = self.call("hello", {}, seconds)
        return validate(WorkerHello, answer, f"{self.command.name}: hello: its answer", WorkerError)

    def result(self, key: str, method: str, params: dict) -> WorkerResult:
        """Return a worker's result of a method, which has this key at least; errors: see `call`."""
        result = self.call(method, params)
        if key not in result:
            raise self._error(method, f"{key}: missing, expected it")
        return validate(WorkerResult, result, f"{self.command.name}: {method}", WorkerError)

    def call(self, method: str, params: dict, seconds: float | None = None) -> dict:
        """Return a worker's result of a method, within `seconds` or the command's `answer_seconds`.

        Raises:
          WorkerError: The worker answers with an error; or it is killed, since it did not answer in
            time, ended, or gave another answer than expected. `running` says which.
        """
        with self._lock:
            return self._call(method, params, seconds)

    def run_command(
        self, arguments: list[str], folder: Path, variables: Mapping[str, str], seconds: float
    ) -> None:
        """Run a command in the worker's environment, in a folder of its own, until it ends.

        It may start processes of its own, as torchrun does; they end with it.

        Raises:
          WorkerError: It cannot be started, takes too long, or fails.
        """
        environment = self.command.environment() | variables
        try:
            group = ChildGroup.start(arguments, folder, environment, folder / COMMAND_LOG)
        except LockstepError as error:
            raise self._error("command", str(error)) from None
        try:
            with suppress(subprocess.TimeoutExpired):
                group.child.wait(seconds)
            ending = group.ended()
        finally:
            group.kill()  # what it started, too
        if ending is None:
            what = f"still running after {seconds:g} seconds, expected its end"
            raise self._error("command", what)
        if group.child.returncode:
            last = group.log.last_line()
            what = f"{ending}, expected status 0" + (f": {last}" if last else "")
            raise self._error("command", what)

    def close(self) -> None:
        """Ask the worker's process to end, wait a little, and kill what is left."""
        if self._lock.acquire(blocking=False):  # else a thread waits for an answer: none will come
            try:
                self._shut_down()
            finally:
                self._lock.release()
        self._lost = self._lost or "it was closed"
        self.kill()
        with self._lock:  # nobody waits at the socket any more
            self.connection.close()

    def kill(self) -> None:
        """Kill the worker's process and all that it started."""
        self.group.kill()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _shut_down(self) -> None:
        if not self.running:
            return
        with suppress(WorkerError):
            self._call("shutdown", {}, SHUTDOWN_SECONDS)
        until = time.monotonic() + SHUTDOWN_SECONDS
        while self.group.child.poll() is None and time.monotonic() < until:
            time.sleep(0.005)

    # ---- One answer ----

    def _call(self, method: str, params: dict, seconds: float | None) -> dict:
        if self._lost:
            raise self._error(method, f"is not running since {self._lost}, expected a worker")
        timeout = self.command.answer_seconds if seconds is None else seconds
        self._number += 1
        try:
            message = frames.packed({"id": self._number, "method": method, "params": params})
        except (TypeError, ValueError) as error:  # nothing was sent
            what = f"its params are no JSON ({error}), expected plain values"
            raise self._error(method, what) from None
        try:
            return self._answer(message, time.monotonic() + timeout)
        except RefusedError as error:
            raise self._refused(method, str(error)) from None
        except TimeoutError:
            self._fail(method, f"no answer in {timeout:g} s, expected one")
        except (LockstepError, ValueError) as error:  # the latter: of its length
            self._fail(method, str(error))
        except (OSError, EOFError):  # also of a worker that another thread closed
            what = f"the worker {_ending(self.group)}, expected an answer"
            self._fail(method, what, WorkerDiedError)
        except BaseException:  # Ctrl-C: its answer would be taken for the next call's
            self._lost = f"{method} was interrupted"
            self.kill()
            raise

    def _answer(self, message: bytes, deadline: float) -> dict:
        self.connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        self.connection.sendall(message)
        length = frames.length_of(self._receive(frames.HEADER.size, deadline))
        return messages.result_of(self._receive(length, deadline), self._number)

    def _receive(self, length: int, deadline: float) -> bytes:
        """Return so many bytes that the worker's process sends.

        Looks at the child too: what it started may hold its end of the connection open.

        Raises:
          TimeoutError: They did not come in time.
          EOFError: They will not come.
        """
        data = bytearray()
        while len(data) < length:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ended = self.group.child.poll() is not None
            if not select.select([self.connection], [], [], 0 if ended else min(left, 0.1))[0]:
                if ended:
                    raise EOFError
                continue
            part = self.connection.recv(min(length - len(data), BYTES_AT_ONCE))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    # ---- What goes wrong ----

    def _error(self, method: str, what: str, kind: type[WorkerError] = WorkerError) -> WorkerError:
        return kind(f"{self.command.name}: {method}: {what}")

    def _refused(self, method: str, message: str) -> WorkerError:
        """Return the error of a worker that answered with one; its whole message is in the log."""
        self.group.log.write(f"{method}: {message}\n".encode(errors="replace"))
        return self._error(method, f"{messages.first_line(message)}; more in {self.group.log.path}")

    def _fail(self, method: str, what: str, kind: type[WorkerError] = WorkerError) -> NoReturn:
        self._lost = self._lost or f"{method}: {what}"
        self.kill()
        raise self._error(method, what, kind) from None


def _line(command: WorkerCommand, port: int) -> list[str]:
    try:
        config = json.dumps(command.config, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        what = f"config is no JSON ({error}), expected plain values"
        raise WorkerError(f"{command.name}: start: {what}") from None
    line = [command.python, "-m", command.module, "--factory", command.factory]
    line += ["--config-json", config, "--connect-host", "127.0.0.1", "--connect-port", str(port)]
    return line


def _accepted(
    command: WorkerCommand, group: ChildGroup, listener: socket.socket, deadline: float
) -> socket.socket:
    """Return the worker's connection; any other is closed."""
    strangers = 0
    while True:
        left, ended = deadline - time.monotonic(), group.child.poll() is not None
        if select.select([listener], [], [], 0 if ended else max(0.0, min(left, LOOK_SECONDS)))[0]:
            connection, _ = listener.accept()
            with suppress(OSError):
                if group.owns(connection):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return connection
            connection.close()
            strangers += 1
        elif ended:
            what = f"the worker {_ending(group)}, expected it to connect"
            raise NoWorkerError(f"{command.name}: start: {what}")
        if left <= 0:
            others = f", and {strangers} others did" * bool(strangers)
            what = f"did not connect in {command.start_seconds:g} s{others}, expected it to"
            raise NoWorkerError(f"{command.name}: start: {what}")


def _ending(group: ChildGroup) -> str:
    """Return how a worker that should run ended, and its last words."""
    ending = _soon(group)
    group.kill()
    last = group.log.last_line()
    words = f"its last line is {last!r}" if last else "it said nothing"
    return f"{ending} ({words}, {group.log.path})"


def _soon(group: ChildGroup) -> str:
    """Return how a worker's process ended, a moment after its connection did."""
    for _ in range(50):
        if ended := group.ended():
            return ended
        time.sleep(0.01)
    return "closed its connection"
