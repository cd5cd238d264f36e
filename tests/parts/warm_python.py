"""A Python for `worker_python` that has imported its libraries already: workers are its forks.

Each worker is a fresh process all the same, at a tenth of the time. The program that the host
starts connects to the host, hands that connection to the process that has imported, and ends with
the fork.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

PROGRAM = """#!{python} -IS
import json, os, socket, struct, sys
port = int(sys.argv[sys.argv.index("--connect-port") + 1])
given = json.dumps([sys.argv, dict(os.environ), os.getcwd()]).encode()
with socket.create_connection(("127.0.0.1", port)) as host, socket.socket(socket.AF_UNIX) as warm:
    warm.connect({path!r})
    socket.send_fds(warm, [struct.pack("<q", len(given))], [host.fileno(), 1, 2])
    warm.sendall(given)
    ended = warm.recv(1)
sys.exit(ended[0] if ended else 1)
"""


@contextmanager
def warm_python(folder: Path, *modules: str):
    """Yield the path of such a Python, with some modules imported."""
    path, program = folder / "warm.sock", folder / "python"
    program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    command = [sys.executable, __file__, str(path), *modules]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    parent = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    try:
        assert parent.stdout.readline() == b"ready\n"
        yield str(program)
    finally:
        parent.communicate()  # its standard input ends


def serve(path: str, *modules: str) -> None:
    """Import, then fork for whoever asks, until standard input ends."""
    for module in modules:
        importlib.import_module(module)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
        asked, _ = listening.accept()
        if not os.fork():
            listening.close()
            become(asked)
        asked.close()


def become(asked: socket.socket) -> None:
    """Be the Python that a program was asked to be, with its connection, output and place."""
    head, (host, *output), _, _ = socket.recv_fds(asked, 8, 3)
    (size,) = struct.unpack("<q", head)
    arguments, environment, folder = json.loads(asked.makefile("rb").read(size))
    for descriptor, file in zip((1, 2), output, strict=True):
        os.dup2(file, descriptor)
    for number in signal.SIGCHLD, signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    socket.create_connection = lambda *_: socket.socket(fileno=host)
    sys.argv = arguments[2:]  # behind -m
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    status = 1
    try:
        runpy.run_module(arguments[2], run_name="__main__", alter_sys=True)
        status = 0
    finally:
        asked.send(bytes([status]))
        os._exit(status)


if __name__ == "__main__":
    serve(*sys.argv[1:])
