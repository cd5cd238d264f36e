"""Messages too large for memory: on disk, and merged a part at a time, with the same bits."""

import errno
import tempfile

import jax
import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.machine import memory
from lockstep.optim.aggregation import mean
from lockstep.programs import local_training, replica
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.same_bits.evaluation import same_bits
from lockstep.wire import spool
from lockstep.wire.message import Form
from tests.lockstep.swarm import simulated

pytestmark = pytest.mark.long

FAULTS = [
    {"kind": "crash", "peer": 0, "rounds": [2, 3]},
    {"kind": "sign_flip", "peer": 1, "rounds": [3, 3]},
    {"kind": "malformed", "peer": 2, "rounds": [4, 4]},
    {"kind": "equivocation", "peer": 3, "rounds": [5, 5]},
    {"kind": "stale", "peer": 4, "rounds": [6, 6]},
]


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(memory, "room", lambda devices: 1)
    monkeypatch.setattr(replica, "AT_ONCE", 600)


@pytest.mark.parametrize("form", ["dense", "local", "fragments", "codes"])
def test_a_run_of_large_messages_has_the_bits_of_one_in_memory(tmp_path, request, form):
    run = simulated.run_of(form, *FAULTS)
    small = simulated.see(form, run, tmp_path / "small")
    request.getfixturevalue("all_are_large")
    programs = simulated.lab(form).programs
    assert programs.large(2) and programs.merges_in_parts(2) == (form != "codes")
    assert simulated.lab(form).audit(run, small.transcript) == small.findings
    large = simulated.see(form, run, tmp_path / "large")
    assert large.fired == small.fired and sum(small.fired.values()) >= len(FAULTS)
    assert large.blamed == small.blamed
    assert large.transcript.hash == small.transcript.hash
    last = small.transcript.snapshots[-1]
    assert large.transcript.hashes(last) == small.transcript.hashes(last)


@pytest.mark.parametrize(
    ("peers", "memory_gb", "large"), [(4, 139, False), (4, 16, True), (64, 139, True)]
)
def test_what_is_large_follows_from_the_memory(peers, memory_gb, large):
    """Gradients of 162 M params, as of 124 M with a head of their own."""
    like = jax.ShapeDtypeStruct((162_000_000,), np.float32)
    form = Form({"w": like}, {"w": 0}, "lockstep", 162_000_000)
    assert form.large(peers, int(memory_gb * 1e9)) == large


def test_messages_merged_in_parts_are_their_mean(all_are_large):
    programs = simulated.lab("dense").programs
    rng, group = np.random.default_rng(0), device_groups(jax.devices(), 1)[1]
    messages = [
        jax.tree.map(lambda x: rng.standard_normal(x.shape, x.dtype), programs.form.like)
        for _ in range(3)
    ]
    nan = jax.tree.map(lambda x: np.full_like(x, np.nan), messages[0])
    messages.insert(1, nan)  # an absent peer
    weight = np.array([1, 0, 2, 1])
    in_parts = replica.merge_parts(programs, group, messages, weight)
    stacked = jax.tree.map(lambda *rows: np.stack(rows), *messages)
    whole = jax.tree.leaves(jax.jit(same_bits(mean))(stacked, weight))
    for merged, expected in zip(jax.tree.leaves(in_parts), whole, strict=True):
        np.testing.assert_array_equal(merged, expected)
    for merged, *rows in zip(*map(jax.tree.leaves, (in_parts, *messages)), strict=True):
        assert merged.devices() == {group.devices[0]}
        assert merged.dtype == np.float32
        present = [np.float64(row) for row in rows if np.isfinite(row).all()]
        exact = np.average(present, axis=0, weights=weight[weight > 0])
        np.testing.assert_allclose(merged, exact, rtol=1e-5, atol=1e-6)


def test_spooled_bytes_lie_in_no_file_and_outlive_dropped_pages(tmp_path):
    data = np.random.default_rng(0).bytes(10_000)
    held = spool.hold(tmp_path, lambda take: [take(data[:4000]), take(data[4000:])])
    assert list(tmp_path.iterdir()) == []
    array = np.frombuffer(memoryview(held)[16:9_616], "<f4").reshape(2, -1)
    spool.drop_pages([array, array[1], np.zeros(3)])
    assert array.tobytes() == data[16:9_616] and held[:] == data


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(LockstepError, match="No space left on device, expected room for the mess"):
        spool.hold(tmp_path, lambda take: None)


def test_with_large_params_a_local_step_without_rows_is_left_out_as_it_was(monkeypatch):
    small = simulated.lab("local")
    rows = small.data.take(np.arange(1))  # of two local steps, the second has none
    group = device_groups(jax.devices(), 1)[0]

    def stepped(programs):
        replica = Replica.put(programs, group, small.begin.state.params, small.begin.state.shared)
        own = group.put(small.begin.state.own[0])
        return jax.device_get(replica.step(own, programs.work(rows, 6, 3), 1))

    chosen = stepped(small.programs)
    monkeypatch.setattr(local_training, "LARGE_MODEL", 1)
    large = simulated.lab.__wrapped__("local").programs  # compiled anew
    assert " conditional(" in lowered(large, group, small.begin.state, rows)
    branched = stepped(large)
    for one, other in zip(*map(jax.tree.leaves, (chosen, branched)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-9)
    moved = jax.tree.leaves(branched.message)
    assert all(np.any(x) for x in moved)


def lowered(programs, group, state, rows) -> str:
    replica = Replica.put(programs, group, state.params, state.shared)
    arguments = replica.arguments(group.put(state.own[0]), programs.work(rows, 6, 3), 1)
    return programs.peer_step.lower(*arguments).compile().as_text()
