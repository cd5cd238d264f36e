"""What is encoded is decoded, array for array, and its bytes are counted without being made."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from pydantic import TypeAdapter

from lockstep.methods import CARDS, AnyOptimizer
from lockstep.methods.card import Setting, build
from lockstep.optim.compressed import dct
from lockstep.optim.compressed.compressor import Coefficients
from lockstep.wire import message as wire
from tests.lockstep.transcript.test_tensorfile import same

# of messages by indices: blocks, kept and positions of each parameter
SHAPES = {
    "all, one, a plane's end": [(2, 24, 24), (5, 1, 9), (1, 8, 4096)],
    "the only one": [(1, 1, 1)],
    "each dtype of places": [(7, 3, 256), (7, 3, 257), (2, 300, 70_000)],
    "many of one parameter": [(256, 8, 4096), (16, 8, 4096), (16, 8, 4096), (3, 5, 40)],
}
LAYOUTS = ("lockstep", "psyche")


def hold(message, form: wire.Form, saved) -> None:
    """Check that a message comes back as it is, and that its length is known without its bytes."""
    data = wire.encode(message, form)
    decoded = wire.decode(data, form)
    same(decoded, message)
    for found, sent in zip(jax.tree.leaves(decoded), jax.tree.leaves(message), strict=True):
        assert found.tobytes() == sent.tobytes()  # zeros with their signs
    assert form.bytes_most - int(saved(message)) == len(data)


@cache
def form_of(shapes: str, value: type, layout: str):
    like = {
        "load": jax.ShapeDtypeStruct((3,), np.float32),
        "codes": jax.ShapeDtypeStruct((5,), np.uint8),
    }
    areas = dict.fromkeys(like, 0)
    for number, (blocks, kept, area) in enumerate(SHAPES[shapes]):
        index = jax.ShapeDtypeStruct((blocks, kept), dct.index_dtype(area))
        like[f"w{number}"] = Coefficients(index, jax.ShapeDtypeStruct((blocks, kept), value))
        areas[f"w{number}"] = area
    form = wire.Form(like, areas, layout, 10**6)
    return form, jax.jit(partial(wire.saved, form=form))


def positions(rng: np.random.Generator, leaf, crowd: float) -> np.ndarray:
    """Places of each block, the more of them at its start the larger `crowd` is."""
    blocks, kept, area = leaf.row
    order_NA = rng.random((blocks, area)) + crowd * np.linspace(0, 1, area)
    drawn_NK = np.argpartition(order_NA, kept - 1, axis=1)[:, :kept]
    return np.sort(drawn_NK, axis=1).astype(leaf.node.index_NK.dtype)


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40, -1e-40])
CROWDS = st.lists(st.sampled_from([0.0, 0.5, 5.0]), min_size=4, max_size=4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [bool, bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), crowds=CROWDS, special=st.lists(VALUES, max_size=6))
def test_a_message_by_indices_comes_back_and_its_bytes_are_counted(
    shapes, value, layout, seed, crowds, special
):
    (form, saved), rng = form_of(shapes, value, layout), np.random.default_rng(seed)
    message = {
        "load": rng.standard_normal(3).astype(np.float32),
        "codes": rng.integers(256, size=5, dtype=np.uint8),
    }
    for number, (leaf, crowd) in enumerate(zip(form.packed, crowds, strict=False)):
        size = leaf.node.index_NK.shape
        values = rng.standard_normal(size)
        values.flat[: len(special)] = special[: values.size]
        values = np.signbit(values) if value is bool else values.astype(bfloat16)
        message[f"w{number}"] = Coefficients(positions(rng, leaf, crowd), values)
    hold(message, form, saved)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("area", [6, 16, 256, 300, 2**16, 2**20])
@given(places=st.lists(st.integers(-3, 6), min_size=6, max_size=6), far=st.integers(0, 2**32 - 1))
def test_places_of_no_order_are_no_message_and_never_others(area, layout, places, far):
    """A process may send anything of its shape: what its bytes decode to is what was encoded."""
    near = (np.array(places) + far).astype(dct.index_dtype(area)).reshape(2, 3)
    for index_NK in (near, np.array(places).astype(near.dtype).reshape(2, 3)):
        message = {"w": Coefficients(index_NK, np.zeros((2, 3), bool))}
        form = wire.Form(message, {"w": area}, layout, 2 * area)
        ordered = (index_NK[:, 1:] > index_NK[:, :-1]).all() and (index_NK < area).all()
        data = wire.encode(message, form)
        if ordered:
            same(wire.decode(data, form), message)
        else:
            with pytest.raises(wire.WireError):
                wire.decode(data, form)


@pytest.mark.parametrize("name", CARDS)
def test_a_message_of_every_method_comes_back_and_its_bytes_are_counted(name):
    table = TypeAdapter(AnyOptimizer).validate_python({CARDS[name].tag: CARDS[name].settings})
    shapes = {"embed": (70, 64), "layers": (2, 48), "norm": (64,), "lm_head": (64, 70)}
    params = {
        group: {"w": jax.random.normal(jax.random.key(n), shape)}
        for n, (group, shape) in enumerate(shapes.items())
    }
    optimizer = build(table, Setting(lambda step: 0.1, 0, ("layers",)), params)

    @jax.jit
    def first_message(params):
        own, shared = optimizer.init(params)
        own = optimizer.accumulate(params, own, params, jnp.int32(1))
        return optimizer.send(own, params, shared, jnp.int32(1))[0]

    form = wire.form_of(optimizer, params, "lockstep")
    hold(jax.device_get(first_message(params)), form, partial(wire.saved, form=form))
