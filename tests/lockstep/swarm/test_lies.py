"""Each lie is what its row says; that all are messages of every kind is in wire/test_leaves.py."""

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.errors import LockstepError
from lockstep.optim.compressed.compressor import Coefficients
from lockstep.swarm.lies import LIES, TAMPER, lie, tamper
from lockstep.tables.faults import KINDS
from lockstep.wire import message as wire
from tests.lockstep.transcript.test_tensorfile import same

FROM_OTHER_PLACES = {"stale", "copycat", "collude", "equivocation"}  # messages that are there
AREAS = {"a": 300, "b": {"c": 16}}  # places of two bytes, and of one
SHAPES = {"a": (6, 9), "b": {"c": (4, 3)}}


def signs(rng) -> dict:
    """A message by places, as any peer could send it."""

    def parameter(shape, area):
        blocks, kept = shape
        places = np.sort(rng.random((blocks, area)).argsort(axis=1)[:, :kept], axis=1)
        values = rng.standard_normal(shape)
        return Coefficients(places.astype(np.uint8 if area <= 256 else np.uint16), values < 0)

    return jax.tree.map(parameter, SHAPES, AREAS, is_leaf=lambda x: isinstance(x, tuple))


def whole(rng) -> dict:
    return {
        "u": rng.standard_normal((5, 7)).astype(np.float32),
        "v": {"w": rng.standard_normal(3).astype(np.float32)},
    }


def signs_and_load(rng) -> dict:
    load = rng.integers(1, 9, (2, 4)).astype(np.float32)
    return {"load": load, "optimizer": signs(rng)}


FORMS = {  # name: (a peer's message, areas)
    "dense": (whole, {"u": 0, "v": {"w": 0}}),
    "signs": (signs, AREAS),
    "signs and load": (signs_and_load, {"load": 0, "optimizer": AREAS}),
}


def messages(name: str, count: int = 4) -> tuple[wire.Form, list]:
    """The form, and a seeded message of each of some peers."""
    make, areas = FORMS[name]
    sent = [make(np.random.default_rng((7, peer))) for peer in range(count)]
    return wire.Form(sent[0], areas, "lockstep", 1000), sent


def told(kind: str, form: wire.Form, sent: list, seed: int = 0, size: float | None = None):
    """What the first of these peers says in place of its message."""
    rng = np.random.default_rng(seed)
    return lie(kind, size or KINDS[kind].size, sent[0], sent[1:], form.areas, rng)


def test_every_kind_that_changes_a_message_or_its_bytes_has_a_row_and_no_other_has():
    wraps = {name: kind.wraps for name, kind in KINDS.items() if name not in FROM_OTHER_PLACES}
    assert LIES.keys() == {name for name in wraps if wraps[name] == "message"}
    assert {*TAMPER, "malformed"} == {name for name in wraps if wraps[name] == "bytes"}


# ---- What each says ----


def one_block(index, values, dtype=np.float32) -> dict:
    """A message of one parameter: one block, of 8 places."""
    return {"w": Coefficients(np.array([index], np.uint8), np.array([values], dtype))}


def small(kind, size, message, others=(), seed=0) -> Coefficients:
    return lie(kind, size, message, others, {"w": 8}, np.random.default_rng(seed))["w"]


def test_a_free_rider_names_the_first_places_and_says_zero():
    for dtype in (bool, bfloat16, np.float32):
        found = small("free_rider", None, one_block([2, 5], [1, 1], dtype))
        assert found.index_NK.tolist() == [[0, 1]]
        assert found.value_NK.dtype == dtype and not found.value_NK.any()
    whole = lie("free_rider", None, {"w": np.ones(3)}, (), {"w": 0}, np.random.default_rng(0))
    assert whole["w"].tolist() == [0, 0, 0]


def test_sign_flip_turns_signs_and_values_and_gradients_and_leaves_places():
    found = small("sign_flip", None, one_block([0, 2], [True, False], bool))
    assert (found.index_NK.tolist(), found.value_NK.tolist()) == ([[0, 2]], [[False, True]])
    assert small("sign_flip", None, one_block([7], [1.5])).value_NK.tolist() == [[-1.5]]
    gradient = {"w": np.array([1.0, -2.0], np.float32)}
    flipped = lie("sign_flip", None, gradient, (), {"w": 0}, np.random.default_rng(0))
    assert flipped["w"].tolist() == [-1.0, 2.0]


def test_scales_are_factors_and_saturate():
    message = one_block([1, 4, 6], [1.5, -2.0, 3e38])
    up = small("scale_up", 10.0, message)
    most = np.finfo(np.float32).max
    assert up.index_NK.tolist() == [[1, 4, 6]]
    np.testing.assert_array_equal(up.value_NK, np.array([[15, -20, most]], np.float32))
    down = small("scale_down", 0.1, message)
    np.testing.assert_array_equal(down.value_NK, np.array([[0.15, -0.2, 3e37]], np.float32))


def test_noise_is_of_the_stated_share_of_the_rms():
    rng = np.random.default_rng(1)
    q = (3.0 * rng.standard_normal(100_000)).astype(np.float32)
    rms = lambda x: np.sqrt(np.mean(np.square(x, dtype=np.float64)))  # noqa: E731
    for size in (0.5, 1.0, 4.0):
        found = lie("noise", size, {"w": q}, (), {"w": 0}, np.random.default_rng(2))["w"]
        assert rms(found - q) / rms(q) == pytest.approx(size, rel=0.01)
        assert abs(np.mean(found - q)) < 0.02 * size * rms(q)


@pytest.mark.parametrize(("size", "turned"), [(0.2, 0.1), (1.0, 0.5), (7.0, 0.5)])
def test_noise_turns_signs_with_half_its_size_up_to_a_coin(size, turned):
    places = np.tile(np.arange(8, dtype=np.uint8), (10_000, 1))
    message = {"w": Coefficients(places, np.ones(places.shape, bool))}
    found = small("noise", size, message)
    np.testing.assert_array_equal(found.index_NK, places)
    assert np.mean(~found.value_NK) == pytest.approx(turned, abs=0.01)


OTHERS = [one_block([0, 3], [4.0, -1.0]), one_block([3, 5], [-5.0, 2.0])]  # means 2, -3, 1


def test_opposite_is_the_mean_turned_and_selected():
    own = one_block([1, 2], [9.0, 9.0])
    found = small("opposite", None, own, OTHERS)
    assert (found.index_NK.tolist(), found.value_NK.tolist()) == ([[0, 3]], [[-2.0, 3.0]])

    # the inner product with the mean is -|mean|^2 over the places that are sent
    form, sent = messages("dense")
    mean = np.mean([m["u"] for m in sent[1:]], axis=0, dtype=np.float64)
    np.testing.assert_allclose(told("opposite", form, sent)["u"], -mean, rtol=1e-6)


def test_opposite_of_signs_counts_votes_and_takes_the_lowest_place_of_ties():
    own = one_block([6, 7], [False, False], bool)
    others = [
        one_block([1, 2], [True, False], bool),
        one_block([2, 4], [False, True], bool),
        one_block([4, 5], [False, True], bool),
    ]
    # votes: -1 at 1, +2 at 2, 0 at 4, -1 at 5; of 1 and 5 the lowest is taken
    found = small("opposite", None, own, others)
    assert (found.index_NK.tolist(), found.value_NK.tolist()) == ([[1, 2]], [[False, True]])


def test_little_enough_is_the_mean_less_some_deviations():
    own = one_block([1, 2], [9.0, 9.0])
    # by place: (4, 0), (-1, -5), (0, 2): means 2, -3, 1; deviations 2, 2, 1
    found = small("little_enough", 1.5, own, OTHERS)
    assert (found.index_NK.tolist(), found.value_NK.tolist()) == ([[0, 3]], [[-1.0, -6.0]])

    form, sent = messages("dense")
    stack = np.stack([m["u"] for m in sent[1:]]).astype(np.float64)
    by_hand = stack.mean(axis=0) - 0.7 * stack.std(axis=0)
    found = told("little_enough", form, sent, size=0.7)["u"]
    np.testing.assert_allclose(found, by_hand, rtol=1e-5, atol=1e-7)


def test_lone_index_sends_what_nobody_else_does_and_pushes_it_the_same_way_again():
    form, sent = messages("signs")
    found, again = told("lone_index", form, sent), told("lone_index", form, sent, seed=1)
    same(found, again)  # no randomness of the round
    more = told("lone_index", form, [sent[0], *sent[2:]])
    for name in ("a", "b"):
        one, other, rows = (x["a"] if name == "a" else x["b"]["c"] for x in (found, more, sent[1]))
        taken = [set(row) for row in rows.index_NK.tolist()]
        if name == "a":  # of 300 positions; three peers send four of 16 in a block of the other
            assert not any(set(o) & t for o, t in zip(one.index_NK.tolist(), taken, strict=True))
        for block in range(len(taken)):
            signs = dict(zip(one.index_NK[block], one.value_NK[block], strict=True))
            kept = [at for at in other.index_NK[block] if at in signs]
            values = dict(zip(other.index_NK[block], other.value_NK[block], strict=True))
            assert all(values[at] == signs[at] for at in kept)
    kept = np.mean([np.isin(*rows).mean() for rows in zip(
        more["a"].index_NK, found["a"].index_NK, strict=True)])  # fmt: skip
    assert kept > 0.5  # the same ones, where it can


def test_drift_pushes_by_its_size_in_one_direction_in_every_round():
    form, sent = messages("dense")
    pushes = []
    for seed, message in enumerate(sent):
        q = message["u"].astype(np.float64)
        found = lie("drift", 0.01, message, (), form.areas, np.random.default_rng(seed))["u"]
        pushes.append((found - q) / np.sqrt(np.mean(q**2)))
    np.testing.assert_allclose(np.abs(pushes), 0.01, rtol=1e-3)
    assert len({np.sign(push).tobytes() for push in pushes}) == 1
    assert 0 < np.mean(pushes[0] > 0) < 1

    # by places too: a place is pushed in the same direction, whichever others are sent
    first = small("drift", 0.1, one_block([2, 3], [1.0, 1.0]), seed=1).value_NK[0] - 1
    again = small("drift", 0.1, one_block([3, 7], [2.0, 2.0]), seed=2).value_NK[0] - 2
    np.testing.assert_allclose(np.abs(first), 0.1, rtol=1e-5)
    np.testing.assert_allclose(again[0], 2 * first[1], rtol=1e-5)


@pytest.mark.parametrize("name", ["signs", "signs and load"])
def test_drift_turns_one_sign_of_a_message_and_any_may_be_it(name):
    form, sent = messages(name)
    signs = lambda m: np.concatenate(  # noqa: E731
        [x.ravel() for x in jax.tree.leaves(m) if x.dtype == bool]
    )
    turned = set()
    for seed in range(600):
        found = told("drift", form, sent, seed=seed)
        places = np.flatnonzero(signs(found) != signs(sent[0]))
        assert len(places) == 1
        turned |= set(places.tolist())
        others = [
            (a, b)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(sent[0]), strict=True)
            if a.dtype != bool
        ]
        assert all(np.array_equal(a, b) for a, b in others)
    assert turned == set(range(6 * 9 + 4 * 3))


def test_a_forged_message_knows_nothing_of_the_true_one_but_its_rms():
    rng = np.random.default_rng(3)
    blocks, kept, area = 2000, 4, 64
    places = np.tile(np.arange(kept, dtype=np.uint8), (blocks, 1))
    values = (5.0 * rng.standard_normal(places.shape)).astype(np.float32)
    for value_NK in (values, values < 100):
        message = {"w": Coefficients(places, value_NK)}
        found = lie("forged", None, message, (), {"w": area}, rng)["w"]
        counts = np.bincount(found.index_NK.ravel(), minlength=area)
        assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.4 * counts.mean()
        if value_NK.dtype == bool:
            assert np.mean(found.value_NK) == pytest.approx(0.5, abs=0.03)
        else:
            assert np.sqrt(np.mean(found.value_NK**2)) == pytest.approx(5.0, rel=0.05)
            assert abs(np.corrcoef(found.value_NK.ravel(), values.ravel())[0, 1]) < 0.05


def test_a_place_that_cannot_be_named_twice_is_one_line():
    message = one_block([3], [True], bool)
    form = wire.Form(message, {"w": 8}, "psyche", 8)
    with pytest.raises(LockstepError, match="faults.schedule: duplicated, expected .* two indices"):
        tamper("duplicated", b"", message, form, np.random.default_rng(0))
