"""Workers in a few lines of the standard library, which speak the protocol well or badly.

Each is a module in a folder; what it does with a request is `answer(request)` of the user's code.
"""

import sys
import textwrap

from parts.workload.process.worker_process import WorkerCommand

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

GOOD = """
import numpy as np

def answer(sock, request):
    params = request["params"]
    if request["method"] == "open_arrays":
        global mapped, place
        mapped, place = np.memmap(params["path"], np.uint8, "r+"), params
        return reply(sock, request, {"ok": True})
    def region(name):
        offset, count = place[name]
        return mapped[offset:offset + 4 * count].view("<f4")
    offset = place["rows"][0]
    rows, width = params["rows"], params["width"]
    x = mapped[offset:offset + 4 * rows * width].view("<i4").reshape(rows, width)
    w = region("params")
    residual = x.astype("f4") @ w - 1
    region("gradients")[:] = 2 * x.T.astype("f4") @ residual / rows
    reply(sock, request, {"loss": float((residual ** 2).mean())})

serve(answer)
"""


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
