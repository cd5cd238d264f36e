"""The arguments of `simulate`: defaults that are whole tables, and one line for what is wrong."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep
from lockstep.methods import CARDS
from lockstep.optim.dense import sgd
from lockstep.simulation.arguments import read_arguments
from tests.errors import refused
from tests.lockstep.simulation.least_squares import (
    DATA,
    DISTRO,
    PARAMS,
    X,
    Y,
    short,
    simulate,
    squares,
)

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.mark.parametrize("name", [*CARDS, "streaming_diloco"])
def test_every_name_is_a_whole_table(name):
    given = inspect.signature(lockstep.simulate).parameters
    given = {key: argument.default for key, argument in given.items()}
    given |= {"optimizer": name, "peers": 2, "steps": 2, "batch_size": 3}
    given["stacked"] = ("w",) if name == "muon" else ()
    asked = read_arguments(given, ("w",), torch=False)
    rows = asked.round_settings(name).coordinator.batch_size(0)
    assert rows == 2 * 3 * asked.optimizer.steps_of_a_round


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (jax.enable_x64(True), "jax_enable_x64 is True"),
        (jax.numpy_dtype_promotion("strict"), "jax_numpy_dtype_promotion is strict"),
        (jax.numpy_rank_promotion("raise"), "jax_numpy_rank_promotion is raise"),
    ],
)
def test_a_users_own_settings_of_jax_are_refused_where_they_change_what_is_computed(setting, found):
    with setting, refused("simulate", f"jax.config.{found}"):
        short(optimizer="sgd")


NO_MESSAGE = {"loss_fn": lambda p, b, r: squares(p, b, r) + jnp.sqrt(jnp.sum(p["b"] * 0))}
NO_VALUES = [{"kind": "scale_up", "peer": 1, "rounds": [1, 1]}]
NO_COLUMN = {"w": np.zeros((0, 4), np.float32)}

NAN_AT_ONCE = {"loss_fn": lambda p, b, r: squares(p, b, r) + jnp.log(p["b"] - 1)}
NAN_LATER = {"loss_fn": lambda p, b, r: squares(p, b, r) + 0 * jnp.log(1 - jnp.abs(p["w"]).max())}
NAN_LATER |= {"learning_rate": 10.0}
RANDOM = optax.chain(optax.add_noise(0.1, 0.1, jax.random.key(0)), optax.sgd(0.1))
WRONG = [  # what is changed; the argument that is named, and what else is
    ({"peers": 0}, "peers", 0),
    ({"peers": 300}, "peers", 300, 256),
    ({"steps": 10**12}, "steps", 10**12, 2**32),
    ({"batch_size": 2**31}, "batch_size", 2**31, "4,294,967,296"),
    ({"batch_size": np.int64(2)}, "batch_size", "np.int64(2)"),
    ({"eval_every": 2.5}, "eval_every", 2.5),
    ({"peers": None}, "peers", "null"),
    ({"learning_rate": True}, "learning_rate.Constant.base_lr", True),
    ({"learning_rate": {3: {}}}, "learning_rate", 3, "Constant"),
    ({"data": jnp.float32(2)}, "train_data", "ArrayImpl"),
    ({"shuffle": "no"}, "shuffle", '"no"'),
    ({"log_dir": True}, "log_dir", "True"),
    ({"log_dir": 5e-324}, "log_dir", 5e-324),
    ({"checkpoint_dir": ""}, "checkpoint_dir", "''"),
    ({"checkpoint_dir": f"{__file__}/x"}, "checkpoint_dir", f"{__file__}/x", "Not a directory"),
    ({"log_dir": "/proc/self/x"}, "log_dir", "/proc/self/x", "No such file"),
    ({"log_dir": "a\0b"}, "log_dir", "embedded null"),
    ({"optimizer": "adam"}, "optimizer", "'adam'", "adamw"),
    ({"optimizer": "dilco"}, "optimizer", "'dilco'", "streaming_diloco", "did you mean diloco?"),
    ({"optimizer": {"DiLoCo": {"steps": 1}}}, "optimizer.DiLoCo.steps", "inner_steps"),
    ({"optimizer": "muon"}, "stacked", "[]", "b, w"),
    ({"stacked": None}, "stacked", "null"),
    ({"stacked": ("w",)}, "stacked", '["w"]', "SGD"),
    ({"stacked": ("w",), "optimizer": "fedavg"}, "stacked", '["w"]', "AdamW"),
    ({"stacked": ("w",), "optimizer": sgd(1)}, "stacked", '["w"]', "Optimizer"),
    ({"stacked": ("z",)}, "stacked", '["z"]', "b, w"),
    ({"learning_rate": -1.0}, "learning_rate.Constant.base_lr", -1.0),
    ({"learning_rate": 1e30}, "loss or gradients are", "round", "learning_rate"),
    (NO_MESSAGE, "no peer's message is finite at round 1"),
    (NO_MESSAGE | {"optimizer": DISTRO}, "loss or gradients are nan at round 1"),
    (NAN_AT_ONCE, "loss or gradients are nan at round 1", "no step was taken before", "loss_fn"),
    ({"data": {"x": X, "y": Y * np.nan}}, "train_data holds nan"),
    ({"params": PARAMS | {"b": np.float32(np.nan)}}, "nan at round 1", "params holds nan"),
    (NAN_LATER, "nan at round 2", "the loss of round 1 was", "learning_rate"),
    ({"optimizer": optax.scale_by_adam()}, "optimizer", "goes up", "optax.adam(1e-3)"),
    ({"optimizer": optax.lbfgs()}, "optimizer takes no step", "value_fn"),
    ({"optimizer": RANDOM}, "optimizer has a state of random keys"),
    ({"optimizer": optax.adam(1), "learning_rate": 1}, "learning_rate", "None with an Optimizer"),
    ({"links": {"upload": 3}}, "links.upload", "upload_mbps"),
    ({"faults": [{"kind": "noise", "peer": 7, "rounds": [1, 1]}]}, "faults[0].peer", 7),
    ({"faults": NO_VALUES, "optimizer": DISTRO}, "faults[0].kind", "scale_up", "signs"),
    ({"dtype": "float16"}, "dtype", "float16", "bfloat16"),
    ({"micro_batch": 8}, "micro_batch", 8, "batch_size (4)"),
    ({"params": {}}, "params is an empty tree"),
    ({"params": {"w": np.zeros(3, int)}}, "params w", "int64"),
    ({"params": NO_COLUMN, "optimizer": DISTRO}, "params w", "(0, 4)"),
    ({"data": {"x": X, "y": Y[:3]}}, "train_data", "(24, 3), (3,)"),
    ({"data": {"x": X, "y": np.full(24, 2**40 + 3)}}, "1099511627779", "int32"),
    ({"data": {"x": X, "y": np.full(24, -1e300)}}, "-1e+300", "float32"),
    ({"data": []}, "train_data", "no examples"),
    ({"data": [X[:2], X[0]]}, "train_data", "equal shapes"),
    ({"data": lambda peer: 3}, "train_data", "factory(peer, num_peers, split)"),
    ({"data": ["a", "b"]}, "train_data", "<U1"),
    ({"eval_data": lambda peer: 3}, "eval_data", "factory(peer, num_peers, split)"),
    ({"eval_data": 3}, "eval_data", "int"),
    ({"loss_fn": 3}, "loss_fn", "int", "loss_fn(params, batch, rng)"),
    ({"loss_fn": lambda p, b: 0}, "loss_fn", "loss_fn(params, batch, rng)"),
    ({"loss_fn": lambda p, b, r: p["w"]}, "loss_fn", "float32[3]"),
    ({"loss_fn": lambda p, b, r: None}, "loss_fn", "nothing"),
    ({"loss_fn": lambda p, b, r: {"loss": p["b"]}}, "loss_fn", "dict"),
    ({"loss_fn": lambda p, b, r: 0.5}, "loss_fn", "the constant 0.5"),
    ({"loss_fn": lambda p, b, r: (p["b"], p["w"][0] > 0)}, "loss_fn", "count", "without aux"),
    ({"loss_fn": lambda p, b, r: (p["b"], {})}, "loss_fn", "(float32[], dict)", "without aux"),
]


@pytest.mark.parametrize("row", WRONG, ids=lambda row: "-".join(map(str, row[1:]))[:40])
def test_a_wrong_argument_is_named_in_one_line(row):
    changes, *named = row
    given = {"loss_fn": squares, "params": PARAMS, "data": DATA} | changes
    data = [given.pop(name) for name in ("loss_fn", "params", "data")]
    arguments = {"optimizer": "sgd", "peers": 2, "steps": 3, "batch_size": 4} | given
    with refused("simulate", *named):
        simulate(*data, **arguments)


def test_a_folder_that_cannot_be_is_said_before_anything_is_compiled(monkeypatch):
    took = lambda *_, **__: pytest.fail("took rounds")  # noqa: E731
    monkeypatch.setattr("lockstep.simulation.simulate.take_rounds", took)
    with refused("log_dir", __file__, "File exists"):
        short(optimizer="sgd", log_dir=__file__)


@pytest.mark.parametrize("name", CARDS)
def test_the_names_that_an_error_lists_are_names_of_the_library(name):
    assert name.replace("-", "_") in lockstep.__all__
