"""A class as one writes it for burn_p2p, which runs here unchanged: `burn_class:Workload`.

Its data are its own files, `data_location.Files`: shards of safetensors with `x` and `y`.
"""

# ruff: noqa: D102
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file


class Workload:
    """A small classifier with an inner loop of its own; it imports nothing of ours."""

    def __init__(self, config):
        self.rate = config["learning_rate"]

    def runtime_device(self):
        return "cpu"

    def capability_probe(self):
        return dict(preferred_backends=["cpu"], work_units_per_second=1.0, target_window_seconds=1)

    def init_model(self, device):
        return {"model": torch.nn.Linear(144, 10).to(device)}

    def rows(self, path):
        shard = load_file(path)
        return shard["x"].flatten(1), shard["y"]

    def train_window(self, state, batches):
        optimizer = torch.optim.SGD(state["model"].parameters(), self.rate)
        for x, y in (self.rows(path) for batch in batches for path in batch["shard_paths"]):
            loss = F.cross_entropy(state["model"](x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {"loss": float(loss)}

    def run_inner_loop(self, state, job):
        paths = [path for batch in job["batches"] for path in batch["shard_paths"]]
        steps = [{"shard_paths": [paths[i % len(paths)]]} for i in range(job["num_inner_steps"])]
        return {"steps_completed": len(steps), "metrics": self.train_window(state, steps)}

    def evaluate(self, state, split):
        return {"norm": float(state["model"].weight.norm())}

    def load_model_artifact_path(self, state, path):
        state["model"].load_state_dict(load_file(path))

    def materialize_model_artifact_path(self, state, path):
        save_file(state["model"].state_dict(), path)

    def apply_single_root_ema(self, base, merged, policy):
        return merged

    def reconcile_canonical_model(self, local, canonical, strategy):
        return canonical
