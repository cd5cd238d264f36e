"""Outer steps against NumPy float64, merge by merge, and what each promises of old messages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.optim.aggregation import RULES, mean, rda
from lockstep.optim.dense import adamw
from lockstep.optim.local.local_steps import outer_sgd
from lockstep.optim.local.outer_steps import cgad, delayed_nesterov, heloco
from lockstep.optim.optimizer import RoundPeers
from tests.lockstep.optim.local import reference

RATE, MOMENTUM, BETAS, EPS = 0.3, 0.8, (0.9, 0.95), 1e-3
CORRECTION = {"keep": 0.4, "shrink": 1.5, "shrink_most": 0.4, "turn": 0.6, "trust": 0.5}
WEIGHT, AGES = np.int32([3, 0, 1, 2]), np.int32([[0, 0, 1, 4], [2, 0, 0, 3], [0, 0, 0, 6]])
MERGES = 7
EACH_ONCE = ("median", "peer_mean", "trimmed_mean", "min_support")


def make(name, aggregate=mean, alpha=0.3, cutoff=5.0):
    return {
        "nesterov": lambda: outer_sgd(RATE, momentum=MOMENTUM, nesterov=True, aggregate=aggregate),
        "delayed_nesterov": lambda: delayed_nesterov(
            RATE, momentum=MOMENTUM, every=3, aggregate=aggregate
        ),
        "cgad": lambda: cgad(
            RATE, betas=BETAS, eps=EPS, alpha=alpha, cutoff=cutoff, aggregate=aggregate
        ),
        "heloco": lambda: heloco(RATE, momentum=MOMENTUM, **CORRECTION, aggregate=aggregate),
    }[name]()


def sent(merge: int) -> np.ndarray:
    """The pseudogradients of four peers, of whom one is absent: in a common direction, and not."""
    rng = np.random.default_rng(merge)
    common = np.random.default_rng(merge // 2).standard_normal((5, 3))
    x = common * rng.choice([-1.0, 0.3, 1.0], size=(4, 1, 1)) + rng.standard_normal((4, 5, 3))
    x[1] = np.nan
    return x.astype(np.float32)


def taken(optimizer, count=MERGES, ages=AGES):
    """The params after each of some merges."""
    params, found = {"w": jnp.zeros((5, 3))}, []
    shared, receive = optimizer.init(params)[1], jax.jit(optimizer.receive)
    for merge in range(count):
        peers = RoundPeers(*map(jnp.array, (WEIGHT, ages[merge % 3], WEIGHT)))
        updates, shared = receive(
            {"w": jnp.array(sent(merge))}, peers, params, shared, jnp.int32(merge + 1)
        )
        params = jax.tree.map(jnp.add, params, updates)
        found.append(np.array(params["w"]))
    return found


STEPS = {
    "nesterov": lambda state, d: reference.nesterov(state, d, RATE, MOMENTUM),
    "delayed_nesterov": lambda state, d: reference.delayed_nesterov(state, d, RATE, MOMENTUM, 3),
    "cgad": lambda state, d: reference.adam(state, d, RATE, BETAS, EPS),
    "heloco": lambda state, d: reference.heloco(state, d, RATE, MOMENTUM),
}


def by_hand(name):
    theta, zero, found = np.zeros((5, 3)), np.zeros((5, 3)), []
    state = {"delayed_nesterov": (zero, [], 0), "cgad": (zero, zero, 0)}.get(name, zero)
    there = WEIGHT > 0
    for merge in range(MERGES):
        x, age = sent(merge)[there].astype(np.float64), AGES[merge % 3][there]
        weights = WEIGHT[there].astype(np.float64)
        if name == "cgad":
            weights *= [reference.age_factor(a, 0.3, 5.0) for a in age]
        if name == "heloco":
            x = np.stack([reference.turned(d, state, **CORRECTION) for d in x])
        d = np.average(x, axis=0, weights=weights)
        step, state = STEPS[name](state, d)
        theta = theta + step
        found.append(theta)
    return found


@pytest.mark.parametrize("name", STEPS)
def test_every_merge_is_the_equations(name):
    np.testing.assert_allclose(taken(make(name)), by_hand(name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("aggregate", [mean, rda])
def test_an_absent_peer_changes_no_bit_whatever_its_row_and_its_age(name, aggregate):
    other = AGES.copy()
    other[:, 1] = 9
    found = [taken(make(name, aggregate), 3, ages) for ages in (AGES, other)]
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found[0]).all()


def test_cgad_at_age_0_is_adam_bit_for_bit_and_past_its_cutoff_counts_for_nothing():
    adam = adamw(RATE, betas=BETAS, eps=EPS, weight_decay=0.0, aggregate=mean)
    np.testing.assert_array_equal(taken(make("cgad"), ages=0 * AGES), taken(adam))
    assert not np.any(taken(make("cgad"), ages=0 * AGES + 5))
    assert not np.array_equal(taken(make("cgad")), taken(adam))  # with these ages


@pytest.mark.parametrize("name", sorted({*RULES} - {*EACH_ONCE}))
def test_cgad_tells_an_old_message_from_a_new_one_by_every_rule_that_weighs(name):
    """Of two messages at right angles, each new in its turn, the new one moves params further."""
    x = np.eye(2, dtype=np.float32)
    found = []
    for ages in ([0, 2], [2, 0]):
        optimizer = make("cgad", RULES[name](0))
        params = {"w": jnp.zeros(2)}
        peers = RoundPeers(jnp.int32([1, 1]), jnp.int32(ages), jnp.int32([1, 1]))
        shared = optimizer.init(params)[1]
        _, after = optimizer.receive({"w": jnp.array(x)}, peers, params, shared, jnp.int32(1))
        found.append(np.array(after.mu["w"]))
    assert found[0][0] > 2 * found[0][1] > 0
    np.testing.assert_allclose(found[0], found[1][::-1], rtol=1e-5)


@pytest.mark.parametrize("name", EACH_ONCE)
def test_cgad_refuses_a_rule_that_would_take_old_messages_for_new_ones(name):
    with pytest.raises(ValueError, match="aggregate .* such as mean"):
        make("cgad", RULES[name](0))


def test_delayed_nesterov_of_every_merge_is_nesterov():
    delayed = delayed_nesterov(RATE, momentum=MOMENTUM, every=1)
    np.testing.assert_allclose(taken(delayed), taken(make("nesterov")), rtol=1e-6, atol=1e-6)
