"""A workload for tests, with NumPy alone: three numbers that are pulled to the rows' mean.

Its config says what it does wrong, by the method in which it does.
"""

import json
import os
from pathlib import Path

import numpy as np


class Pull:
    """Gradients: loss = mean over rows of |w - x|^2 / 2, where x are a row's first three words."""

    def __init__(self, config):
        self.wrong, self.noise = config.get("wrong", {}), config.get("noise", 0.0)
        self.size = config.get("size", 3)

    def _do(self, method):
        what = self.wrong.get(method)
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise RuntimeError(f"{method}: a secret\nand a second line")
        if what and what.startswith("write "):
            Path(what.removeprefix("write ")).write_text("changed by the worker")
        return what

    def _target(self, rows):
        return np.stack([np.resize(row, self.size) for row in rows]).astype(np.float32)

    def init(self, seed):
        self._do("init")
        return {"w": np.arange(self.size, dtype=np.float32) + seed, "n": np.array([1])}

    def gradient(self, params, rows):
        what = self._do("gradient")
        apart = params["w"] - self._target(rows)
        grads = {"w": apart.mean(0)}
        if what == "nan":
            grads["w"][1] = np.nan
            return float("nan"), grads
        if what == "noise":  # as kernels that sum in any order
            noise = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
            grads["w"] *= 1 + np.float32(self.noise) * noise.standard_normal(self.size, np.float32)
        if what == "missing":
            return 0.0, {}
        if what == "extra":
            return 0.0, {**grads, "v": grads["w"]}
        if what == "shape":
            return 0.0, {"w": grads["w"][:2]}
        return float((apart**2).sum(1).mean() / 2), grads

    def measure(self, params, rows):
        what = self._do("measure")
        losses = ((params["w"] - self._target(rows)) ** 2).sum(1) / 2
        return losses[:-1] if what == "few" else losses

    def evaluate(self, params, split):
        self._do("evaluate")
        return {"norm": float(np.abs(params["w"]).sum()), "split": split}


class WithData(Pull):
    """The same, with data of its own."""

    def dataset(self, split):
        return {"inputs": np.zeros((4, 16), np.int32)}


class Inner:
    """An inner loop in burn_p2p's way, without a base class: w moves half-way to the rows' mean."""

    def __init__(self, config):
        self.wrong = config.get("wrong", "")

    def runtime_device(self):
        return "cpu"

    def capability_probe(self):
        return dict(preferred_backends=["cpu"], work_units_per_second=1.0, target_window_seconds=1)

    def init_model(self, device):
        return {"w": np.arange(3, dtype=np.float32), "n": np.array([1])}

    def evaluate(self, state, split):
        return {"sum": float(state["w"].sum())}

    def run_inner_loop(self, state, job):
        steps, wrong = job["num_inner_steps"], self.wrong
        taken = 0
        if "inner_optimizer_state_path" in job:
            taken = int(Path(job["inner_optimizer_state_path"]).read_bytes())
        paths = [path for batch in job["batches"] for path in batch["shard_paths"]]
        assert len(paths) == steps
        for path in paths:
            state["w"] += (np.load(path)[:, :3].mean(0) - state["w"]) / (2 + taken)
        if wrong == "nan":
            state["w"][0] = np.nan
        out = Path(job["output_parameter_pack_path"])
        left = out.with_name("left")
        left.write_bytes(b"%d" % (taken + steps))
        if wrong == "anothers":  # the pack of another model
            out.mkdir()
            np.zeros(3, "<f4").tofile(out / "values.f32le")
            manifest = {"format": "burn-p2p-python-flattened-parameter-pack-v1"}
            manifest |= {"model_schema_hash": "another", "layout_hash": "another"}
            manifest |= {"parameter_count": 3, "values_f32_le": "values.f32le"}
            (out / "manifest.json").write_text(json.dumps(manifest))
        path = Path("/etc/hostname") if wrong == "outside" else left
        return {
            "steps_completed": steps - (wrong == "few"),
            "metrics": {} if wrong == "silent" else {"loss": float(np.abs(state["w"]).sum())},
            "inner_optimizer_state_path": str(path),
            "inner_optimizer_state_encoding": "text/plain",
        }


class OwnPacks(Inner):
    """The same, with packs of its own: its state is a list, which no layout describes."""

    def init_model(self, device):
        return [super().init_model(device)]

    def evaluate(self, state, split):
        return super().evaluate(state[0], split)

    def run_inner_loop(self, state, job):
        return super().run_inner_loop(state[0], job)

    def export_parameter_pack_path(self, state, path, model_schema_hash):
        Path(path).mkdir(exist_ok=True)
        state[0]["w"].astype("<f4").tofile(Path(path, "mine.f32le"))
        manifest = {"format": "burn-p2p-python-flattened-parameter-pack-v1"}
        manifest |= {"model_schema_hash": model_schema_hash, "layout_hash": "mine"}
        manifest |= {"parameter_count": 3, "values_f32_le": "mine.f32le"}
        Path(path, "manifest.json").write_text(json.dumps(manifest))

    def import_parameter_pack_path(self, device, path):
        manifest = json.loads(Path(path, "manifest.json").read_text())
        assert manifest["layout_hash"] == "mine"
        return [{"w": np.fromfile(Path(path, manifest["values_f32_le"]), "<f4"), "n": [1]}]


class Sizes:
    """Rows are files: loss = mean over files of (w - the file's size)^2 / 2."""

    def __init__(self, config):
        pass

    def init(self, seed):
        return {"w": np.zeros(1, np.float32)}

    def gradient(self, params, rows):
        apart = params["w"] - np.array([[Path(path).stat().st_size] for path in rows], np.float32)
        return float((apart**2).mean() / 2), {"w": apart.mean(0)}

    def measure(self, params, rows):
        return [float(self.gradient(params, [path])[0]) for path in rows]
