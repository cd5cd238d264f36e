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
from lockstep.optim.balance import balanced, leave
from lockstep.optim.compressed.ada_distro import ada_distro, normalized
from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, demo, distro, distro_overlapped
from lockstep.optim.dense import adam, adamw, dense, muon, sgd
from lockstep.optim.directions import StepDirection
from lockstep.optim.local.local_steps import diloco, fedavg, local_steps, outer_sgd
from lockstep.optim.local.outer_steps import cgad, delayed_nesterov, heloco
from lockstep.optim.local.sparseloco import sparseloco
from lockstep.optim.local.sparta import sparta, sparta_diloco
from lockstep.optim.local.streaming import decoupled_diloco, streaming_diloco
from lockstep.optim.optimizer import Optimizer, inside
from lockstep.optim.quantize import QSGD, Half, Integers, Levels, Quantizer, quantized
from lockstep.optim.schedules import (
    LearningRate,
    cold_start,
    constant,
    cosine,
    linear,
    warmup_stable_decay,
)
from lockstep.optim.transform import Exchange, alone, as_transform

SGD = sgd(0.1)
COMPRESSOR = Compressor(4, 8, True)
MOMENTUM = CompressedMomentum(0.1, COMPRESSOR, 0.9)
ADAM = {"learning_rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
LOCAL = {"inner": SGD, "inner_steps": 4}
RISE = {"base_lr": 0.1, "warmup_init_lr": 0.0, "warmup_steps": 2}
FALL = RISE | {"total_steps": 9, "final_lr": 0.01}
PLACES = LOCAL | {"share": 0.5, "seed": 0}

GIVEN = {  # builder: what it takes
    CompressedMomentum: {
        "learning_rate": 0.1, "compressor": COMPRESSOR, "compression_decay": 0.9,
    },
    Compressor: {"topk": 4, "chunk": 8, "quantize_1bit": True},
    Half: {"dtype": jnp.bfloat16},
    Integers: {"bits": 8, "block": 4},
    Levels: {"bits": 2, "block": 4},
    QSGD: {"bits": 8, "block": 4},
    StepDirection: {},
    ada_distro: {"momentum": MOMENTUM, "second_moment_decay": 0.95},
    adam: {"betas": (0.9, 0.99), "eps": 1e-8},
    adamw: ADAM,
    as_transform: {"optimizer": SGD, "exchange": alone},
    balanced: {"optimizer": SGD, "paths": ("b",), "speed": 0.1},
    cgad: {"learning_rate": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "alpha": 0.3, "cutoff": 4.0},
    cold_start: {"learning_rate": constant(0.1, 0.0, 2), "start_step": 1,
                 "cold_start_warmup_steps": 2},
    constant: RISE,
    cosine: FALL,
    decoupled_diloco: LOCAL | {"outer": SGD, "fragments": 2, "delay": 1, "adopt": "carry"},
    delayed_nesterov: {"learning_rate": 0.1, "momentum": 0.9, "every": 3},
    demo: {
        "learning_rate": 0.1, "compression_decay": 0.9, "compression_topk": 4,
        "compression_chunk": 8, "weight_decay": 0.1, "exchange": alone,
    },
    dense: {"learning_rate": 0.1, "direction": optax.identity()},
    diloco: LOCAL | {"outer": SGD},
    distro: {"momentum": MOMENTUM},
    distro_overlapped: {"momentum": MOMENTUM, "overlap": 1},
    fedavg: LOCAL,
    heloco: {
        "learning_rate": 0.1, "momentum": 0.9,
        "keep": 0.4, "shrink": 1.0, "shrink_most": 0.9, "turn": 0.5, "trust": 1.0,
    },
    leave: {"optimizer": SGD, "paths": ("b",)},
    linear: FALL,
    inside: {"optimizer": SGD},
    local_steps: LOCAL | {"outer": SGD},
    muon: ADAM | {"momentum": 0.9, "step_scale": {}},
    normalized: {"optimizer": SGD, "decay": 0.9},
    outer_sgd: {"learning_rate": 0.7, "momentum": 0.9},
    quantized: {"optimizer": SGD, "quantizer": Integers(8, 4)},
    sgd: {"learning_rate": 0.1, "momentum": 0.9},
    sparseloco: LOCAL | {"outer_learning_rate": 1.0, "error_feedback": 0.9, "topk": 4, "chunk": 8},
    sparta: PLACES,
    sparta_diloco: {"sparse": sparta(**PLACES), "outer": SGD, "outer_every": 3},
    streaming_diloco: LOCAL | {"outer": SGD, "fragments": 2, "delay": 1, "mixing": 0.5},
    warmup_stable_decay: RISE | {
        "stable_steps": 3, "cosine_decay_steps": 2, "cosine_decay_final_lr": 0.05,
        "linear_decay_steps": 2, "linear_decay_final_lr": 0.01,
    },
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
    Mapping[str, int]: ({"a": 0}, {"a": 2.5}, {"a": True}, ("a",), 3, None),
    jax.typing.DTypeLike: (*OTHERS, "int8", "float64"),
    Optimizer: (*OTHERS, optax.sgd(0.1)),
    Exchange: OTHERS,
    AggregateFn: OTHERS,
    LearningRate: OTHERS,
    optax.GradientTransformation: (*OTHERS, SGD),
    Quantizer: (*OTHERS, Integers),
    Compressor: (*OTHERS, Compressor),
    CompressedMomentum: (*OTHERS, CompressedMomentum),
    StepDirection: (*OTHERS, "sign", StepDirection),
}


def builders() -> set[Callable]:
    """All that `lockstep.optim` makes optimizers, schedules or parts of them with."""
    found = set()
    made = (Optimizer, optax.GradientTransformation, LearningRate)
    for module in walk_packages(lockstep.optim.__path__, "lockstep.optim."):
        for name, thing in vars(import_module(module.name)).items():
            if getattr(thing, "__module__", None) != module.name or name.startswith("_"):
                continue
            returns = inspect.isfunction(thing) and thing.__annotations__.get("return") in made
            if returns or dataclasses.is_dataclass(thing):
                found.add(thing)
    return found


PARAMETERS = [
    (builder, name) for builder in GIVEN for name in inspect.signature(builder).parameters
]


def test_every_builder_is_tested():
    assert builders() == GIVEN.keys()


@pytest.mark.parametrize("builder", GIVEN, ids=lambda builder: builder.__name__)
def test_what_a_builder_should_take_is_taken(builder):
    builder(**GIVEN[builder])


@pytest.mark.parametrize(
    ("builder", "name"), PARAMETERS, ids=[f"{b.__name__}-{name}" for b, name in PARAMETERS]
)
def test_a_setting_of_a_wrong_type_or_size_is_named(builder, name):
    shown = {(normalized, "decay"): "second_moment_decay"}.get((builder, name), name)
    for wrong in WRONG[inspect.signature(builder).parameters[name].annotation]:
        with pytest.raises(ValueError, match=rf"^{shown}(\[.*\])? is .*, expected ") as refused:
            builder(**GIVEN[builder] | {name: wrong})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.float64(0.5), jnp.bfloat16(0.5)])
def test_numbers_of_python_numpy_and_jax_are_numbers(number):
    adamw(number, betas=(number, number), eps=number, weight_decay=number, clip_grad_norm=number)
    fedavg(SGD, inner_steps=np.int64(3))
