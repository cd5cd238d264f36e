"""A peer on several devices that hold its arrays in parts trains as on one, in less memory."""

import json
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as Spec

from lockstep.programs.device_memory import device_memory
from lockstep.programs.placement import DeviceGroup, cut, device_groups
from lockstep.swarm.peers import SimulatedPeers
from pipeline.runfile import Run
from tests import tiny
from tests.errors import refused
from tests.lockstep.programs.rounds import ONE_LAYER as MODEL
from tests.lockstep.programs.rounds import begin, train

pytestmark = pytest.mark.long

OPTIMIZERS = {"AdamW": tiny.ADAMW, "Streaming": tiny.STREAMING}
EXPERTS = tiny.DEEPSEEK | {"num_hidden_layers": 1, "first_k_dense_replace": 0}


def a_run(fsdp: int, optimizer: str = "Distro", **changes: object) -> Run:
    changes |= {"peers__fsdp": fsdp, "peers__micro_batch": 4}
    if optimizer in OPTIMIZERS:
        changes["model__LLM__optimizer"] = OPTIMIZERS[optimizer]
    return Run.model_validate(tiny.run_document("nowhere", **changes).unwrap())


@cache
def on_one_device(optimizer: str, model: str) -> list[float]:
    return losses(a_run(1, optimizer), json.loads(model), devices=1)[0]


def losses(run: Run, model: dict, devices: int = 2) -> tuple[list[float], SimulatedPeers]:
    """The mean loss of each step, on random tokens, and the peers after them.

    Two devices, since a device that waits for others holds a thread, and there are four.
    """
    rng = np.random.default_rng(0)
    drawn = lambda *_: rng.integers(tiny.VOCABULARY, size=(6, 16), dtype=np.int32)  # noqa: E731
    return train(run, *begin(run, model), drawn, devices=devices, steps=6)


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ((6, 8), 1, Spec()),
        ((6, 8), 2, Spec(None, "fsdp")),
        ((8, 6), 4, Spec("fsdp")),
        ((4, 8, 8), 4, Spec(None, None, "fsdp")),
        ((3, 5), 2, Spec()),
        ((0, 5), 5, Spec(None, "fsdp")),
        ((), 2, Spec()),
    ],
)
def test_an_array_is_cut_along_its_longest_axis_that_the_devices_divide(shape, parts, expected):
    assert cut(shape, parts) == expected


def test_device_groups_are_disjoint_and_what_is_left_over_stays_idle():
    devices = jax.devices()
    assert device_groups(devices[:3], 2) == [DeviceGroup((devices[0], devices[1]))]
    assert device_groups(devices, 2) == [
        DeviceGroup(tuple(devices[:2])),
        DeviceGroup(tuple(devices[2:])),
    ]
    with refused("[peers] fsdp", 8, 4):
        device_groups(devices, 8)


@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        ("Distro", MODEL),
        pytest.param("Streaming", MODEL, marks=pytest.mark.soak),
        ("AdamW", EXPERTS),
    ],
    ids=["Distro", "Streaming", "experts"],
)
def test_losses_are_those_of_one_device(optimizer, model):
    expected = on_one_device(optimizer, json.dumps(model))
    found, peers = losses(a_run(2, optimizer), model)
    assert found == pytest.approx(expected, abs=1e-5)
    (group,) = peers.groups
    assert len(group.devices) == 2
    for tree in (peers.params_on[group], peers._own[0], peers._first.shared):
        for device in group.devices:  # each device still holds its part
            assert held(tree, device) <= 0.51 * size(tree) + 8  # AdamW counts its steps


@pytest.mark.soak
def test_one_program_for_all_peers_gives_the_same_losses():
    expected = on_one_device("Distro", json.dumps(MODEL))
    found, peers = losses(a_run(2, peers__layout="shard_map"), MODEL)
    assert found == pytest.approx(expected, abs=1e-5)
    assert held(peers._own, jax.devices()[0]) <= 0.51 * size(peers._own)


def size(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def held(tree, device: jax.Device) -> int:
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


@pytest.mark.parametrize(
    ("optimizer", "counts"),
    [pytest.param("Distro", (1, 2), marks=pytest.mark.soak), ("AdamW", (1, 2, 4))],
    ids=["Distro", "AdamW"],
)
def test_memory_of_a_device_falls_as_devices_are_added(optimizer, counts):
    """As XLA plans it: arguments, results and what is needed in between, of the larger program."""
    model = tiny.MODEL | {
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    memory = []
    for fsdp in counts:
        run = a_run(
            fsdp,
            optimizer,
            peers__scan_layers=True,
            peers__remat="nothing_saveable",
            model__LLM__max_seq_len=64,
        )
        programs, _ = begin(run, model)
        work = programs.work(np.zeros((4, 64), np.int32), 4, 4)
        planned = device_memory(programs, 2, work)
        plans = planned.step, planned.receive
        memory.append(max(p.arguments + p.outputs + p.temporary for p in plans))
    for fewer, more in pairwise(memory):
        assert more < 0.8 * fewer
    assert memory[1] < 0.75 * memory[0]


def test_a_batch_that_the_devices_do_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"multiple of peers.fsdp \(2\)"):
        Run.model_validate(
            tiny.run_document("nowhere", peers__fsdp=2, peers__micro_batch=3).unwrap()
        )
