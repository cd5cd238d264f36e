"""The hash of what a function by rules computes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.same_bits.evaluation import same_bits
from lockstep.same_bits.operations import hash_of_operations
from lockstep.same_bits.products import in_blocks, in_float64

X = jax.ShapeDtypeStruct((4, 4), np.float32)
TABLE = np.arange(16, dtype=np.float32).reshape(4, 4)


def scanned(x, length=3, step=lambda carry: carry * 2 + 1, unroll=1):
    return jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length, unroll=unroll)[0]


def with_what_nobody_needs(x):
    jnp.exp(x)
    return x @ x + jnp.asarray(x, jnp.float32)


ALIKE = {
    "called": (lambda x: x @ x + x, lambda x: jax.jit(lambda y: y @ y)(x) + x),
    "unused": (lambda x: x @ x + x, with_what_nobody_needs),
    "a barrier": (lambda x: x @ x + x, lambda x: jax.lax.optimization_barrier(x @ x) + x),
    "a constant": (
        lambda x: x.astype(jnp.bfloat16) * jnp.asarray(TABLE, jnp.bfloat16),
        lambda x: x.astype(jnp.bfloat16) * jax.lax.convert_element_type(TABLE, jnp.bfloat16),
    ),
    "unrolled": (scanned, partial(scanned, unroll=3)),
}
UNLIKE = {
    "operation": (lambda x: x + x.T, lambda x: x - x.T),
    "order of operands": (lambda x: x - x.T, lambda x: x.T - x),
    "constant": (lambda x: x + TABLE, lambda x: x + TABLE * 2),
    "type": (lambda x: x + x.T, lambda x: x.astype(jnp.bfloat16) + x.T),
    "setting": (lambda x: x.sum(0), lambda x: x.sum(1)),
    "length of a loop": (scanned, partial(scanned, length=4)),
    "body of a loop": (scanned, partial(scanned, step=lambda carry: carry * 2 - 1)),
    "branch": (
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.lax.cond(x[0, 0] > 0, jnp.cos, jnp.sin, x),
    ),
    "result": (lambda x: (x, x.T), lambda x: (x.T, x)),
}


def hashes(functions, x=X):
    return [hash_of_operations(same_bits(function), x) for function in functions]


@pytest.mark.parametrize("name", ALIKE)
def test_what_changes_no_number_changes_no_hash(name):
    first, second = hashes(ALIKE[name])
    assert first == second


@pytest.mark.parametrize("name", UNLIKE)
def test_what_changes_a_number_changes_the_hash(name):
    first, second = hashes(UNLIKE[name])
    assert first != second


def test_shapes_are_in_the_hash():
    function, wide = lambda x: x + 1, jax.ShapeDtypeStruct((4, 5), np.float32)
    assert hashes([function]) != hashes([function], wide)


@pytest.mark.parametrize("numbers", [in_float64, in_blocks])
def test_a_products_precision_is_named_not_the_users(numbers):
    def function(x):
        return x @ x + jax.lax.conv(x[None, None], x[None, None, :1, :1], (1, 1), "SAME")[0, 0]

    with jax.default_matmul_precision("highest"):
        highest = hash_of_operations(same_bits(function, numbers), X)
    with jax.default_matmul_precision("bfloat16"):
        assert hash_of_operations(same_bits(function, numbers), X) == highest
