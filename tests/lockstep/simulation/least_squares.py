"""Least squares by `simulate`: a plane through 24 points, and how two results compare."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import lockstep

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype(np.float32)
Y = (X @ np.array([1.0, -2.0, 0.5]) + 0.3).astype(np.float32)
DATA = {"x": X, "y": Y}
PARAMS = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
SGD = {"SGD": {"momentum": 0.0, "nesterov": False}}
DILOCO = {"DiLoCo": {"inner_steps": 2, "inner": SGD, "outer_momentum": 0.9}}
FEDAVG = {"FedAvg": {"inner_steps": 2, "inner": SGD}}
SPARTA = {"SPARTA": {"inner_steps": 2, "share": 0.3, "inner": SGD}}
DISTRO = {"Distro": {"compression_topk": 2, "compression_chunk": 4}}


def squares(params, batch, rng):
    del rng
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


simulate = partial(lockstep.simulate, show_progress=False)
short = partial(simulate, squares, PARAMS, DATA, peers=2, steps=4, batch_size=4, learning_rate=0.1)


def same(one, other) -> bool:
    """Whether two results are equal to the bit, apart from the time that they took here."""
    bits = [
        jax.tree.map(lambda x: x.tobytes(), (result.params, result.local_params))
        for result in (one, other)
    ]
    rows = [
        [{name: x for name, x in row.items() if name != "seconds"} for row in result.curves.train]
        for result in (one, other)
    ]
    return (
        bits[0] == bits[1]
        and rows[0] == rows[1]
        and (one.curves.validation == other.curves.validation)
    )


def found(result) -> np.ndarray:
    return np.array([*result.params["w"], result.params["b"]])
