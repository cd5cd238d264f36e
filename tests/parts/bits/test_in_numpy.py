"""The reference in NumPy has XLA's bits where numbers are none, subnormal, -0 or out of range."""

import jax
import numpy as np
import pytest
from jax import lax

from parts.bits.in_numpy import in_numpy
from parts.bits.opened import Opened

REAL = [0.0, 1.0, 0.5, 1.5, 2.5, 0.3, np.inf, np.nan, 1e-40, 1.1754944e-38, 3e38, 8388609.0]
WHOLE = [0, 1, 2, 31, 32, 33, 100, 127]
TYPES = {"float32": REAL, "bfloat16": REAL, "int32": WHOLE, "int8": WHOLE}
ONE = [lax.abs, lax.neg, lax.sign]
TWO = [lax.add, lax.sub, lax.max, lax.min, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]
REAL_ONE = [lax.floor, lax.ceil, lax.is_finite, lax.round,
            lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN),
            lambda x: lax.reduce_max(x.reshape(-1, 8), (1,)),
            lambda x: lax.reduce_min(x.reshape(-1, 8), (1,)),
            *(lambda x, to=to: lax.convert_element_type(x, to)
              for to in ("float32", "bfloat16", "float16", "int32", "uint8"))]  # fmt: skip
REAL_TWO = [lambda x, y: lax.clamp(x, y, x)]
WHOLE_TWO = [lax.div, lax.rem, lax.mul, lax.shift_left, lax.shift_right_arithmetic]


@pytest.mark.parametrize("dtype", TYPES)
def test_single_operations_have_the_bits_of_xla(dtype):
    is_real = dtype in ("float32", "bfloat16")
    some = np.array([*TYPES[dtype], *(-x for x in TYPES[dtype])]).astype(dtype)
    if not is_real:
        some = np.append(some, [np.iinfo(dtype).min, np.iinfo(dtype).max]).astype(dtype)
    pairs = [x.reshape(-1) for x in np.meshgrid(some, some)]
    cases = [(function, pairs[:1]) for function in ONE + REAL_ONE * is_real]
    cases += [(function, pairs) for function in TWO + (REAL_TWO if is_real else WHOLE_TWO)]
    for function, arrays in cases:
        program = jax.make_jaxpr(function)(*arrays)
        (found,) = Opened(in_numpy).run(program, arrays)
        right = np.asarray(jax.jit(function)(*arrays))
        same = found.view(np.uint8) == right.view(np.uint8)
        same = same.reshape(len(right), -1).all(axis=1) | ((found != found) & (right != right))
        assert same.all(), (program, [x[~same] for x in (found, right)])
