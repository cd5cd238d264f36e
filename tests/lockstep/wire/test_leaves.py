"""Each kind of leaf: its bytes are its own, read back alike, and any lie about it is a message."""

import sys
from contextlib import suppress

import jax
import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim.compressed.compressor import Coefficients
from lockstep.swarm.lies import LIES, TAMPER, lie, tamper
from lockstep.tables.faults import KINDS as FAULTS
from lockstep.wire import message as wire
from lockstep.wire.bound import largest
from lockstep.wire.leaves import KINDS, leaf_of
from lockstep.wire.reader import ByteReader
from tests.lockstep.transcript.test_tensorfile import same

POSITIONS = np.array([[0, 7, 31], [1, 2, 200]], np.uint8)
EXAMPLES = {  # kind: (a node of it, from a generator and the kind's module; its area)
    "Codes": (lambda rng, module: rng.integers(256, size=11, dtype=np.uint8), 0),
    "Signs": (lambda rng, module: Coefficients(POSITIONS, rng.random((2, 3)) < 0.5), 250),
    "Values": (
        lambda rng, module: Coefficients(POSITIONS, rng.standard_normal((2, 3)).astype(bfloat16)),
        250,
    ),
    "Whole": (lambda rng, module: rng.standard_normal((2, 3)).astype(np.float16), 0),
}
SIZES = (1e-300, 1e300)
each = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
LAYOUTS = [(kind, layout) for kind in KINDS for layout in kind.packings]


def node_of(kind, seed: int = 0):
    make, _ = EXAMPLES[kind.__name__]
    return make(np.random.default_rng(seed), sys.modules[kind.__module__])


def form_of(kind, layout: str) -> tuple[wire.Form, list]:
    """The form of messages of two such parameters beside an array, and some of them."""
    sent = [
        {"a": node_of(kind, 2 * n), "b": np.float32([n, -1]), "c": node_of(kind, 2 * n + 1)}
        for n in range(3)
    ]
    area = EXAMPLES[kind.__name__][1]
    return wire.Form(sent[0], {"a": area, "b": 0, "c": area}, layout, 10**4), sent


@each
def test_a_node_is_of_one_kind_and_its_fields_are_read_back(kind):
    node = node_of(kind)
    assert [other for other in KINDS if other.holds(node)] == [kind]
    leaf = kind(node, EXAMPLES[kind.__name__][1])
    fields = list(map(bytes, leaf.fields()))
    assert leaf.length == sum(map(len, fields))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), node)
    reader = ByteReader(b"".join(fields))
    same(kind(shapes, leaf.area).read(reader, "it"), node)
    assert not reader.remaining
    assert kind(shapes, leaf.area).row == leaf.row


@each
def test_its_values_can_be_replaced_and_count_as_large_as_they_are(kind):
    leaf = kind(node_of(kind), EXAMPLES[kind.__name__][1])
    other = leaf.with_values(-2 * leaf.values)
    np.testing.assert_allclose(other.values, (-2 if leaf.sized else -1) * leaf.values, rtol=0.2)
    np.testing.assert_array_equal(leaf.take(leaf.put(leaf.values)), leaf.values)
    assert largest({"w": leaf.node}) == (np.abs(leaf.values).max() if leaf.sized else 0)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_message_of_it_decodes_to_itself_and_to_nothing_else(kind, layout):
    form, (message, *_) = form_of(kind, layout)
    data = wire.encode(message, form)
    same(wire.decode(data, form), message)
    assert data[5] == kind.packings[layout].number
    assert abs(len(data) - form.bytes_about) <= 4 and len(data) <= form.bytes_most
    for other in (*(data[:size] for size in range(len(data))), data + b"\0", data + b"\1"):
        with pytest.raises(wire.WireError):
            wire.decode(other, form)
    for at in range(len(data)):
        for bit in range(8):
            bent = bytearray(data)
            bent[at] ^= 1 << bit
            with suppress(wire.WireError):
                assert wire.encode(wire.decode(bent, form), form) == bent


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_a_lie_about_it_is_another_message_and_the_same_each_time(kind, layout, name):
    form, (true, *others) = form_of(kind, layout)

    def told(message, others, size: float | None = None):
        rng = np.random.default_rng(0)
        return lie(name, size or FAULTS[name].size, message, others, form.areas, rng)

    before, found = jax.tree.map(np.copy, true), told(true, others)
    same(true, before)  # the liar's own state goes on from the truth
    same(told(true, others), found)
    same(jax.device_get(told(*jax.device_put((true, others)))), found)
    nothing = lie("free_rider", None, true, others, form.areas, None)
    for said in (found, told(true, ()), told(nothing, ()), *(told(true, others, x) for x in SIZES)):
        same(wire.decode(wire.encode(said, form), form), said)
    changes = {"lone_index": bool(form.leaves[0].kept), "drift": kind.sized or kind.signs}
    if FAULTS[name].needs == "values":
        changes[name] = kind.sized
    fields = [b"".join(wire.fields([message["a"], message["c"]])) for message in (true, found)]
    assert (fields[0] != fields[1]) == changes.get(name, True)


@pytest.mark.parametrize("name", [*TAMPER, "malformed"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_tampered_bytes_of_it_are_no_message_or_not_the_one_committed_to(kind, layout, name):
    form, (message, *_) = form_of(kind, layout)
    if name == "duplicated" and not (layout == "psyche" and form.leaves[0].kept):
        pytest.skip("compressed indices cannot repeat, and arrays have none")
    payload = wire.encode(message, form)
    found = [tamper(name, payload, message, form, np.random.default_rng(0)) for _ in range(2)]
    assert found[0] == found[1] != payload
    if name == "wrong_hash":
        assert wire.decode(found[0], form) is not None
        return
    why = {"not_finite": "a value is not finite", "duplicated": "not strictly ascending"}
    with pytest.raises(wire.WireError, match=why.get(name)):
        wire.decode(found[0], form)


def test_kinds_that_travel_otherwise_have_another_number():
    numbers = {id(packing): packing.number for kind in KINDS for packing in kind.packings.values()}
    assert len(set(numbers.values())) == len(numbers)


def test_a_tree_is_cut_at_its_leaves():
    assert [type(leaf_of(node_of(kind))) for kind in KINDS] == KINDS
