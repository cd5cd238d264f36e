"""The worker: a process that computes with a user's model for a host, by burn_p2p's protocol 2.

It and the files it needs are the standard library and NumPy, in the user's own environment:

    python -m lockstep_worker.worker --factory my_model:MyModel --config-json '{}' \
        --connect-host 127.0.0.1 --connect-port 4000

It connects first and builds the user's object second, so that an import of minutes is a long hello
and no dead worker. Frames are 8 bytes of length and JSON; arrays go by path. Its methods are those
of the capability `gradient` (gradients.py), and those of a module `models`, if another part brings
one: models that the worker keeps for its host.
"""

import argparse
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from lockstep_torch import bits

from . import brought, frames, gradients

PROTOCOL_VERSION = 2
# An object without a probe of its own.
PROBE = {"preferred_backends": ["cpu"], "work_units_per_second": 1.0, "target_window_seconds": 1}


class Params(dict):
    """The params of a host's request, or of a job."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"params: {key!r} is missing; found {sorted(self)}")


def make_workload(factory: str, config: dict) -> Any:
    """Return what a worker makes of `module:name`, or `module:Class.name`, and its config."""
    module, colon, name = factory.partition(":")
    if not colon:
        raise ValueError(f"factory {factory!r}; module:attr expected")
    return attrgetter(name)(importlib.import_module(module))(config)


class Worker:
    """The worker: a user's object, served method by method.

    Args:
        factory: `module:attr`, called with the config.
        config: what the user's object is made of.
    """

    def __init__(self, factory: str, config: dict):
        self.workload = make_workload(factory, config)
        self.name = str(getattr(self.workload, "workload_name", type(self.workload).__name__))
        self.session = gradients.Session(self.workload)
        self.brought = brought("models")
        self.models = self.brought.Models(self.workload, self.name) if self.brought else None

    def answer(self, request: dict) -> Any:
        """The worker's result of a request; what goes wrong is raised."""
        method, params = request.get("method"), Params(request.get("params") or {})
        if method in gradients.METHODS:
            return self.session.answer(method, params)
        methods = self.methods()
        if method not in methods:
            raise ValueError(f"unknown method {method!r}; one of {sorted(methods)} expected")
        return methods[method](params)

    def methods(self) -> dict[Any, Callable[[Params], Any]]:
        """All the worker's methods but those of `gradient`, and `shutdown`, which ends its loop."""
        own = {"hello": self.hello, "capability_probe": self.capability_probe}
        names = self.brought.METHODS if self.brought else ()
        return own | {name: getattr(self.models, name) for name in names}

    def hello(self, params: Params) -> dict:
        """Say what the worker can do, and what decides its bits."""
        ours = dict.fromkeys(gradients.METHODS.values())
        return {
            "protocol_version": PROTOCOL_VERSION,
            "workload_name": self.name,
            "capabilities": [
                *(self.brought.capabilities(self.workload) if self.brought else ()),
                *(name for name in ours if gradients.offers(self.workload, name)),
            ],
            "environment": bits.environment(self._device()),
            "files": imported(),
        }

    def capability_probe(self, params: Params) -> dict:
        """Say where the worker computes, and what suits the user's object."""
        has_probe = callable(getattr(self.workload, "capability_probe", None))
        return {
            "runtime_device": self._device(),
            "capability": self.workload.capability_probe() if has_probe else PROBE,
            "suggests": getattr(self.workload, "suggests", {}),
        }

    def _device(self) -> str:
        has_device = callable(getattr(self.workload, "runtime_device", None))
        return str(self.workload.runtime_device()) if has_device else "cpu"


def imported() -> list[str]:
    """Return the files of the user's modules that the worker imported by now."""
    folders = tuple(
        f"{path}{os.sep}" for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return sorted(file for file in files if file.startswith(folders) and frames.is_users(file))


class Connection:
    """The worker's connection to its host, and the loop that answers what comes over it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.busy = True

    def watch(self) -> None:
        """End this worker if the host goes while the user's code computes."""
        poll = select.poll()
        poll.register(self.sock, getattr(select, "POLLRDHUP", 0))  # errors and hang-ups always
        while not (poll.poll() and self.busy):
            time.sleep(0.2)  # the loop below sees it too, unless it waits for the user's code
        os._exit(1)

    def serve(self, make: Callable[[], Worker]) -> None:
        """Answer as a worker until the host says `shutdown` or goes."""
        try:
            worker, problem = make(), ""
        except (Exception, SystemExit) as error:
            worker, problem = None, frames.described(error)
        self.busy = False
        while (request := frames.receive(self.sock)) is not None:
            table = request if isinstance(request, dict) else {}
            head: dict = {"id": table.get("id", 0)}
            if table.get("method") == "shutdown":
                frames.send(self.sock, {**head, "ok": True, "result": {"ok": True}})
                return
            self.busy = True
            answer = {"ok": False, "error": problem} if worker is None else _answered(worker, table)
            self.busy = False  # before the host has the answer, and may go
            frames.send(self.sock, {**head, **answer})


def _answered(worker: Worker, request: dict) -> dict:
    try:
        return {"ok": True, "result": worker.answer(request)}
    except (Exception, SystemExit) as error:  # the user's code may do anything
        return {"ok": False, "error": frames.described(error)}


def main() -> None:
    """Serve one host as a worker until it goes."""
    parser = argparse.ArgumentParser(description="Serve a user's model to a host.")
    parser.add_argument("--factory", required=True, help="module:attr, called with the config")
    parser.add_argument("--config-json", required=True, help="a JSON object")
    parser.add_argument("--connect-host", required=True)
    parser.add_argument("--connect-port", required=True, type=int)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the host says when it is over
    with socket.create_connection((args.connect_host, args.connect_port)) as sock:
        connection = Connection(sock)
        threading.Thread(target=connection.watch, daemon=True).start()
        try:
            connection.serve(lambda: Worker(args.factory, json.loads(args.config_json)))
        except ValueError as error:
            sys.exit(f"worker: {error}")
        except OSError:
            pass  # the host is gone


if __name__ == "__main__":
    main()
