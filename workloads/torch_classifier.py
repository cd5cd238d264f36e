"""A small classifier of pictures, in torch: `factory = "torch_classifier:Classifier"`.

Rows are arrays: `x` float32 [N, 12, 12] and `y` int64 [N]. Without data of its own a run takes
those below, which are the same on every machine.
"""

import numpy as np
import torch
import torch.nn.functional as F
from lockstep_worker import TorchWorkload

SIDE, CLASSES = 12, 10


class Classifier(TorchWorkload):
    """A convolution, a hidden layer and as many logits as there are classes.

    In its config: `hidden`, the size of the hidden layer; and `norm = "batch"` for a batch norm.
    """

    def model(self):
        """A new model."""
        batch = self.config.get("norm") == "batch"
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8) if batch else torch.nn.GroupNorm(2, 8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * (SIDE // 2) ** 2, self.config["hidden"]),
            torch.nn.ReLU(),
            torch.nn.Linear(self.config["hidden"], CLASSES),
        )

    def loss(self, model, rows):
        """The mean cross-entropy."""
        return F.cross_entropy(model(rows["x"][:, None]), rows["y"])

    def row_losses(self, model, rows):
        """The cross-entropy of each row."""
        return F.cross_entropy(model(rows["x"][:, None]), rows["y"], reduction="none")

    def dataset(self, split):
        """Noisy pictures of ten patterns, 2,048 to train on and 512 to measure with."""
        patterns = np.random.default_rng(0).standard_normal((CLASSES, SIDE, SIDE))
        draw = np.random.default_rng({"train": 1, "held_out": 2}[split])
        y = draw.integers(0, CLASSES, {"train": 2048, "held_out": 512}[split])
        x = patterns[y] + 2 * draw.standard_normal((len(y), SIDE, SIDE))
        return {"x": x.astype(np.float32), "y": y.astype(np.int64)}
