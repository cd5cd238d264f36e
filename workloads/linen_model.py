"""A model of flax.linen, with JAX in the worker: `factory = "linen_model:Linen"`.

It is the contract without a base class: three functions over dicts of NumPy arrays. Rows are
arrays, `x` float32 [N, 12, 12] and `y` int64 [N]; torch_classifier.py makes such data.
"""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict


class Classifier(nn.Module):
    """Two layers."""

    hidden: int

    @nn.compact
    def __call__(self, x):
        """Logits [N, 10] of pictures."""
        flat = x.reshape(len(x), -1)
        return nn.Dense(10)(nn.relu(nn.Dense(self.hidden)(flat)))


class Linen:
    """The module with its loss. In its config: `hidden`."""

    def __init__(self, config):
        self.module = Classifier(config["hidden"])
        self.rows = jax.jit(self.row_losses)
        self.value_and_grad = jax.jit(jax.value_and_grad(lambda *a: self.row_losses(*a).mean()))

    def row_losses(self, params, rows):
        """The cross-entropy of each row."""
        logits = self.module.apply({"params": unflatten_dict(params, sep=".")}, rows["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows["y"])

    def init(self, seed):
        """The parameters as they begin."""
        made = self.module.init(jax.random.key(seed), np.zeros((1, 12, 12), np.float32))
        return jax.tree.map(np.asarray, flatten_dict(made["params"], sep="."))

    def gradient(self, params, rows):
        """The mean loss over some rows, and its gradient."""
        loss, gradients = self.value_and_grad(params, rows)
        return float(loss), jax.tree.map(np.asarray, gradients)

    def measure(self, params, rows):
        """The loss of each row."""
        return np.asarray(self.rows(params, rows))
