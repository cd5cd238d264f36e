"""Local steps in a model: what a peer does in a round is what anyone would do by hand."""

import jax
import numpy as np
import optax
import pytest

from lockstep.optim.dense import adamw
from lockstep.optim.transform import alone, as_transform
from lockstep.programs.local_steps import Work, micro_batches
from lockstep.programs.replica import Replica
from lockstep.swarm.peers import RoundSteps, make_peers
from pipeline import runfile
from tests import tiny
from tests.lockstep.programs.rounds import begin, train

LINEAR = {
    "base_lr": 1e-2, "warmup_init_lr": 0.0, "warmup_steps": 0, "total_steps": 4, "final_lr": 2e-3,
}  # fmt: skip


def a_run(**changes: object) -> runfile.Run:
    changes = {
        "model__LLM__optimizer": tiny.DILOCO,
        "model__LLM__lr_schedule": {"Linear": LINEAR},
    } | changes
    return runfile.parse(tiny.run_document("nowhere", **changes).unwrap(), "run.toml")


def batch(peer: int, step: int) -> np.ndarray:
    """Four sequences that a model can learn."""
    starts = np.random.default_rng([peer, step]).integers(tiny.VOCABULARY, size=(4, 1))
    return ((starts + 3 * np.arange(16)) % tiny.VOCABULARY).astype(np.int32)


@jax.jit
def by_adamw(params: dict, grads: dict, state: tuple | None, rate: float) -> tuple[dict, tuple]:
    """Params and state after a step."""
    settings = tiny.ADAMW["AdamW"] | {"betas": (0.9, 0.95)}
    tx = as_transform(adamw(rate, **settings), alone)
    updates, state = tx.update(grads, state or tx.init(params), params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("count", [4, 3, 1])
def test_a_peer_takes_a_step_on_each_of_two_lots_at_the_rate_of_its_time(count):
    """Of an odd number the first lot has one more; one sequence is one step."""
    programs, state = begin(a_run())
    rows, step = batch(0, 2)[:count], 2
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


def test_a_fused_layout_takes_the_same_local_steps():
    found = {}
    for layout in ("each", "shard_map"):
        run = a_run(peers__layout=layout)
        found[layout] = train(run, *begin(run), batch, devices=2, steps=3)[0]
    assert found["each"][0] - found["each"][2] > 0.1
    assert found["shard_map"] == pytest.approx(found["each"], abs=1e-4)


@pytest.fixture(scope="module")
def exchanged() -> tuple[Replica, dict]:
    """The params before a round, and the messages of two peers, of 4 sequences and of 3."""
    run = a_run()
    programs, state = begin(run)
    peers = make_peers(programs, "each", state, jax.devices()[:1])
    rows_MBW = micro_batches(batch(0, 1), 4, 2, 2)
    done = peers.step(RoundSteps({peer: Work(rows_MBW, 4 - peer) for peer in range(2)}, 1))
    replica = Replica.put(programs, peers.groups[0], state.params, state.shared)
    return replica, {peer: each.message for peer, each in done.items()}


def test_the_order_in_which_messages_arrive_changes_no_bit(exchanged):
    replica, messages = exchanged
    one, other = (
        replica.receive(dict(order), {0: 4, 1: 3}, 2, 1)
        for order in (messages.items(), reversed(messages.items()))
    )
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_a_peer_counts_by_the_sequences_that_it_was_assigned(exchanged):
    replica, messages = exchanged
    after = replica.receive(messages, {0: 4, 1: 3}, 2, 1)
    jax.tree.map(
        lambda now, theta, *d: np.testing.assert_allclose(
            now, theta - 0.7 * 1.9 * (4 * d[0] + 3 * d[1]) / 7, atol=1e-6
        ),
        after.params, replica.params, messages[0], messages[1],
    )  # fmt: skip


def test_the_work_of_a_round_compiles_nothing_anew():
    programs, state = begin(a_run())
    compiled = set()
    for step, count in enumerate((4, 2, 1, 3), start=1):
        rows_MBW = micro_batches(batch(0, step)[:count], capacity=4, size=2, lots=2)
        own = jax.tree.map(np.array, state.own[0])
        programs.peer_step(
            state.params, own, state.shared, rows_MBW, np.int32(count), np.int32(step)
        )
        compiled.add(programs.peer_step._cache_size())  # those of other tests too
    assert len(compiled) == 1
