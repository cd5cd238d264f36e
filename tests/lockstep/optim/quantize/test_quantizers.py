"""Every quantizer: its equation in NumPy float64, and what all of them keep to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16

from lockstep.optim import quantize
from lockstep.optim.quantize import QSGD, Half, Integers, Levels

pack = jax.jit(quantize.pack, static_argnums=(1, 2))
unpack = jax.jit(quantize.unpack, static_argnums=(1, 2, 3))
BLOCK = 16
QUANTIZERS = {
    "bfloat16": Half(jnp.bfloat16),
    "float16": Half(jnp.float16),
    "int8": Integers(8, BLOCK),
    "int4": Integers(4, BLOCK),
    "qsgd8": QSGD(8, BLOCK),
    "qsgd4": QSGD(4, BLOCK),
    "two_bit": Levels(2, BLOCK),
    "sign": Levels(1, BLOCK),
}
each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
SHAPES = [(5, 7), (16,), ()]
BITS = {"int8": 8, "int4": 4, "qsgd8": 8, "qsgd4": 4, "two_bit": 2, "sign": 1}


def array(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def round_trip(name: str, x: np.ndarray) -> tuple[object, np.ndarray]:
    quantizer = QUANTIZERS[name]
    code = jax.device_get(jax.jit(quantizer.encode)(x))
    return code, np.asarray(jax.jit(quantizer.decode, static_argnums=1)(code, x.shape))


def expected(name: str, x: np.ndarray) -> np.ndarray:
    """What a code stands for, block by block."""
    if name in ("bfloat16", "float16"):
        return x.astype(bfloat16 if name == "bfloat16" else np.float16).astype(np.float64)
    flat, found = x.ravel().astype(np.float64), []
    for block in (flat[at : at + BLOCK] for at in range(0, flat.size, BLOCK)):
        size = np.abs(block)
        if name.startswith("int"):
            scale = size.max() / (2 ** (BITS[name] - 1) - 1)
            found.append(np.round(block / scale) * scale)
        elif name == "sign":
            found.append(np.sign(block) * size.mean())
        else:
            large = size > size.mean()
            means = np.where(large, size[large].mean() if large.any() else 0, size[~large].mean())
            found.append(np.sign(block) * means)
    return np.concatenate(found).reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in QUANTIZERS if not name.startswith("qsgd")])
def test_a_code_stands_for_what_the_equation_says(name, shape):
    x = array(shape)
    np.testing.assert_allclose(round_trip(name, x)[1], expected(name, x), atol=1e-6)


@pytest.mark.parametrize("name", ["qsgd8", "qsgd4"])
def test_qsgd_draws_a_neighbouring_level_and_is_right_on_average(name):
    levels = 2 ** (BITS[name] - 1) - 1
    x = array((4, BLOCK))
    norm = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    total, many = np.zeros(x.shape), 2000
    # in each copy other bits, of an element that stands in a block of its own, so other draws
    others = np.concatenate([np.tile(x.ravel(), (many, 1)), array((many, 1), 1)], axis=1)
    quantizer = QUANTIZERS[name]
    codes = jax.jit(jax.vmap(quantizer.encode))(others)
    decode = jax.jit(jax.vmap(lambda code: quantizer.decode(code, (x.size + 1,))))
    q = np.asarray(decode(codes))[:, :-1].reshape(many, *x.shape)
    assert (np.abs(q - x) <= norm / levels * (1 + 1e-5)).all()
    np.testing.assert_allclose(np.round(q * levels / norm), q * levels / norm, atol=1e-4)
    deviation = norm / levels / 2 / np.sqrt(many)  # at most, of a mean
    total = q.mean(axis=0) - x
    assert (np.abs(total) < 5 * deviation).all()


@each_quantizer
def test_zeros_stay_zeros_and_nothing_else_becomes_infinite(name):
    shape = (5, 7)
    np.testing.assert_array_equal(round_trip(name, np.zeros(shape, np.float32))[1], 0)
    for scale in (1e-38, 1e30):
        x = array(shape) * np.float32(scale)
        assert np.isfinite(round_trip(name, x)[1]).all()


@each_quantizer
def test_not_a_number_is_not_rounded_to_one(name):
    """So a receiver refuses the message."""
    x = array((5, 7))
    x[1, 2] = np.nan
    code, _ = round_trip(name, x)
    floats = [leaf for leaf in jax.tree.leaves(code) if leaf.dtype != np.uint8]
    assert not all(np.isfinite(leaf.astype(np.float32)).all() for leaf in floats)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_packed_numbers_come_back(bits):
    for size in (1, 7, 16, 35):
        numbers = np.random.default_rng(size).integers(2**bits, size=size).astype(np.uint8)
        blocks = np.pad(numbers, (0, -size % min(BLOCK, size))).reshape(-1, min(BLOCK, size))
        packed = pack(blocks, size, bits)
        assert packed.shape == (-(-size * bits // 8),) and packed.dtype == np.uint8
        expected = sum(int(n) << (bits * at) for at, n in enumerate(numbers))
        assert int.from_bytes(np.asarray(packed).tobytes(), "little") == expected
        np.testing.assert_array_equal(unpack(packed, size, bits, BLOCK), blocks)
