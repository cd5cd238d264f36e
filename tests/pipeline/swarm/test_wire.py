"""The wire: lossless, exact in size, and closed to bytes that are not a message."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.optim.adamw import adamw
from pipeline.optim.distro import Coefficients, distro
from pipeline.swarm import commitment, wire

PARAMS = {"embed": jnp.zeros((100, 64)), "layers": {"norm": jnp.zeros((2, 48))}}


def optimizer(one_bit: bool):
    return distro(
        lambda step: 0.1,
        compression_decay=0.9,
        compression_topk=5,
        compression_chunk=32,
        quantize_1bit=one_bit,
        stacked=("layers",),
    )


OPTIMIZERS = {
    "signs": optimizer(True),
    "values": optimizer(False),
    "dense": adamw(lambda step: 0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0),
}
each_kind = pytest.mark.parametrize("name", OPTIMIZERS)


def message_of(name: str) -> dict:
    optimizer = OPTIMIZERS[name]
    own, shared = optimizer.init(PARAMS)
    grads = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), PARAMS)
    own = optimizer.inner(grads, own, PARAMS, 1)
    return jax.device_get(optimizer.send(own, PARAMS, shared, 1)[0])


def encoded(name: str) -> tuple[bytes, wire.Form]:
    form = wire.form_of(OPTIMIZERS[name], PARAMS)
    return wire.encode(message_of(name), form), form


@each_kind
def test_decoding_gives_back_the_message_bit_for_bit(name):
    data, form = encoded(name)
    decoded, message = wire.decode(data, form), message_of(name)
    assert jax.tree.structure(decoded) == jax.tree.structure(message)
    for found, expected in zip(jax.tree.leaves(decoded), jax.tree.leaves(message), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert commitment.data_hash(1, 2, 3, wire.fields(decoded)) == commitment.data_hash(
        1, 2, 3, wire.fields(message)
    )


def test_sizes_are_what_the_format_says():
    # embed: 4 x 2 blocks of 25 x 32 places (u16); norm: 2 x 2 blocks of 24 places (u8); 5 kept
    blocks = [(8, 2), (4, 1)]
    sign_bytes = sum(12 + n * 5 * width + -(-n * 5 // 8) for n, width in blocks)
    value_bytes = sum(12 + n * 5 * width + n * 5 * 4 for n, width in blocks)
    assert len(encoded("signs")[0]) == 8 + sign_bytes
    assert len(encoded("values")[0]) == 8 + value_bytes
    assert len(encoded("dense")[0]) == 8 + sum(4 + 4 * x.size for x in jax.tree.leaves(PARAMS))


def test_example_of_the_documentation_byte_by_byte():
    like = {"w": Coefficients(np.array([[1, 3]], np.uint8), np.array([[False, True]]))}
    form = wire.Form(like, {"w": 4})
    assert wire.encode(like, form).hex(" ") == (
        "4c 53 57 50 01 01 01 00 01 00 00 00 02 00 00 00 04 00 00 00 01 03 02"
    )


@each_kind
def test_every_truncation_is_refused(name):
    data, form = encoded(name)
    for size in range(0, len(data), 7):
        with pytest.raises(wire.WireError):
            wire.decode(data[:size], form)
    with pytest.raises(wire.WireError, match="after the last parameter"):
        wire.decode(data + b"\0", form)


@each_kind
def test_flipped_bytes_never_crash_and_what_they_decode_to_encodes_alike(name):
    data, form = encoded(name)
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        mutated = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            mutated[rng.randrange(min(len(mutated), 400))] = rng.randrange(256)
        try:
            assert wire.encode(wire.decode(bytes(mutated), form), form) == bytes(mutated)
        except wire.WireError:
            refused += 1
    assert refused > 100


def test_places_out_of_range_or_out_of_order_are_refused():
    good = Coefficients(np.array([[1, 3]], np.uint8), np.array([[False, True]]))
    form = wire.Form({"w": good}, {"w": 4})
    for places, text in (([3, 1], "ascending"), ([1, 1], "ascending"), ([1, 4], "less than 4")):
        bad = {"w": good._replace(index_NK=np.array([places], np.uint8))}
        with pytest.raises(wire.WireError, match=text):
            wire.decode(wire.encode(bad, form), form)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["values", "dense"])
def test_values_that_are_no_numbers_are_refused(name, value):
    form = wire.form_of(OPTIMIZERS[name], PARAMS)
    bad = jax.tree.map(
        lambda x: np.full_like(x, value) if x.dtype == np.float32 else x, message_of(name)
    )
    with pytest.raises(wire.WireError, match="not finite"):
        wire.decode(wire.encode(bad, form), form)
