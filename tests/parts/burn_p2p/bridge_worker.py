"""A worker of version 2 that knows nothing of ours, with NumPy alone.

It has ten of the protocol's 17 methods: those that our hosts call, by docs/reference/bridge.md.

It says nothing of its environment, its plan names no shapes, and gradients are unknown to it. A new
model's params are of its process alone, as those of a torch module that nobody seeds.
"""

import argparse
import hashlib
import importlib
import json
import os
import socket
import struct
from pathlib import Path

import numpy as np

FORMAT = "burn-p2p-python-flattened-parameter-pack-v1"
CAPABILITIES = [
    "artifact_path_io",
    "diloco_checkpoint_job",
    "parameter_pack_export",
    "parameter_pack_import",
    "exact_step_budget",
]


class Worker:
    """Models by their ids, and a method for each of the protocol's."""

    def __init__(self, workload):
        self.workload, self.models, self.made = workload, {}, 0

    def _add(self, state):
        self.made += 1
        self.models[f"m{self.made}"] = state
        return {"model_id": f"m{self.made}"}

    def _new(self, device):
        state = self.workload.init_model(device)
        state["w"] += os.getpid()  # another process begins with other values
        return state

    def hello(self, _):
        name = type(self.workload).__name__
        return {"protocol_version": 2, "workload_name": name, "capabilities": CAPABILITIES}

    def capability_probe(self, _):
        probe = self.workload.capability_probe()
        return {"runtime_device": self.workload.runtime_device(), "capability": probe}

    def init_model(self, params):
        return self._add(self._new(params["device"]))

    def parameter_pack_plan(self, params):
        facts = keys_of(self._new(params["device"]))
        return {"uses_custom_parameter_pack_hooks": False, **facts}

    def evaluate(self, params):
        return {"metrics": self.workload.evaluate(self._of(params), params["split"])}

    def export_parameter_pack(self, params):
        folder = Path(params["parameter_pack_path"])
        write(folder, self._of(params), params["model_schema_hash"])
        return {"ok": True}

    def import_parameter_pack(self, params):
        state, folder = self._new(params["device"]), Path(params["parameter_pack_path"])
        manifest = json.loads((folder / "manifest.json").read_text())
        found = np.fromfile(folder / manifest["values_f32_le"], "<f4")
        if manifest["layout_hash"] != keys_of(state)["layout_hash"]:
            raise ValueError(f"layout {manifest['layout_hash']}")
        for name in floats(state):
            size = state[name].size
            state[name], found = found[:size].reshape(state[name].shape), found[size:]
        return self._add(state)

    def run_inner_loop(self, params):
        state, steps = self._of(params), params["num_inner_steps"]
        said = self.workload.run_inner_loop(state, params)
        if said["steps_completed"] != steps:
            raise ValueError(f"{said['steps_completed']} steps, asked for {steps}")
        write(Path(params["output_parameter_pack_path"]), state, params["model_schema_hash"])
        kept = ("inner_optimizer_state_path", "inner_optimizer_state_encoding")
        answer = {"steps_completed": steps, "metrics": said["metrics"]}
        return answer | {name: said.get(name) for name in kept}

    def release_model(self, params):
        del self.models[params["model_id"]]
        return {"ok": True}

    def shutdown(self, _):
        return {"ok": True}

    def _of(self, params):
        return self.models[params["model_id"]]


METHODS = {name for name in vars(Worker) if not name.startswith("_")}


def floats(state):
    """Names of the arrays that travel, in order."""
    return sorted(name for name, array in state.items() if array.dtype.kind == "f")


def keys_of(state):
    """What a manifest and a plan say of a state."""
    layout = [
        {
            "dtype": f"torch.{state[name].dtype}",
            "name": name,
            "numel": state[name].size,
            "shape": list(state[name].shape),
        }
        for name in floats(state)
    ]
    text = json.dumps(layout, separators=(",", ":"))
    return {
        "layout_hash": "torch-layout-" + hashlib.sha256(text.encode()).hexdigest(),
        "parameter_count": sum(tensor["numel"] for tensor in layout),
        "included_keys": floats(state),
        "excluded_float_keys": [],
        "ignored_non_float_keys": sorted({*state} - {*floats(state)}),
    }


def write(folder, state, schema):
    """A pack, whose values have no hash."""
    folder.mkdir(parents=True, exist_ok=True)
    values = np.concatenate([state[name].reshape(-1) for name in floats(state)])
    values.astype("<f4").tofile(folder / "values.f32le")
    manifest = {"format": FORMAT, "model_schema_hash": schema, **keys_of(state)}
    manifest |= {"values_f32_le": "values.f32le"}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2))


def serve(worker, connection):
    """Answer until the host hangs up, or says that this is the end."""
    with connection, connection.makefile("rwb") as stream:
        while head := stream.read(8):
            request = json.loads(stream.read(*struct.unpack(">Q", head)))
            method, answer = request["method"], {"id": request["id"], "ok": True}
            try:
                if method not in METHODS:
                    raise ValueError(f"unknown method {method!r}")
                answer["result"] = getattr(worker, method)(request["params"])
            except Exception as error:
                answer |= {"ok": False, "error": f"{error}\nTraceback"}
            body = json.dumps(answer).encode()
            stream.write(struct.pack(">Q", len(body)) + body)
            stream.flush()
            if method == "shutdown":
                return


if __name__ == "__main__":
    Path("threads").write_text(os.environ["OMP_NUM_THREADS"])
    parser = argparse.ArgumentParser()
    for name in ("--factory", "--config-json", "--connect-host", "--connect-port"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    module, _, attribute = given.factory.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    worker = Worker(factory(json.loads(given.config_json)))
    port = int(given.connect_port)
    serve(worker, socket.create_connection((given.connect_host, port)))
