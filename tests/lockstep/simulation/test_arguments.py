"""The arguments of `simulate`: defaults that are whole tables, and one line for what is wrong."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep
from lockstep.errors import LockstepError
from lockstep.methods import CARDS
from lockstep.optim.dense import sgd
from lockstep.simulation.arguments import read_arguments
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
    asked = read_arguments(given, (), torch=False)
    rows = asked.round_settings(name).coordinator.batch_size(0)
    assert rows == 2 * 3 * asked.optimizer.steps_of_a_round


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        (jax.enable_x64(True), "x64 is True, expected False"),
        (jax.numpy_dtype_promotion("strict"), "promotion is strict, expected standard"),
        (jax.numpy_rank_promotion("raise"), "promotion is raise, expected allow"),
    ],
)
def test_a_users_own_settings_of_jax_are_refused_where_they_change_what_is_computed(setting, found):
    with setting, pytest.raises(LockstepError, match=f"simulate: jax.config.jax_.*{found}"):
        short(optimizer="sgd")


WRONG = [
    ({"peers": 0}, "peers is 0, expected an integer from 1"),
    ({"peers": 300}, "peers is 300, expected a number less than or equal to 256"),
    ({"steps": True}, "steps is True, expected an integer from 1"),
    ({"steps": 10**12}, r"steps is 1000000000000, expected a Python integer from 1, below"),
    ({"batch_size": 2**31}, "batch_size is 2147483648: 4,294,967,296 examples in a round"),
    ({"max_round_train_time": 2**64}, "max_round_train_time is 18446744073709551616, expected"),
    ({"batch_size": np.int64(2)}, r"batch_size is np.int64\(2\), expected a Python integer"),
    ({"eval_every": 2.5}, "eval_every is 2.5, expected an integer from 1"),
    ({"verification_percent": True}, "verification_percent is True, expected a Python integer"),
    ({"peers": None}, "peers is None, expected an integer from 1"),
    ({"learning_rate": True}, "learning_rate.Constant.base_lr is true, expected a number"),
    ({"learning_rate": {3: {}}}, "learning_rate is a table with 3, expected exactly one of Const"),
    ({"data": jnp.float32(2)}, "train_data is ArrayImpl, expected arrays with a leading axis"),
    ({"shuffle": "no"}, "shuffle is 'no', expected True or False"),
    ({"show_progress": 0}, "show_progress is 0, expected True or False"),
    ({"on_round": 3}, "on_round is 3, expected a function of a round's numbers, or None"),
    ({"log_dir": True}, "log_dir is True, expected a path or None"),
    ({"log_dir": 5e-324}, "log_dir is 5e-324, expected a path or None"),
    ({"checkpoint_dir": ""}, "checkpoint_dir is '', expected a path or None"),
    ({"log_dir": __file__}, "log_dir is '.*', expected a folder to write to: File exists"),
    ({"checkpoint_dir": f"{__file__}/x"}, "checkpoint_dir is '.*', expected a folder .*: Not a"),
    ({"log_dir": "/proc/self/x"}, "log_dir is '/proc/self/x', expected a folder .*: No such"),
    ({"log_dir": "a\0b"}, "log_dir is .*, expected a folder to write to: embedded null"),
    ({"optimizer": "adam"}, "optimizer is 'adam', expected one of ada_.*mean adamw"),
    ({"optimizer": "dilco"}, "optimizer is 'dilco'.*streaming_diloco, .*did you mean diloco?"),
    ({"optimizer": {"DiLoCo": {"inner_steps": 0}}}, "optimizer.DiLoCo.inner_steps is 0, expected"),
    ({"optimizer": {"DiLoCo": {"steps": 1}}}, "optimizer.DiLoCo.steps: unknown key, expected one"),
    ({"optimizer": "muon"}, r"stacked is \(\), expected the names of params whose arrays are"),
    ({"stacked": None}, "stacked is None, expected a tuple of names"),
    ({"stacked": "w"}, "stacked is 'w', expected a tuple of names"),
    ({"stacked": ("w",)}, r"stacked is \('w',\), expected none with SGD, which takes"),
    ({"stacked": ("w",), "optimizer": "fedavg"}, r"stacked is \('w',\), expected none with AdamW"),
    ({"stacked": ("w",), "optimizer": sgd(1)}, r"stacked is \('w',\), expected none with an Optim"),
    ({"stacked": ("z",)}, "stacked has 'z', expected some of b, w"),
    ({"learning_rate": -1.0}, "learning_rate.Constant.base_lr is -1.0, expected a number greater"),
    ({"learning_rate": 1e30}, "loss is (inf|nan) at round [23], expected a finite number; try a"),
    (
        {"loss_fn": lambda p, b, r: squares(p, b, r) + jnp.sqrt(jnp.sum(p["b"] * 0))},
        "no peer's message is finite at round 1: gradients are infinite or NaN though the loss is",
    ),
    ({"links": {"upload": 3}}, "links.upload: unknown key, expected one of upload_mbps, "),
    ({"faults": [{"kind": "noise", "peer": 7, "rounds": [1, 1]}]}, r"faults\[0\].peer is 7, exp"),
    (
        {"faults": [{"kind": "scale_up", "peer": 1, "rounds": [1, 1]}], "optimizer": DISTRO},
        r'faults\[0\].kind is "scale_up", expected a kind for signs',
    ),
    ({"dtype": "float16"}, "dtype is 'float16', expected 'float32' or 'bfloat16'"),
    ({"micro_batch": 8}, r"micro_batch is 8, expected at most batch_size \(4\)"),
    ({"seed": -1}, "seed is -1, expected a Python integer from 0"),
    ({"params": {}}, "params is an empty tree, expected arrays"),
    ({"params": {"w": np.zeros(3, int)}}, "params w is int64, expected an array of floating-po"),
    (
        {"params": {"w": np.zeros((0, 4), np.float32)}, "optimizer": DISTRO},
        r"params w has the shape \(0, 4\), expected elements in it",
    ),
    ({"data": {"x": X, "y": Y[:3]}}, r"train_data has arrays of shapes \(24, 3\), \(3,\), exp"),
    ({"data": 3}, "train_data is int, expected arrays with a leading axis"),
    ({"data": []}, "train_data has no examples, expected at least one"),
    ({"data": [X[:2], X[0]]}, "train_data has items of different shapes, expected equal ones"),
    ({"data": lambda peer: 3}, "train_data is a function that cannot be called so: too many"),
    ({"data": ["a", "b"]}, "train_data has items of <U1, expected arrays of numbers"),
    ({"eval_data": lambda peer: 3}, "eval_data is a function that cannot be called so: too"),
    ({"eval_data": 3}, "eval_data is int, expected arrays"),
    ({"loss_fn": 3}, r"loss_fn is int, expected a function: loss_fn\(params, batch, rng\)"),
    ({"loss_fn": lambda p, b: 0}, "loss_fn is a function that cannot be called so: too many"),
    ({"loss_fn": lambda p, b, r: p["w"]}, r"loss_fn returns float32\[3\], expected a loss: one"),
    ({"loss_fn": lambda p, b, r: None}, "loss_fn returns nothing, expected a loss: one floating"),
    ({"loss_fn": lambda p, b, r: {"loss": p["b"]}}, "loss_fn returns dict, expected a loss: one"),
    ({"loss_fn": lambda p, b, r: 0.5}, "loss_fn returns the constant 0.5, expected a loss: one fl"),
    (
        {"loss_fn": lambda p, b, r: (p["b"], {})},
        r"loss_fn returns a tuple \(float32\[\], dict\), expected the loss alone, without aux: one",
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_is_wrong_is_said_in_one_line(changes, message):
    given = {"loss_fn": squares, "params": PARAMS, "data": DATA} | changes
    data = [given.pop(name) for name in ("loss_fn", "params", "data")]
    arguments = {"optimizer": "sgd", "peers": 2, "steps": 3, "batch_size": 4} | given
    with pytest.raises(LockstepError, match=f"^simulate: {message}") as refused:
        simulate(*data, **arguments)
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_is_said_before_anything_is_compiled(monkeypatch):
    took = lambda *_, **__: pytest.fail("took rounds")  # noqa: E731
    monkeypatch.setattr("lockstep.simulation.simulate.take_rounds", took)
    with pytest.raises(LockstepError, match="log_dir is .*, expected a folder to write to"):
        short(optimizer="sgd", log_dir=__file__)


@pytest.mark.parametrize("name", CARDS)
def test_the_names_that_an_error_lists_are_names_of_the_library(name):
    assert name.replace("-", "_") in lockstep.__all__
