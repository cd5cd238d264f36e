"""Workers in a few lines of the standard library, which speak the protocol well or badly.

Each is a module in a folder; what it does with a request is `answer(request)` of the user's code.
"""

import sys
import textwrap
import time
from pathlib import Path

from parts.workload.process.worker_process import WorkerCommand, WorkerProcess

SPEAKS = '''
import argparse, json, os, socket, struct, sys, time

given = argparse.ArgumentParser()
for name in ("--factory", "--config-json", "--connect-host", "--connect-port"):
    given.add_argument(name)
given = given.parse_args()
HELLO = {"protocol_version": 2, "workload_name": "fake", "capabilities": ["gradient"]}


def connect():
    return socket.create_connection((given.connect_host, int(given.connect_port)))


def receive(sock):
    header = sock.recv(8, socket.MSG_WAITALL)
    if len(header) < 8:
        sys.exit(0)
    return json.loads(sock.recv(struct.unpack(">Q", header)[0], socket.MSG_WAITALL))


def raw(sock, body):
    sock.sendall(struct.pack(">Q", len(body)) + body)


def reply(sock, request, result):
    raw(sock, json.dumps({"id": request["id"], "ok": True, "result": result}).encode())


def serve(answer):
    """Answer `hello` and `shutdown`, and all else by answer(sock, request)."""
    sock = connect()
    while True:
        request = receive(sock)
        if request["method"] == "hello":
            reply(sock, request, HELLO)
        elif request["method"] == "shutdown":
            reply(sock, request, {"ok": True})
            sys.exit(0)
        else:
            answer(sock, request)
'''


def command(folder, body, **changes):
    """Return the command of a worker with this body after `SPEAKS`, written into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "fake.py").write_text(SPEAKS + textwrap.dedent(body))
    given = {
        "python": sys.executable,
        "module": "fake",
        "factory": "my_model:Model",
        "config": {"width": 3},
        "path": (folder,),
        "env": {},
        "start_seconds": 20.0,
        "answer_seconds": 20.0,
    }
    return WorkerCommand(**{**given, **changes})


def start(folder, body, **changes):
    """Start it: its module is in the folder's `code`, and its own folder is `worker`."""
    return WorkerProcess.start(command(folder / "code", body, **changes), folder / "worker")


def gone(pid):
    """Whether a process has ended, within 10 seconds."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
