"""A workload without a framework, whose values are drawn and counted; and some that fail."""

import random
import time

import numpy as np


class Plain:
    workload_name = "a plain one"

    def __init__(self, config):
        self.config = config

    def runtime_device(self):
        return "cpu"

    def capability_probe(self):
        return {
            "preferred_backends": ["cpu"],
            "work_units_per_second": 2.0,
            "target_window_seconds": 3,
        }

    def init_model(self, device):
        return {
            "w": np.random.standard_normal((2, 3)).astype(np.float32),
            "b": np.zeros(2, np.float16),
            "steps": np.zeros(1, np.int64),
        }

    def train_window(self, state, batches):
        state["w"] = state["w"] + len(batches)
        return {"loss": np.float32(0.5), "worst": float("inf"), "ok": True, "note": "x"}

    def evaluate(self, state, split):
        return {"bad": [1]} if split == "bad" else {split: float(state["w"].sum())}

    def load_model_artifact(self, state, data):
        state["w"] = np.frombuffer(data, np.float32).reshape(2, 3)

    def materialize_model_artifact(self, state):
        return state["w"].tobytes()

    def run_inner_loop(self, state, job):
        draw = random.random() + float(np.random.random())
        with open(f"{job['output_parameter_pack_path']}.state", "wb") as file:
            file.write(b"state")
        state = {**state, "w": state["w"] + job["num_inner_steps"]}
        return {
            "state": state,
            "steps_completed": job["num_inner_steps"],
            "metrics": {"draw": draw},
            "inner_optimizer_state_path": file.name,
            "inner_optimizer_state_encoding": "mine",
        }


def broken(config):
    raise RuntimeError("two\nlines")


class Hanging(Plain):
    def train_window(self, state, batches):
        while True:
            time.sleep(1)
