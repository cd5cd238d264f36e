"""What builders refuse: each parameter of every one, by its annotation: none is forgotten."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pkgutil import walk_packages

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lockstep.optim
from lockstep.optim.aggregation import AggregateFn
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum
from lockstep.optim.dense import adamw, sgd
from lockstep.optim.local.local_steps import fedavg
from lockstep.optim.local.sparta import sparta
from lockstep.optim.optimizer import Optimizer
from lockstep.optim.quantize import Integers, Quantizer
from lockstep.optim.transform import Exchange, alone

SGD = sgd(0.1)
COMPRESSOR = Compressor(4, 8, True)
MOMENTUM = CompressedMomentum(0.1, COMPRESSOR, 0.9)
BITS = {"bits": 8, "block": 4}
ADAM = {"learning_rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LOCAL = {"inner": SGD, "inner_steps": 4}
STREAMING = LOCAL | {"outer": SGD, "fragments": 2, "delay": 1}
PLACES = LOCAL | {"share": 0.5, "seed": 0}

GIVEN = {  # builder: what it takes
    "CompressedMomentum": {
        "learning_rate": 0.1, "compressor": COMPRESSOR, "compression_decay": 0.9,
    },
    "Compressor": {"topk": 4, "chunk": 8, "quantize_1bit": True},
    "Half": {"dtype": jnp.bfloat16},
    "Integers": BITS,
    "Levels": BITS | {"bits": 2},
    "QSGD": BITS,
    "adam": {"betas": (0.9, 0.99), "eps": 1e-8},
    "adamw": ADAM,
    "as_transform": {"optimizer": SGD, "exchange": alone},
    "balanced": {"optimizer": SGD, "paths": ("b",), "speed": 0.1},
    "cgad": {
        "learning_rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "alpha": 0.3, "cutoff": 4.0,
    },
    "decoupled_diloco": STREAMING | {"adopt": "carry"},
    "delayed_nesterov": {"learning_rate": 0.1, "momentum": 0.9, "every": 3},
    "demo": {
        "learning_rate": 0.1, "compression_decay": 0.9, "compression_topk": 4,
        "compression_chunk": 8, "weight_decay": 0.1, "exchange": alone,
    },
    "dense": {"learning_rate": 0.1, "direction": optax.identity()},
    "diloco": LOCAL | {"outer": SGD},
    "distro": {"momentum": MOMENTUM},
    "fedavg": LOCAL,
    "from_optax": {"optimizer": optax.sgd(0.1)},
    "heloco": {
        "learning_rate": 0.1, "momentum": 0.9,
        "keep": 0.4, "shrink": 1.0, "shrink_most": 0.9, "turn": 0.5, "trust": 1.0,
    },
    "leave": {"optimizer": SGD, "paths": ("b",)},
    "inside": {"optimizer": SGD},
    "local_steps": LOCAL | {"outer": SGD},
    "muon": ADAM | {"momentum": 0.9, "step_scale": {}},
    "outer_sgd": {"learning_rate": 0.7, "momentum": 0.9},
    "quantized": {"optimizer": SGD, "quantizer": Integers(8, 4)},
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "sparseloco": LOCAL | {
        "outer_learning_rate": 1.0, "error_feedback": 0.9, "topk": 4, "chunk": 8,
    },
    "sparta": PLACES,
    "sparta_diloco": {"sparse": sparta(**PLACES), "outer": SGD, "outer_every": 3},
    "streaming_diloco": STREAMING | {"mixing": 0.5},
}  # fmt: skip

INTEGERS = (2.5, 2.0, True, "3", None, -1)
NUMBERS = (-0.1, math.nan, math.inf, "0.1", True, np.zeros(2), jnp.float32(-1))
OTHERS = (3, "b", None)
WRONG = {  # annotation: what is none
    int: INTEGERS,
    float: (*NUMBERS, None),
    float | None: NUMBERS,
    optax.ScalarOrSchedule: (*NUMBERS, None),
    bool: ("no", 1, 0.0, None),
    str: (3, "other", None, []),
    tuple[float, float]: (0.9, (0.9,), (0.9, 1.0), (0.9, "b"), (0.9, -0.1), None),
    tuple[str, ...]: ("layers", 3, (3,), None),
    Collection[str]: ("layers", 3, (3,), None),
    Mapping[str, float]: ({"a": -1.0}, {"a": "b"}, {"a": math.nan}, ("a",), 3, None),
    jax.typing.DTypeLike: (*OTHERS, "int8", "float64"),
    Optimizer: (*OTHERS, optax.sgd(0.1)),
    Exchange: OTHERS,
    AggregateFn: OTHERS,
    optax.GradientTransformation: (*OTHERS, SGD),
    Quantizer: (*OTHERS, Integers),
    Compressor: (*OTHERS, Compressor),
    CompressedMomentum: (*OTHERS, CompressedMomentum),
}


def builders() -> dict[str, Callable]:
    """All that `lockstep.optim` makes optimizers or parts of them with, by name."""
    found = {}
    made = (Optimizer, optax.GradientTransformation)
    for module in walk_packages(lockstep.optim.__path__, "lockstep.optim."):
        for name, thing in vars(import_module(module.name)).items():
            if getattr(thing, "__module__", None) != module.name or name.startswith("_"):
                continue
            returns = inspect.isfunction(thing) and thing.__annotations__.get("return") in made
            if returns or dataclasses.is_dataclass(thing):
                found[name] = thing
    return found


BUILDERS = builders()
PARAMETERS = [
    (name, parameter)
    for name, builder in BUILDERS.items()
    for parameter in inspect.signature(builder).parameters
]


def test_every_builder_is_tested():
    assert BUILDERS.keys() == GIVEN.keys()


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_builder_should_take_is_taken(name):
    BUILDERS[name](**GIVEN[name])


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
def test_a_setting_of_a_wrong_type_or_size_is_named(name, parameter):
    for wrong in WRONG[inspect.signature(BUILDERS[name]).parameters[parameter].annotation]:
        with pytest.raises(ValueError, match=rf"^{parameter}(\[.*\])? is .*, expected ") as refused:
            BUILDERS[name](**GIVEN[name] | {parameter: wrong})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("adamw", {"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0"),
        ("distro", {"overlap": 3}, "overlap is 3, expected 0, 1 or 2"),
        ("sgd", {"momentum": 0.0, "nesterov": True}, "nesterov is True, expected false without"),
        ("streaming_diloco", {"inner_steps": 5}, "inner_steps is 5, expected a multiple of 2"),
        ("streaming_diloco", {"delay": 2}, "delay is 2, expected an integer from 0, below 2"),
        ("decoupled_diloco", {"adopt": "keep"}, "adopt is 'keep', expected one of overwrite, ble"),
        ("fedavg", {"inner": sparta(**PLACES)}, "inner takes gradients elsewhere than at the "),
        ("heloco", {"keep": 2.0}, "keep is 2.0, expected a number from 0 to 1"),
        ("Levels", {"bits": 3}, "bits is 3, expected 1 or 2"),
    ],
)
def test_a_setting_beyond_its_bounds_or_beside_another_is_named(name, changes, message):
    with pytest.raises(ValueError, match=message):
        BUILDERS[name](**GIVEN[name] | changes)


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.float64(0.5), jnp.bfloat16(0.5)])
def test_numbers_of_python_numpy_and_jax_are_numbers(number):
    adamw(number, betas=(number, number), eps=number, weight_decay=number, clip_grad_norm=number)
    fedavg(SGD, inner_steps=np.int64(3))
