"""The two programs of a round: pinned numbers, and what padding and turns must not change."""

import jax
import numpy as np
import optax
import pytest

from lockstep.errors import LockstepError
from lockstep.optim.dense import adamw
from lockstep.optim.optimizer import RoundPeers
from lockstep.optim.transform import alone, as_transform
from lockstep.programs.columns import UNCOUNTED, split
from lockstep.programs.local_training import Work, micro_batches
from lockstep.programs.replica import Replica, RoundMerge
from lockstep.programs.train_step import Programs
from lockstep.swarm.peers import RoundSteps, make_peers
from lockstep.transcript.state import State
from pipeline import runfile
from pipeline.language_model.language_model import programs_of
from pipeline.runfile.method import learning_rate_of_run
from tests import tiny
from tests.errors import refused
from tests.lockstep.programs.rounds import ONE_LAYER, begin, train

EXPERTS = tiny.DEEPSEEK | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
CONSTANT = {"Constant": {"base_lr": 4e-3, "warmup_init_lr": 0.0, "warmup_steps": 0}}
# Mean losses of steps 1 to 4. A change that should not alter results leaves them as they are.
PINNED = {
    "Distro": (4.15691876, 4.12517810, 4.07647610, 4.00819087),
    "AdamW": (4.15691876, 4.09925985, 4.03186417, 3.93455422),
    "Muon": (4.15691876, 4.07323170, 3.97820735, 3.82597780),  # a group's decay follows its step
    "DiLoCo": (4.13437152, 4.11583877, 3.99462652, 3.87740028),
}


def a_run(optimizer: str = "Distro", **changes: object) -> runfile.Run:
    changes["model__LLM__lr_schedule"] = CONSTANT
    if optimizer != "Distro":
        others = tiny.ADAMW | tiny.MUON | tiny.DILOCO
        changes["model__LLM__optimizer"] = {optimizer: others[optimizer]}
    return tiny.parsed(**changes)


def batch(peer: int, step: int) -> np.ndarray:
    """Two sequences that a model can learn."""
    starts = np.random.default_rng([peer, step]).integers(tiny.VOCABULARY, size=(2, 1))
    return ((starts + 3 * np.arange(16)) % tiny.VOCABULARY).astype(np.int32)


def losses(
    devices: int, steps: int, optimizer: str = "Distro", model: dict = tiny.MODEL, **changes: object
) -> list[float]:
    run = a_run(optimizer, **changes)
    return train(run, *begin(run, model), batch, devices=devices, steps=steps)[0]


def test_more_layers_than_can_be_compiled_one_by_one_are_refused():
    deep = tiny.MODEL | {"num_hidden_layers": 3000}
    programs_of(a_run(peers__scan_layers=True), deep)
    with refused("scan_layers", False, True, "3,000"):
        programs_of(a_run(peers__scan_layers=False), deep)


@pytest.mark.parametrize(
    "model, rows, message",
    [
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**20}, 2, "the model: "),
        ({}, 10**18, r"\[peers\] micro_batch = 10{18} sequences of 16 tokens: 256,000,"),
    ],
)
def test_what_the_memory_cannot_hold_is_refused_before_it_is_allocated(model, rows, message):
    """Also for whoever replays the bundle of a stranger, who chose both."""
    run = a_run(peers__micro_batch=rows)
    with pytest.raises(LockstepError, match=f"^{message}.* GB, expected at most .* GB of"):
        programs_of(run, tiny.MODEL | model)


@pytest.mark.release
@pytest.mark.parametrize("optimizer", PINNED)
def test_losses_of_the_first_steps_are_as_they_were(optimizer):
    found = losses(1, 4, optimizer)
    assert found == pytest.approx(PINNED[optimizer], abs=2e-6)


# two peers for a device in turns, which vmap does not know; fewer peers than devices; local steps
@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer, count, overlap, layout",
    [
        ("Distro", 6, 0, "shard_map"),
        pytest.param("Distro", 3, 2, "vmap", marks=pytest.mark.soak),
        ("DiLoCo", 2, 0, "shard_map"),
    ],
)
def test_every_layout_trains_alike(optimizer, count, overlap, layout):
    changes = {"peers__count": count, "peers__overlap": overlap, "model": ONE_LAYER}
    changes["optimizer"] = optimizer
    expected = losses(1, 4, **changes)
    # with overlap a peer looks ahead by signs, of rounding too where its delta is all but zero
    near = pytest.approx(expected, abs=1e-2 if overlap else 1e-4)
    assert losses(4, 4, peers__layout=layout, **changes) == near


@pytest.mark.long
def test_peers_take_turns_on_fewer_devices_without_changing_a_bit():
    alone, on_two, on_one = (losses(n, 3, model=ONE_LAYER, peers__count=3) for n in (3, 2, 1))
    assert on_one == on_two == alone


@pytest.mark.long
def test_gradients_are_the_mean_over_sequences_however_they_are_cut():
    tokens = np.concatenate([batch(0, step) for step in range(3)])[:5]
    found = {}
    for size in (1, 2, 8):  # all in one, and with padding in the last of three
        programs, state = begin(a_run("AdamW", peers__micro_batch=size))
        rows_MBW = micro_batches(tokens, capacity=7, size=size)
        own = jax.tree.map(np.array, state.own[0])
        found[size] = programs.peer_step(
            state.params, own, state.shared, rows_MBW, np.int32(5), np.int32(1)
        )
    for size in (1, 2):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6),
            found[size].message,
            found[8].message,
        )
        assert float(found[size].loss) == pytest.approx(float(found[8].loss), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("optimizer, lots", [("Distro", 1), ("DiLoCo", 2)])
def test_nothing_is_compiled_anew_when_the_work_changes(optimizer, lots):
    (programs, state), compiled = begin(a_run(optimizer)), set()
    for step, count in enumerate((7, 1, 4, 2), start=1):
        rows_MBW = micro_batches(np.zeros((count, 16), np.int32), capacity=7, size=2, lots=lots)
        own = jax.tree.map(np.array, state.own[0])
        programs.peer_step(
            state.params, own, state.shared, rows_MBW, np.int32(count), np.int32(step)
        )
        compiled.add(programs.peer_step._cache_size())  # those of other tests too
    assert len(compiled) == 1


def test_gradients_cannot_travel_during_the_next_round():
    with refused("[peers] overlap", 1, 0):
        programs_of(a_run("AdamW", peers__overlap=1), tiny.MODEL)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_what_balances_experts_no_gradient_moves(overlap):
    """DeepSeek's correction has none; signs of 0 and weight decay would move it."""
    run = a_run(peers__overlap=overlap)
    programs, state = begin(run, EXPERTS)
    params = jax.tree.map(np.array, state.params)
    params["layers"]["mlp"]["router"]["correction"][:] = 0.25
    state = state._replace(params=params)
    after = train(run, programs, state, batch, devices=1, steps=3)[1].state().params
    router, before = after["layers"]["mlp"]["router"], params["layers"]["mlp"]["router"]
    np.testing.assert_array_equal(router["correction"], 0.25)
    assert (router["kernel"] != before["kernel"]).any()


@pytest.mark.parametrize("optimizer", ["Muon", "Distro"])
def test_a_group_that_no_param_has_is_refused(optimizer):
    run = a_run(optimizer).model_dump(mode="json")
    run["model"]["LLM"]["optimizer"][optimizer]["step_scale"] = {"head": 2.0}
    with pytest.raises(
        LockstepError, match=r"step_scale: .*\bhead\b.* expected .* embed, layers, lm_"
    ):
        programs_of(runfile.parse(run, "run.toml"), tiny.MODEL)


@pytest.mark.long
def test_a_run_that_extends_another_warms_up_again():
    run = a_run("AdamW", model__LLM__cold_start_warmup_steps=4)
    _, state = begin(run)
    moved = {}
    for first_step in (0, 10):
        programs = programs_of(run, ONE_LAYER, first_step)
        message = jax.tree.map(lambda leaf: np.ones((2, *leaf.shape), leaf.dtype), state.params)
        peers = RoundPeers.synchronous(np.ones(2, np.int32))
        moved[first_step] = [
            float(np.abs(after["embed"]["embedding"] - state.params["embed"]["embedding"]).max())
            for step in (11, 13, 15, 16)
            for after, _ in [programs.receive(message, peers, state.params, state.shared, step)]
        ]
    ratio = np.array(moved[10]) / np.array(moved[0])
    np.testing.assert_allclose(ratio, [0, 0.5, 1, 1], atol=1e-3)


@pytest.mark.parametrize("optimizer", ["AdamW", "DiLoCo"])
def test_the_first_local_step_of_a_run_that_extends_another_is_at_rate_0(optimizer):
    run = a_run(optimizer, model__LLM__cold_start_warmup_steps=4)
    steps = run.llm.inner_steps
    at = np.float32(10 + (np.arange(5 * steps) + 1) / steps)
    rates, given = (np.asarray(learning_rate_of_run(run, first)(at)) for first in (10, 0))
    np.testing.assert_allclose(rates / given, np.arange(5 * steps) / (5 * steps - 1), atol=1e-5)


# ---- Rows of several columns ----

LABELLED = ("inputs", "labels")
ALL = (*LABELLED, "position_ids", "sequence_ids")


def packed(count: int) -> np.ndarray:
    """Rows of 16 tokens, of 9 and 5 of two sequences and padding; half of the labels count."""
    rng = np.random.default_rng(7)
    inputs = rng.integers(tiny.VOCABULARY, size=(count, 16))
    labels = np.where(rng.random((count, 16)) < 0.5, inputs, UNCOUNTED)
    labels[0, 3:] = UNCOUNTED  # so that rows differ in how much counts
    sequences = np.repeat([0, 1, 2], [9, 5, 2])
    positions = np.concatenate([np.arange(9), np.arange(5), np.arange(2)])
    rows = [inputs, labels, np.tile(positions, (count, 1)), np.tile(sequences, (count, 1))]
    return np.concatenate(rows, axis=1).astype(np.int32)


def gradient(programs: Programs, state: State, rows: np.ndarray, size: int) -> tuple:
    rows_MBW = micro_batches(rows, capacity=7, size=size)
    return jax.device_get(
        jax.jit(programs.steps.gradient)(state.params, rows_MBW, np.int32(len(rows)))
    )


@pytest.mark.long
@pytest.mark.parametrize("model", [ONE_LAYER, EXPERTS], ids=["llama", "deepseek"])
def test_the_loss_is_the_mean_over_labels_that_count_however_a_batch_is_cut(model):
    rows = packed(5)
    found = {}
    for size in (2, 7):
        programs, state = begin(a_run("AdamW", peers__micro_batch=size), model, ALL)
        found[size] = gradient(programs, state, rows, size)
    # in float64, of the logits
    given = split(rows, ALL)
    how = {"positions_BT": given.position_ids, "sequences_BT": given.sequence_ids}
    model_of = programs.task.model
    config = model_of.Config.from_hf(model)
    apply = jax.jit(
        lambda p: model_of.apply(config, p, given.inputs, scan=True, dtype=np.float32, **how)
    )
    logits = np.asarray(apply(state.params), np.float64)[:, :-1]
    labels = given.labels[:, 1:]
    chosen = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    losses = np.log(np.exp(logits).sum(-1)) - chosen
    expected = losses[labels != UNCOUNTED].mean()
    assert abs(expected - losses.mean()) > 1e-3
    for loss, grads in found.values():
        assert float(loss) == pytest.approx(expected, abs=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), grads, found[7][1]
        )


@pytest.mark.long
def test_labels_that_are_the_inputs_train_as_no_labels_do():
    tokens = np.concatenate([batch(0, step) for step in range(3)])[:5]
    others = [np.tile(np.arange(16), (5, 1)), np.zeros((5, 16), int)]
    rows = np.concatenate([tokens, tokens, *others], axis=1).astype(np.int32)
    loss, grads = gradient(*begin(a_run("AdamW")), tokens, 2)
    for columns, width in ((LABELLED, 32), (ALL, 64)):
        found = gradient(*begin(a_run("AdamW"), columns=columns), rows[:, :width], 2)
        assert float(found[0]) == pytest.approx(float(loss), abs=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6), found[1], grads
        )


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["Distro", "AdamW"])
def test_a_batch_of_which_nothing_counts_has_no_gradient_and_no_nan(optimizer):
    rows = packed(3)
    rows[:, 17:32] = UNCOUNTED  # the first label is predicted by nothing
    programs, state = begin(a_run(optimizer), columns=ALL)
    loss, grads = gradient(programs, state, rows, 2)
    assert float(loss) == 0
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    own = jax.tree.map(np.array, state.own[0])
    rows_MBW = micro_batches(rows, capacity=3, size=2)
    result = programs.peer_step(state.params, own, state.shared, rows_MBW, np.int32(3), np.int32(1))
    for leaf in jax.tree.leaves((result.own, result.message)):
        assert np.isfinite(leaf).all()


@pytest.mark.long
def test_fused_layouts_train_alike_on_labels():
    found = {}
    for name in ("each", "shard_map"):
        programs, state = begin(a_run(), columns=ALL)
        peers = make_peers(programs, name, state, jax.devices()[:2])
        work = {peer: Work(micro_batches(packed(4)[peer:], 4, 2), 4 - peer) for peer in range(2)}
        steps = [peers.step(RoundSteps(work, 1)) for _ in range(2)]
        found[name] = [float(steps[peer][peer].loss) for peer in range(2)]
    assert found["shard_map"] == pytest.approx(found["each"], abs=1e-5)


def test_packed_rows_are_not_left_to_a_fused_kernel():
    run = a_run(peers__attention="cudnn", peers__precision="bfloat16", peers__scan_layers=True)
    programs_of(run, tiny.MODEL, columns=LABELLED)
    with refused("attention", '"cudnn"', '"matmul"'):
        programs_of(run, tiny.MODEL, columns=ALL)


# ---- Local steps ----

LINEAR = {
    "base_lr": 1e-2, "warmup_init_lr": 0.0, "warmup_steps": 0, "total_steps": 4, "final_lr": 2e-3,
}  # fmt: skip


def a_local_run() -> runfile.Run:
    changes = {"model__LLM__optimizer": tiny.DILOCO, "model__LLM__lr_schedule": {"Linear": LINEAR}}
    return tiny.parsed(**changes)


def four(peer: int, step: int) -> np.ndarray:
    """Four sequences that a model can learn."""
    return np.concatenate([batch(peer, step), batch(peer, step + 100)])


@jax.jit
def by_adamw(params: dict, grads: dict, state: tuple | None, rate: float) -> tuple[dict, tuple]:
    """Params and state after a step."""
    settings = tiny.ADAMW["AdamW"] | {"betas": (0.9, 0.95)}
    tx = as_transform(adamw(rate, **settings), alone)
    updates, state = tx.update(grads, state or tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.long
@pytest.mark.parametrize("count", [4, 3, 1])
def test_a_peer_takes_a_step_on_each_of_two_lots_at_the_rate_of_its_time(count):
    """Of an odd number the first lot has one more; one sequence is one step."""
    programs, state = begin(a_local_run())
    rows, step = four(0, 2)[:count], 2
    rows_MBW = micro_batches(rows, capacity=4, size=2, lots=2)
    own = jax.tree.map(np.array, state.own[0])
    result = programs.peer_step(
        state.params, own, state.shared, rows_MBW, np.int32(count), np.int32(step)
    )

    def rate(taken: int) -> float:
        done = step - 1 + (taken + 1) / 2
        return LINEAR["base_lr"] + (LINEAR["final_lr"] - LINEAR["base_lr"]) * done / 4

    local, losses, after = state.params, [], None
    for taken, lot in enumerate(rows_MBW[: 1 if count == 1 else 2]):
        size = np.int32(-(-count // 2) if taken == 0 else count // 2)
        loss, grads = jax.jit(programs.steps.gradient)(local, lot[None], size)
        local, after = by_adamw(local, grads, after, rate(taken))
        losses.append(float(loss))
    assert float(result.loss) == pytest.approx(np.mean(losses), abs=1e-5)
    jax.tree.map(
        lambda sent, before, now: np.testing.assert_allclose(sent, before - now, atol=2e-5),
        result.message, state.params, local,
    )  # fmt: skip
    assert float(optax.tree.norm(result.message)) > 0.1


@pytest.fixture(scope="module")
def exchanged() -> tuple[Replica, dict]:
    """The params before a round, and the messages of two peers, of 4 sequences and of 3."""
    run = a_local_run()
    programs, state = begin(run)
    peers = make_peers(programs, "each", state, jax.devices()[:1])
    rows_MBW = micro_batches(four(0, 1), 4, 2, 2)
    done = peers.step(RoundSteps({peer: Work(rows_MBW, 4 - peer) for peer in range(2)}, 1))
    replica = Replica.put(programs, peers.groups[0], state.params, state.shared)
    return replica, {peer: each.message for peer, each in done.items()}


def test_the_order_in_which_messages_arrive_changes_no_bit(exchanged):
    replica, messages = exchanged
    one, other = (
        replica.receive(RoundMerge(dict(order), {0: 4, 1: 3}, 1, {0: 4, 1: 3}), 2)
        for order in (messages.items(), reversed(messages.items()))
    )
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_a_peer_counts_by_the_sequences_that_it_was_assigned(exchanged):
    replica, messages = exchanged
    after = replica.receive(RoundMerge(messages, {0: 4, 1: 3}, 1, {0: 4, 1: 3}), 2)
    jax.tree.map(
        lambda now, theta, *d: np.testing.assert_allclose(
            now, theta - 0.7 * 1.9 * (4 * d[0] + 3 * d[1]) / 7, atol=1e-6
        ),
        after.params, replica.params, messages[0], messages[1],
    )  # fmt: skip
