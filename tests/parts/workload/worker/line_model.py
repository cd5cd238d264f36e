"""The contract without a framework: a straight line through [N, 3]."""

import numpy as np


class Line:
    """Squared errors; told so by its config, it measures with noise."""

    def __init__(self, config):
        self.config = config

    def init(self, seed):
        draw = np.random.default_rng(seed)
        return {
            "w": draw.standard_normal(3, np.float32),
            "b": np.zeros((), np.float64),
            "kept": np.ones(2, np.float32),
            "order": np.arange(3),
        }

    def _errors(self, params, rows):
        w, b, order = params["w"], params["b"], params["order"]
        return rows["x"][:, order] @ w * params["kept"][0] + b - rows["y"]

    def gradient(self, params, rows):
        error = self._errors(params, rows)
        grads = {"w": 2 * error @ rows["x"] / len(error), "b": 2 * error.mean()}
        return (error**2).mean(), grads

    def measure(self, params, rows):
        return self._errors(params, rows) ** 2 + self._noise(len(rows["y"]))

    def _noise(self, count):
        return np.random.standard_normal(count) if self.config.get("noise") else 0

    def evaluate(self, params, split):
        if self.config.get("noise"):
            return {"noise": self._noise(1)[0]}
        return {"split": split, "bias": params["b"], "nothing": float("nan"), "fine": True}

    def save(self, params, folder):
        np.savez(f"{folder}/saved.npz", **params)
