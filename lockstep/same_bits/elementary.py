"""Elementary functions of arrays, made of single operations, each rounded in one way.

float32 throughout, but for what few elements need: divisions and roots take a wider type, because
float32 alone is not rounded right on every device, and so do functions of a schedule.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TERMS = 14  # of the series of sine and cosine, up to pi / 2: the next is beyond float64's 2^-53
LOGARITHM_TERMS = 12  # of its series, up to (sqrt(2) - 1) / (sqrt(2) + 1)
# exp(r) = 1 + r + r^2 p(r) for |r| <= log(2) / 2 (Cephes, expf): within two units of the last place
EXPONENTIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
               1.6666665459e-1, 5.0000001201e-1)  # fmt: skip
# tanh(x) = x + x z p(z) for z = x^2, |x| < 0.625 (Cephes, tanhf), as close
TANGENT = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
           -3.33332819422e-1)  # fmt: skip
# Polynomials of w = -log(1 - x^2), in w - 2.5 below 5 and in sqrt(w) - 3 from there on
INVERSE_ERROR_NEAR = (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06,
                      0.00021858087, -0.00125372503, -0.00417768164, 0.246640727,
                      1.50140941)  # fmt: skip
INVERSE_ERROR_FAR = (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844,
                     0.00573950773, -0.0076224613, 0.00943887047, 1.00167406,
                     2.83297682)  # fmt: skip
# log(2), of which the first part has so few bits that its product with a small integer is exact
LOG_2 = (0.693359375, -2.12194440e-4)
LEAST_EXPONENT = -87.33654  # e to a smaller number is subnormal, which is 0 on some devices
LARGE = 2**20  # elements, which take longer to compute than to read again
NEAREST = lax.RoundingMethod.TO_NEAREST_EVEN


@dataclass(frozen=True)
class Arithmetic:
    """Functions of floating-point arrays.

    Attributes:
      zero: int32 [], a 0 that no compiler knows to be one.
    """

    zero: jax.Array

    @classmethod
    def in_program(cls, arguments: Any) -> "Arithmetic":
        """Return the arithmetic of a program some of whose arguments have an element."""
        leaves = [x for x in jax.tree.leaves(arguments) if x.size]
        floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
        first = _a_float((floats or leaves)[0])
        difference = lax.sub(first, first)  # NaN, for all that a compiler knows
        bits = lax.bitcast_convert_type(difference, np.int32)
        return cls(lax.select(lax.eq(difference, difference), bits, lax.full_like(bits, 0)))

    def apart(self, x: jax.Array) -> jax.Array:
        """Return x in a form that no compiler fuses with the operation that uses it.

        Its bits pass through an or with `zero`: an exclusive or, done twice, would be removed.
        """
        with jax.enable_x64(True):
            integer = f"int{8 * x.dtype.itemsize}"
            bits = lax.bitcast_convert_type(x, integer)
            zero = lax.convert_element_type(self.zero, integer)
            guarded = lax.bitwise_or(bits, lax.broadcast(zero, bits.shape))
            return lax.bitcast_convert_type(guarded, x.dtype)

    def times(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the product x * y of elements, rounded in one way."""
        return self.apart(lax.mul(x, y))

    def over(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the quotient x / y of elements, rounded once.

        float32 goes through float64, since float32 alone is not rounded right: XLA multiplies by
        the reciprocal of a divisor that is one number, in some programs and not in others, and on
        NVIDIA's GPUs it may miss by two last bits. In float64 either way is right to 2^-52, and no
        quotient of two float32 numbers is that close to halfway between two others.
        """
        x, y = alike(x, y)
        if x.dtype != np.float32:
            return self.apart(lax.div(x, y))
        with jax.enable_x64(True):
            return self._to_float32(
                lax.div(*(lax.convert_element_type(z, np.float64) for z in (x, y)))
            )

    def root(self, x: jax.Array) -> jax.Array:
        """Return the square root of elements, rounded once; through float64, as in `over`."""
        if x.dtype != np.float32:
            return self.apart(lax.sqrt(x))
        with jax.enable_x64(True):
            return self._to_float32(lax.sqrt(lax.convert_element_type(x, np.float64)))

    def _to_float32(self, wide: jax.Array) -> jax.Array:
        """Return a float64 quotient or root of float32 numbers, rounded to float32.

        A compiler may compute all three in float32, which gives the same number where float32 is
        rounded right. On NVIDIA's GPUs it is not, so there the float64 number is held apart.
        """
        guarded = lax.platform_dependent(wide, cuda=self.apart, default=lambda x: x)
        return lax.convert_element_type(guarded, np.float32)

    def once(self, function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """Return function(x), of x's shape and type, which a CPU computes once if x is large.

        XLA counts single operations as cheap, and computes them again for each use. Not so the
        result of a choice, even of this one, which `zero` always makes alike.
        """
        if x.size < LARGE:
            return function(x)
        chosen = partial(lax.cond, lax.eq(self.zero, 0), function, lambda x: x)
        result: jax.Array = lax.platform_dependent(x, cpu=chosen, default=function)
        return result

    def integer_power(self, x: jax.Array, exponent: int) -> jax.Array:
        """Return x to a constant exponent, by products."""
        if exponent < 0:
            one = lax.full_like(x, 1)
            return self.over(one, self.integer_power(x, -exponent))
        power = None
        for bit in bin(exponent)[2:] if exponent else "":
            power = x if power is None else self.times(power, power)
            if power is not x and bit == "1":
                power = self.times(power, x)
        return lax.full_like(x, 1) if power is None else power

    def power(self, x: jax.Array, exponent: jax.Array) -> jax.Array:
        """Return x to integer exponents that int32 holds, by products."""
        x, exponent = alike(x, lax.convert_element_type(exponent, np.int32))
        bits = lax.abs(exponent)

        def step(bit: int, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            power, square = state
            product = self.times(power, square)
            shifted = lax.shift_right_logical(bits, jnp.full_like(bits, bit))
            is_set = lax.bitwise_and(shifted, np.int32(1)) > 0
            return jnp.where(is_set, product, power), self.times(square, square)

        power, _ = lax.fori_loop(0, 32, step, (lax.full_like(x, 1), x))
        return jnp.where(exponent < 0, self.over(lax.full_like(x, 1), power), power)

    def exponential(self, x: jax.Array) -> jax.Array:
        """Return e to the float32 numbers x, within two units of the last place; 0 if subnormal."""
        return self.once(self._exponential, x)

    def _exponential(self, x: jax.Array) -> jax.Array:
        """Return e^x = 2^n e^r for the integer n nearest to x / log(2), and r = x - n log(2)."""
        clamped = lax.clamp(np.float32(LEAST_EXPONENT), x, np.float32(89))  # e^89 is infinite
        turns = lax.round(self.times(clamped, _full(x, 1 / math.log(2))), NEAREST)
        remainder = clamped
        for part in LOG_2:
            remainder = lax.sub(remainder, self.times(turns, _full(x, part)))
        series = self._polynomial(EXPONENTIAL, remainder)
        series = self.times(series, self.times(remainder, remainder))
        result = lax.add(lax.add(series, remainder), _full(x, 1))
        exponent = lax.convert_element_type(turns, np.int32)
        half = exponent >> np.int32(1)  # float32 has no 2^128, so the scale is two factors
        result = self.times(result, _power_of_two(half))
        result = self.times(result, _power_of_two(lax.sub(exponent, half)))
        return lax.select(lax.lt(x, _full(x, LEAST_EXPONENT)), _full(x, 0), result)

    def logistic(self, x: jax.Array) -> jax.Array:
        """Return 1 / (1 + e^-x) of float32 numbers."""
        one = _full(x, 1)
        return self.over(one, lax.add(one, self.exponential(lax.neg(x))))

    def tangent(self, x: jax.Array) -> jax.Array:
        """Return the hyperbolic tangent of float32 numbers, within two units of the last place."""
        one, two, size = _full(x, 1), _full(x, 2), lax.abs(x)
        square = self.times(x, x)
        near = self.times(self.times(self._polynomial(TANGENT, square), square), x)
        power = lax.add(self.exponential(self.times(two, size)), one)
        far = lax.sub(one, self.over(two, power))
        far = lax.select(lax.lt(x, _full(x, 0)), lax.neg(far), far)
        return lax.select(lax.lt(size, _full(x, 0.625)), lax.add(near, x), far)

    def logarithm(self, x: jax.Array) -> jax.Array:
        """Return the natural logarithm of float32 numbers; of 0 and subnormal ones -inf."""
        with jax.enable_x64(True):
            wide = lax.convert_element_type(x, np.float64)
            result = self._logarithm(wide, lax.sub(wide, _full(wide, 1)))
        least, nan = np.float32(2.0**-126), _full(x, math.nan)
        result = lax.select(lax.lt(x, _full(x, least)), _full(x, -math.inf), result)
        result = lax.select(lax.eq(x, _full(x, math.inf)), x, result)
        return lax.select(lax.bitwise_or(lax.le(x, _full(x, -least)), lax.ne(x, x)), nan, result)

    def logarithm_of_one_more(self, x: jax.Array) -> jax.Array:
        """Return log(1 + x) of float32 numbers."""
        with jax.enable_x64(True):
            less_one = lax.convert_element_type(x, np.float64)
            result = self._logarithm(lax.add(less_one, _full(less_one, 1)), less_one)
        result = lax.select(lax.eq(x, _full(x, -1)), _full(x, -math.inf), result)
        result = lax.select(lax.eq(x, _full(x, math.inf)), x, result)
        undefined = lax.bitwise_or(lax.lt(x, _full(x, -1)), lax.ne(x, x))
        return lax.select(undefined, _full(x, math.nan), result)

    def _logarithm(self, x: jax.Array, less_one: jax.Array) -> jax.Array:
        """Return the logarithm, float32, of float64 numbers x above 0, given x - 1 too.

        x = 2^n m with m from sqrt(1/2) to sqrt(2), and

            log(x) = n log(2) + 2 (s + s^3 / 3 + s^5 / 5 + ...),  s = (m - 1) / (m + 1)
        """
        bits = lax.bitcast_convert_type(x, np.int64)
        offset = np.int64(0x3FE6A09E667F3BCD)  # the bits of sqrt(1/2)
        exponent = (bits - offset) >> np.int64(52)
        mantissa = lax.bitcast_convert_type(bits - (exponent << np.int64(52)), np.float64)
        one = _full(mantissa, 1)
        # a sum that was rounded on the way to x is lost in x - 1, but not in `less_one`
        over_one = lax.select(lax.eq(exponent, np.int64(0)), less_one, lax.sub(mantissa, one))
        s = self.over(over_one, lax.add(mantissa, one))
        factors = [2 / (2 * n + 1) for n in reversed(range(LOGARITHM_TERMS))]
        series = self.times(self._polynomial(factors, self.times(s, s)), s)
        doublings = lax.convert_element_type(exponent, np.float64)
        result = lax.add(self.times(doublings, _full(s, math.log(2))), series)
        return lax.convert_element_type(result, np.float32)

    def inverse_error_function(self, x: jax.Array) -> jax.Array:
        """Return the y with erf(y) = x, of float32 numbers, to a relative 1e-6 (Giles, 2010)."""
        one = _full(x, 1)
        size = self.logarithm(self.times(lax.sub(one, x), lax.add(one, x)))
        size = lax.neg(size)
        near = self._polynomial(INVERSE_ERROR_NEAR, lax.sub(size, _full(x, 2.5)))
        far = self._polynomial(INVERSE_ERROR_FAR, lax.sub(self.root(size), _full(x, 3)))
        result = self.times(lax.select(lax.lt(size, _full(x, 5)), near, far), x)
        return lax.select(lax.eq(lax.abs(x), one), self.times(x, _full(x, math.inf)), result)

    def cosine(self, x: jax.Array) -> jax.Array:
        """Return the cosine of float32 numbers of moderate size, such as those of a schedule."""
        return self._turned(x, [(-1) ** n / math.factorial(2 * n) for n in range(TERMS)], odd=False)

    def sine(self, x: jax.Array) -> jax.Array:
        """Return the sine of float32 numbers of moderate size."""
        factors = [(-1) ** n / math.factorial(2 * n + 1) for n in range(TERMS)]
        return self._turned(x, factors, odd=True)

    def _turned(self, x: jax.Array, factors: list[float], *, odd: bool) -> jax.Array:
        """Return a function that changes its sign with each half turn, by its series.

        In float64, of the number's distance from the nearest multiple of pi; `factors` are those of
        its even powers, or of its odd ones.
        """
        with jax.enable_x64(True):
            wide = lax.convert_element_type(x, np.float64)
            turns = lax.round(self.times(wide, _full(wide, 1 / math.pi)), NEAREST)
            remainder = lax.sub(wide, self.times(turns, _full(wide, math.pi)))
            result = self._polynomial(factors[::-1], self.times(remainder, remainder))
            if odd:
                result = self.times(result, remainder)
            even = self.times(lax.floor(self.times(turns, _full(wide, 0.5))), _full(wide, 2.0))
            signed = lax.select(lax.ne(even, turns), lax.neg(result), result)
            return lax.convert_element_type(signed, x.dtype)

    def _polynomial(self, factors: "list[float] | tuple[float, ...]", x: jax.Array) -> jax.Array:
        """Return a series' polynomial factors[0] * x^(n - 1) + ... + factors[n - 1]."""
        result = _full(x, factors[0])
        for factor in factors[1:]:
            result = lax.add(self.times(result, x), _full(x, factor))
        return result


def alike(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """Return both operands of an elementary function in one shape; one may be a scalar."""
    shape = lax.broadcast_shapes(x.shape, y.shape)
    return [jnp.broadcast_to(z, shape) for z in (x, y)]


def _a_float(x: jax.Array) -> jax.Array:
    """Return the first element as a float32 number; of other arrays, with an integer's bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    first = jnp.real(jnp.ravel(x)[0])
    if jnp.issubdtype(x.dtype, jnp.floating):
        return first.astype(np.float32)
    return lax.bitcast_convert_type(first.astype(np.int32), np.float32)


def _full(like: jax.Array, value: float) -> jax.Array:
    return lax.full_like(like, like.dtype.type(value))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2^exponent, float32, for int32 exponents from -126 to 127."""
    bits = (exponent + np.int32(127)) << np.int32(23)
    return lax.bitcast_convert_type(bits, np.float32)
