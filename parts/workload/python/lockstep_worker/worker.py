"""The worker: a process that computes with a user's model for a host, by burn_p2p's protocol 2.

It and the files it needs are the standard library and NumPy, in the user's own environment:

    python -m lockstep_worker.worker --factory my_model:MyModel --config-json '{}' \
        --connect-host 127.0.0.1 --connect-port 4000

It connects first and builds the user's object second, so that an import of minutes is a long hello
and no dead worker. Frames are 8 bytes of length and JSON; arrays go by path. It has the
methods that every host of version 2 knows, without those that merge or patch models, which a round
does here; and those of the capability `gradient` (gradients.py).
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
from pathlib import Path
from typing import Any

import numpy as np
from lockstep_torch import bits

from . import frames, gradients, pack_files, packs

PROTOCOL_VERSION = 2
BURN = ["artifact_path_io", "parameter_pack_export", "parameter_pack_import"]
INNER_LOOP = ["diloco_checkpoint_job", "exact_step_budget"]
WATCHED = 2  # of inner loops: whether they move what stays
# An object without a probe of its own.
PROBE = {"preferred_backends": ["cpu"], "work_units_per_second": 1.0, "target_window_seconds": 1}


class Params(dict):
    """The params of a request, or of a job."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"params: {key!r} is missing; found {sorted(self)}")


def make_workload(factory: str, config: dict) -> Any:
    """Return what `module:name`, or `module:Class.name`, makes of its config."""
    module, colon, name = factory.partition(":")
    if not colon:
        raise ValueError(f"factory {factory!r}; module:attr expected")
    return attrgetter(name)(importlib.import_module(module))(config)


class Worker:
    """A user's object and the states it made, served method by method.

    Args:
        factory: `module:attr`, called with the config.
        config: what the user's object is made of.
    """

    def __init__(self, factory: str, config: dict):
        self.workload = make_workload(factory, config)
        self.name = str(getattr(self.workload, "workload_name", type(self.workload).__name__))
        self.models: dict[str, Any] = {}
        self.watched = 0  # inner loops that were seen to move nothing that stays
        self.made = 0  # states, all time: an id is never used twice
        self.by_gradient = hasattr(self.workload, "bind")  # what travels, as the base class has it
        self.session = gradients.Session(self.workload)

    def answer(self, request: dict) -> Any:
        """The result of a request; what goes wrong is raised."""
        method, params = request.get("method"), Params(request.get("params") or {})
        if method in gradients.METHODS:
            return self.session.answer(method, params)
        handler = METHODS.get(method)
        if handler is None:
            raise ValueError(f"unknown method {method!r}; one of {sorted(METHODS)} expected")
        return handler(self, params)

    def has(self, name: str) -> bool:
        """Whether the user's object can do this."""
        return callable(getattr(self.workload, name, None))

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the user's object."""
        if not self.has(name):
            raise ValueError(f"{self.name} has no {name}")
        return getattr(self.workload, name)(*arguments)

    def model(self, model_id: str) -> Any:
        """A state by its id."""
        if model_id not in self.models:
            raise ValueError(f"model {model_id!r} is not here; found {sorted(self.models)}")
        return self.models[model_id]

    def keep(self, state: Any) -> dict:
        """Keep a new state."""
        self.made += 1
        self.models[f"m{self.made}"] = state
        return {"model_id": f"m{self.made}"}

    def initial(self, params: Params) -> Any:
        """A state of the user's object as it begins, the same each time.

        Every generator is seeded with `seed`, which burn_p2p's hosts do not send: 0 for them.
        """
        bits.seed_generators(params.get("seed", 0))
        if self.has("init") and not self.has("init_model"):
            arrays = self.workload.init(params.get("seed", 0))
            return {name: np.array(array) for name, array in arrays.items()}
        return self.call("init_model", params["device"])

    def layout(self, state: Any, params: Params) -> packs.Layout:
        """Return the exchanged part of a state."""
        return packs.layout_of(state, params.get("state_dict_filter"), self.by_gradient)

    def export(self, state: Any, path: str, params: Params) -> None:
        """Write the pack of a state, or have the user's object write it."""
        schema = params["model_schema_hash"]
        if self.has("export_parameter_pack_path"):
            self.workload.export_parameter_pack_path(state, path, schema)
        else:
            packs.write(path, self.layout(state, params), schema, params.get("state_dict_filter"))


def _hello(worker: Worker, params: Params) -> dict:
    capabilities = BURN + INNER_LOOP * worker.has("run_inner_loop")
    ours = dict.fromkeys(gradients.METHODS.values())
    capabilities += [name for name in ours if gradients.offers(worker.workload, name)]
    return {
        "protocol_version": PROTOCOL_VERSION,
        "workload_name": worker.name,
        "capabilities": capabilities,
        "environment": bits.environment(_device(worker)),
        "files": imported(),
    }


def imported() -> list[str]:
    """Return the files of the user's modules that are imported by now."""
    folders = tuple(
        f"{path}{os.sep}" for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
    )
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return sorted(file for file in files if file.startswith(folders) and frames.is_users(file))


def _device(worker: Worker) -> str:
    return str(worker.workload.runtime_device()) if worker.has("runtime_device") else "cpu"


def _capability_probe(worker: Worker, params: Params) -> dict:
    probe = worker.workload.capability_probe() if worker.has("capability_probe") else PROBE
    suggests = getattr(worker.workload, "suggests", {})
    return {"runtime_device": _device(worker), "capability": probe, "suggests": suggests}


def _init_model(worker: Worker, params: Params) -> dict:
    return worker.keep(worker.initial(params))


def _parameter_pack_plan(worker: Worker, params: Params) -> dict:
    custom = worker.has("export_parameter_pack_path") or worker.has("import_parameter_pack_path")
    state = worker.initial(params)
    try:
        layout = worker.layout(state, params)
    except (TypeError, ValueError) as error:
        if not custom:
            raise
        layout, problem = packs.Layout([], [], [], [], {}), {"generic_plan_error": str(error)}
        plan = {**layout.keys(), "layout_hash": None, **problem}
    else:
        plan = {**layout.keys(), "tensors": layout.tensors, "tied": layout.tied}
    return {"uses_custom_parameter_pack_hooks": custom, **plan}


def _train_window(worker: Worker, params: Params) -> dict:
    metrics = worker.call("train_window", worker.model(params["model_id"]), params["batches"])
    return {"metrics": frames.metrics_of(metrics)}


def _evaluate(worker: Worker, params: Params) -> dict:
    bits.seed_generators(0)
    metrics = worker.call("evaluate", worker.model(params["model_id"]), params["split"])
    return {"metrics": frames.metrics_of(metrics)}


def _load_model_artifact(worker: Worker, params: Params) -> dict:
    model_id, path = params["model_id"], params["artifact_path"]
    state = worker.model(model_id)
    if worker.has("load_model_artifact_path"):
        updated = worker.workload.load_model_artifact_path(state, path)
    else:
        updated = worker.call("load_model_artifact", state, Path(path).read_bytes())
    if updated is not None:
        worker.models[model_id] = updated
    return {"ok": True}


def _materialize_model_artifact(worker: Worker, params: Params) -> dict:
    state, path = worker.model(params["model_id"]), params["artifact_path"]
    if worker.has("materialize_model_artifact_path"):
        worker.workload.materialize_model_artifact_path(state, path)
    else:
        Path(path).write_bytes(worker.call("materialize_model_artifact", state))
    return {"ok": True}


def _export_parameter_pack(worker: Worker, params: Params) -> dict:
    worker.export(worker.model(params["model_id"]), params["parameter_pack_path"], params)
    return {"ok": True}


def _import_parameter_pack(worker: Worker, params: Params) -> dict:
    """Into a new state. What does not travel (frozen, excluded, integers) is as it begins."""
    path, schema = params["parameter_pack_path"], params.get("model_schema_hash")
    if worker.has("import_parameter_pack_path"):
        return worker.keep(worker.workload.import_parameter_pack_path(params["device"], path))
    state = worker.initial(params)
    packs.load(path, worker.layout(state, params), schema)
    return worker.keep(state)


def _run_inner_loop(worker: Worker, params: Params) -> dict:
    """Every generator is seeded, so that a replay of the same job draws the same numbers."""
    model_id, requested = params["model_id"], params["num_inner_steps"]
    seed = params["seed"] if "seed" in params else bits.seed_of(params["batches"])
    bits.seed_generators(seed)
    job = Params({**params, "seed": seed})
    state, movement = worker.model(model_id), None
    if worker.by_gradient and not isinstance(state, dict):
        from lockstep_torch import module_state

        module_state.settle(state)
        if worker.watched < WATCHED:
            globs = params.get("state_dict_filter")
            tensors = module_state.state_of(state, lambda name: packs.allows(globs, name))
            movement = module_state.Movement(state, tensors, of_gradient=False)
    result = worker.call("run_inner_loop", state, job) or {}
    if movement is not None:
        movement.check()
        worker.watched += 1
    worker.models[model_id] = result.get("state", worker.models[model_id])
    completed = int(result.get("steps_completed", requested))
    if params.get("require_exact_steps") and completed != requested:
        raise ValueError(f"run_inner_loop took {completed} steps; {requested} expected")
    path = params["output_parameter_pack_path"]
    if not Path(path, pack_files.MANIFEST).exists():
        worker.export(worker.models[model_id], path, params)
    state_path = result.get("inner_optimizer_state_path")
    return {
        "steps_completed": completed,
        "metrics": frames.metrics_of(result.get("metrics") or {}),
        "inner_optimizer_state_path": None if state_path is None else str(state_path),
        "inner_optimizer_state_encoding": result.get("inner_optimizer_state_encoding"),
    }


def _release_model(worker: Worker, params: Params) -> dict:
    worker.models.pop(params["model_id"], None)
    return {"ok": True}


METHODS: dict[Any, Callable[[Worker, Params], Any]] = {
    function.__name__[1:]: function
    for function in (
        _hello,
        _capability_probe,
        _init_model,
        _parameter_pack_plan,
        _train_window,
        _evaluate,
        _load_model_artifact,
        _materialize_model_artifact,
        _export_parameter_pack,
        _import_parameter_pack,
        _run_inner_loop,
        _release_model,
    )
}  # and `shutdown`, which ends the loop below


class Connection:
    """The host's connection, and the loop that answers what comes over it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.busy = True

    def watch(self) -> None:
        """End this process if the host goes while the user's code computes."""
        poll = select.poll()
        poll.register(self.sock, getattr(select, "POLLRDHUP", 0))  # errors and hang-ups always
        while not (poll.poll() and self.busy):
            time.sleep(0.2)  # the loop below sees it too, unless it waits for the user's code
        os._exit(1)

    def serve(self, make: Callable[[], Worker]) -> None:
        """Answer until the host says `shutdown` or goes."""
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
    """Serve one host until it goes."""
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
