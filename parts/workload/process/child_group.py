"""A child that runs a user's code: its environment, its log, and the end of all it started.

Its environment begins empty and gets what is on a short list, so that no key or token of ours is
there by chance. That is all that is withheld: the child runs as the same user, and reads the files
that this user reads.

It is the leader of a session, and a random text marks it and all that it starts, also what leaves
the session. All of them are killed at the end, but for what leaves the session and clears its
environment too: nothing of it is known then. A guard beside it, a shell that waits for our end of
a pipe to close, kills its process group if this process is killed, and removes its folder.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import LockstepError, brief, keep_secret

LOG_BYTES, TAIL_BYTES = 2**23, 2**14  # of a log that are kept, and of its end for an error
MARK = "LOCKSTEP_WORKER"
ROUNDS = 100  # at most, of killing what was started meanwhile
QUIET = 2  # rounds without finding any, until there are none
GUARD = 'read _; kill -9 "-$0"; rm -rf -- "$1"'

GIVEN = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("XDG_CACHE_HOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"),
        *("TRANSFORMERS_OFFLINE", "TORCH_HOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    )
)
GIVEN_BEGINNINGS = ("LC_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "NCCL_")
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # NVIDIA_API_KEY, say
BYTES_AT_ONCE = 2**16


def environment_of(
    path: Sequence[Path], added: Mapping[str, str], programs: Sequence[str] = ()
) -> dict[str, str]:
    """Return a child's environment: what is given of ours, what Python needs, and the user's.

    Args:
      path: Entries of PYTHONPATH.
      added: What a user adds. Values whose names say that they are secret are hidden in errors.
      programs: Folders that PATH begins with.

    Raises:
      LockstepError: An addition has no possible name, or is PYTHONPATH.
    """
    ours = {
        name: value
        for name, value in os.environ.items()
        if (name in GIVEN or name.startswith(GIVEN_BEGINNINGS)) and not SECRET.search(name)
    }
    for name, value in added.items():
        if not name or "=" in name or "\0" in name + value:
            raise LockstepError(f"worker_env: found {brief(repr(name))}, expected NAME and a text")
        if name == "PYTHONPATH":
            raise LockstepError("worker_env: found PYTHONPATH, expected its folders in worker_path")
        if SECRET.search(name):
            keep_secret(value)
    python = {
        "PYTHONHASHSEED": "0",  # the order of sets is the same each time
        "PYTHONDONTWRITEBYTECODE": "1",  # the user's folder stays as it is
        "PYTHONUNBUFFERED": "1",  # the last line is in the log when it is killed
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in path),
    }
    search_path = os.pathsep.join([*map(os.path.abspath, programs), ours.get("PATH", os.defpath)])
    return {**ours, **python, "PATH": search_path, **added}


@dataclass
class ChildGroup:
    """A child and all that it starts.

    Attributes:
      child: The process.
      mark: Random text in the environment of all of them.
      log: What it says, up to `LOG_BYTES`; that of the one before is beside it as NAME.before.
    """

    child: subprocess.Popen
    mark: str
    log: "ChildLog"
    _guard: subprocess.Popen = field(repr=False)
    _over: bool = False

    @classmethod
    def start(
        cls, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> "ChildGroup":
        """Start a child's command in a folder of its own, which is made if it is not there.

        It is the caller's to remove, unless this process is killed.

        A program's path is relative to the current folder, not to that one.

        Raises:
          LockstepError: There is no such program, or it cannot be started.
        """
        program = os.path.abspath(command[0]) if os.sep in command[0] else command[0]
        mark = secrets.token_hex(16)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            child_log = ChildLog(log)
            child = subprocess.Popen(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**environment, MARK: mark},
                start_new_session=True,  # Ctrl-C is ours, and we end it in order
            )
        except (OSError, ValueError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise LockstepError(f"{program}: {what}, expected a program that starts") from None
        guard = subprocess.Popen(
            ["/bin/sh", "-c", GUARD, str(child.pid), os.path.abspath(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        child_log.follow(child)
        return cls(child, mark, child_log, guard)

    def owns(self, connection: socket.socket) -> bool:
        """Return whether the other end of a loopback connection is one of the child's processes.

        Looks for the other end's socket among their open files. Only Linux lists sockets: elsewhere
        the first that connects to a random port of loopback is believed.
        """
        local, remote = connection.getsockname()[1], connection.getpeername()[1]
        sockets = dict(_sockets())
        if sockets.get((local, remote)) != os.fstat(connection.fileno()).st_ino:
            return True  # the system lists not even ours
        name = f"socket:[{sockets.get((remote, local))}]"
        return any(name in _open_files(process) for process in self.processes())

    def processes(self) -> Iterator[int]:
        """Yield the running processes of the child's session, and those with its mark.

        The newest are first: what forks and exits again and again is there for a moment only.
        """
        mark = f"{MARK}={self.mark}".encode()
        entries = os.listdir("/proc") if os.path.isdir("/proc/self") else ()
        for process in sorted(map(int, filter(str.isdigit, entries)), reverse=True):
            with suppress(OSError):  # it ended, or is another user's
                state, session = _state_and_session(process)
                if state not in "ZX" and (session == self.child.pid or _is_marked(process, mark)):
                    yield process

    def ended(self) -> str | None:
        """Return how the child ended, such as "exited with status 1"; None while it runs."""
        status = self.child.poll()
        if status is None:
            return None
        if status >= 0:
            return f"exited with status {status}"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:  # a real-time signal
            return f"was ended by signal {-status}"

    def kill(self) -> None:
        """Kill the child and all that it started, and wait; what follows needs no guard."""
        if self._over:
            return  # its number may be another's by now
        self._over = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        quiet = 0
        for _ in range(ROUNDS):
            found = False
            for process in self.processes():
                found = True
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
            quiet = 0 if found else quiet + 1
            if quiet == QUIET:
                break
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin:
            self._guard.stdin.close()
        self.log.finish()


def _state_and_session(process: int) -> tuple[str, int]:
    with open(f"/proc/{process}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()  # the name before may have anything
    return fields[0].decode(), int(fields[3])


def _is_marked(process: int, mark: bytes) -> bool:
    with open(f"/proc/{process}/environ", "rb") as file:
        return mark in file.read().split(b"\0")


def _open_files(process: int) -> Iterator[str]:
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{process}/fd"):
            with suppress(OSError):
                yield os.readlink(entry.path)


def _sockets() -> Iterator[tuple[tuple[int, int], int]]:
    """Yield port, other port and inode of TCP sockets, to find a child's."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/net/{table}") as file:
            next(file)
            for line in file:
                fields = line.split()
                local, remote = (int(address.rpartition(":")[2], 16) for address in fields[1:3])
                yield (local, remote), int(fields[9])


class ChildLog:
    """The log of a child, up to `LOG_BYTES`: what is said beyond them is counted, not kept.

    Raises:
      OSError: it cannot be written.
    """

    def __init__(self, path: Path):
        self.path, self.total = path, 0
        self._tail, self._lock, self._reader = b"", threading.Lock(), None
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.before"))
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - until `finish`

    def follow(self, child: subprocess.Popen) -> None:
        """Keep what a child says, in a thread, until all its writers have ended."""
        self._reader = threading.Thread(target=self._follow, args=(child.stdout,), daemon=True)
        self._reader.start()

    def _follow(self, pipe) -> None:
        with pipe:
            while text := os.read(pipe.fileno(), BYTES_AT_ONCE):
                self.write(text)

    def write(self, text: bytes) -> None:
        """Add what a child says to its log."""
        with self._lock:
            part = text[: max(0, LOG_BYTES - self.total)]
            self.total += len(text)
            self._tail = (self._tail + text)[-TAIL_BYTES:]
            with suppress(OSError, ValueError):  # a full disk costs the log alone
                self._file.write(part)

    def last_line(self) -> str:
        """Return the last line with words that a child said, harmless and bounded; else ""."""
        with self._lock:
            lines = self._tail.decode(errors="replace").splitlines()
        return brief(next((line.strip() for line in reversed(lines) if line.strip()), ""), 300)

    def finish(self, seconds: float = 2.0) -> None:
        """Wait for a child's last output, and close its log."""
        if self._reader:
            self._reader.join(seconds)
        with self._lock:
            if self.total > LOG_BYTES and not self._file.closed:
                with suppress(OSError):
                    self._file.write(b"\n(%d bytes more)\n" % (self.total - LOG_BYTES))
            self._file.close()
