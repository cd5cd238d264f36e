"""A tiny host: it listens, starts the worker, and asks it one thing after the other."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).resolve().parents[3]
PYTHON = [*(PROJECT / "parts").glob("*/python"), PROJECT / "lockstep" / "python"]
WORKLOADS = PROJECT / "workloads"


class WorkerError(Exception):
    """What the worker answered in the place of a result."""


class Host:
    """A worker, and what a host shares with it.

    Args:
        factory: `module:attr`.
        config: what it is called with.
        folder: the worker's folder; modules of the test in it are found.
    """

    def __init__(self, factory, config, folder, paths=()):
        self.folder, self.count = Path(folder), 0
        listening = socket.create_server(("127.0.0.1", 0))
        listening.settimeout(10)
        paths = [*PYTHON, WORKLOADS, folder, *paths]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
        command = [sys.executable, "-m", "lockstep_worker.worker", "--factory", factory]
        command += ["--config-json", config if isinstance(config, str) else json.dumps(config)]
        command += ["--connect-host", "127.0.0.1"]
        command += ["--connect-port", str(listening.getsockname()[1])]
        self.process = subprocess.Popen(
            command,
            env={**environment, "OMP_NUM_THREADS": "1"},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.sock, _ = listening.accept()
        self.sock.settimeout(60)
        listening.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Hang up; the worker ends by itself."""
        self.sock.close()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
            self.process.communicate()

    def send(self, message):
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.sock.sendall(struct.pack(">Q", len(body)) + body)

    def receive(self):
        (length,) = struct.unpack(">Q", self._exactly(8))
        return json.loads(self._exactly(length))

    def _exactly(self, length):
        data = b""
        while len(data) < length:
            part = self.sock.recv(length - len(data))
            assert part, "the worker has hung up"
            data += part
        return data

    def ask(self, method, **params):
        """The result; an error is raised."""
        self.count += 1
        self.send({"id": self.count, "method": method, "params": params})
        answer = self.receive()
        assert answer["id"] == self.count
        if not answer["ok"]:
            raise WorkerError(answer["error"])
        return answer["result"]

    # The capability `gradient`: arrays in a file that both map.

    def begin(self, rows, *, micro_batch=64, seed=0, include=(), exclude=(), room=4096):
        """Begin, and share room for so many bytes of rows."""
        globs = {"include_globs": list(include), "exclude_globs": list(exclude)}
        given = {"rows": rows, "micro_batch": micro_batch, "threads": 1, "seed": seed}
        found = self.ask("begin", **given, state_dict_filter=globs)
        count = found["parameter_count"]
        path = self.folder / "arrays"
        path.write_bytes(bytes(8 * count + room))
        self.ask(
            "open_arrays",
            path=str(path),
            params=[0, count],
            gradients=[4 * count, count],
            rows=[8 * count, room],
        )
        mapped = np.memmap(path, np.uint8, "r+")
        self.params = mapped[: 4 * count].view("<f4")
        self.gradients = mapped[4 * count : 8 * count].view("<f4")
        self.words = mapped[8 * count :].view("<i4")
        self.tensors = found["tensors"]
        self.ask("init")
        return found

    def write(self, words):
        """Put rows there; the params of `gradient` and `measure` that say how many."""
        self.words[: words.size] = words.reshape(-1)
        return {"rows": len(words), "width": words.shape[1]}

    def split(self, flat):
        """The tensors in a row of values, by name."""
        parts, at = {}, 0
        for tensor in self.tensors:
            size = int(np.prod(tensor["shape"], dtype=int))
            parts[tensor["name"]] = flat[at : at + size].reshape(tensor["shape"]).copy()
            at += size
        return parts


def array_rows(**arrays):
    """Rows of words [N, W] that hold arrays [N, ...], and their kind."""
    count = len(next(iter(arrays.values())))
    spec, pieces = [], []
    for name, array in arrays.items():
        spec.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape[1:])})
        data = np.ascontiguousarray(array).reshape(count, -1).view(np.uint8)
        pieces.append(np.pad(data, ((0, 0), (0, -data.shape[1] % 4))))
    words = np.concatenate(pieces, axis=1).view("<i4")
    return words, {"kind": "arrays", "arrays": spec}
