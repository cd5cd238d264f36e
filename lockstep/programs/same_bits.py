"""Functions whose bits depend on the operands alone: on no compiler, instruction set or thread.

A single operation of IEEE 754 (a sum, a product, a quotient, a root) is rounded in one way. Three
things let bits differ nevertheless, and each has its remedy here:

- a compiler contracts a product and a sum into one operation, which rounds once: `apart`
- sums of many numbers are taken in some order: `total` has one, `product` is exact in any
- libraries approximate other functions: `power`, `cosine` and `exponential` are made of single
  operations
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from lockstep.optim.optimizer import Tree

UNROLLED = 16  # rows that are added without a loop
EXACT = 53  # bits of an integer that float64 holds
COSINE_TERMS = 14  # of its series, up to pi / 2: the next is beyond float64's 2^-53
EXPONENTIAL_TERMS = 15  # of its series, up to log(2) / 2
DotDimensions = tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Arithmetic:
    """Functions of floating-point arrays.

    Attributes:
      zero: int32 [], a 0 that no compiler knows to be one.
    """

    zero: jax.Array

    @classmethod
    def from_step(cls, step: jax.Array) -> "Arithmetic":
        """Return the arithmetic of a program that is given its step, int32 [], at least 0."""
        return cls(step >> 31)

    def apart(self, x: jax.Array) -> jax.Array:
        """Return x in a form that no compiler fuses with the operation that uses it.

        Its bits pass through an or with `zero`: an exclusive or, done twice, would be removed.
        """
        with jax.enable_x64(True):
            integer = f"int{8 * x.dtype.itemsize}"
            bits = lax.bitcast_convert_type(x, integer)
            zero = lax.convert_element_type(self.zero, integer)
            same = lax.bitwise_or(bits, lax.broadcast(zero, bits.shape))
            return lax.bitcast_convert_type(same, x.dtype)

    def times(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return x * y, rounded."""
        return self.apart(lax.mul(x, y))

    def over(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return x / y, rounded once.

        Of float32 numbers in float64, since float32 alone is not rounded right: XLA multiplies by
        the reciprocal of a divisor that is one number, in some programs and not in others, and on
        NVIDIA's GPUs it may miss by two last bits. In float64 either way is right to 2^-52, and no
        quotient of two float32 numbers is that close to halfway between two others.
        """
        x, y = _alike(x, y)
        if x.dtype != np.float32:
            return self.apart(lax.div(x, y))
        with jax.enable_x64(True):
            wide = lax.div(*(lax.convert_element_type(z, np.float64) for z in (x, y)))
            return lax.convert_element_type(wide, np.float32)

    def total(self, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        """Return the sum over some axes, in an order that the shape alone decides.

        Rows are added one after the other; a long sum of few lanes is first cut into about as many
        lanes as rows.
        """
        others = [axis for axis in range(x.ndim) if axis not in axes]
        shape = tuple(x.shape[axis] for axis in others)
        count = math.prod(x.shape[axis] for axis in axes)
        rows = lax.transpose(x, (*axes, *others)).reshape(count, *shape)
        while len(rows) > UNROLLED * max(1, math.prod(shape)):
            lanes = 2 ** math.ceil(math.log2(len(rows)) / 2)
            padded = jnp.pad(rows, [(0, -len(rows) % lanes), *[(0, 0)] * len(shape)])
            rows = _added(padded.reshape(-1, lanes, *shape))
        return _added(rows)

    def product(self, x: jax.Array, y: jax.Array, dimensions: DotDimensions) -> jax.Array:
        """Return `lax.dot_general` of float32 arrays, exact but for the rounding of its operands.

        Each operand is rounded to integers, on a scale of its own for each vector that is summed
        over, a power of two. Their products and all sums of these are integers that float64 holds,
        so that every order gives the same. Of K terms, operands keep (53 - log2 K) / 2 bits, at
        most float32's 24: 23 of 64 terms, 20 of 4,096.

        Args:
          x: A float32 array.
          y: A float32 array.
          dimensions: As of `lax.dot_general`: ((contracting of x, of y), (batch of x, of y)).
        """
        (over_x, over_y), (batch_x, batch_y) = dimensions
        terms = math.prod(x.shape[axis] for axis in over_x)
        bits = min(24, (EXACT - math.ceil(math.log2(max(1, terms)))) // 2)
        with jax.enable_x64(True):
            whole_x, scale_x = _as_integers(x, over_x, bits)
            whole_y, scale_y = _as_integers(y, over_y, bits)
            exact = lax.dot_general(whole_x, whole_y, dimensions)
            scale_x = _result_scale(scale_x, over_x, batch_x, after=y.ndim - len(over_y + batch_y))
            scale_y = _result_scale(scale_y, over_y, batch_y, before=x.ndim - len(over_x + batch_x))
            scaled = lax.mul(exact, jnp.broadcast_to(scale_x, exact.shape))
            scaled = lax.mul(scaled, jnp.broadcast_to(scale_y, exact.shape))
            return lax.convert_element_type(scaled, np.float32)

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
        x, exponent = _alike(x, lax.convert_element_type(exponent, np.int32))
        left = lax.abs(exponent)

        def step(bit: int, so_far: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            power, square = so_far
            taken = self.times(power, square)
            is_set = lax.bitwise_and(lax.shift_right_logical(left, jnp.full_like(left, bit)), 1) > 0
            return jnp.where(is_set, taken, power), self.times(square, square)

        power, _ = lax.fori_loop(0, 32, step, (lax.full_like(x, 1), x))
        return jnp.where(exponent < 0, self.over(lax.full_like(x, 1), power), power)

    def cosine(self, x: jax.Array) -> jax.Array:
        """Return the cosine of float32 numbers of moderate size, such as those of a schedule.

        In float64, by the series of the number's distance from the nearest multiple of pi.
        """
        with jax.enable_x64(True):
            wide = lax.convert_element_type(x, np.float64)
            turns, rest = self._nearest_multiple(wide, math.pi)
            factors = [(-1) ** n / math.factorial(2 * n) for n in range(COSINE_TERMS)]
            found = self._series(factors, self.times(rest, rest))
            even = self.times(lax.floor(self.times(turns, _full(wide, 0.5))), _full(wide, 2.0))
            signed = lax.select(lax.ne(even, turns), lax.neg(found), found)
            return lax.convert_element_type(signed, x.dtype)

    def exponential(self, x: jax.Array) -> jax.Array:
        """Return e to the float32 numbers x.

        In float64, by the series of the number's distance from the nearest multiple of log 2.
        """
        with jax.enable_x64(True):
            wide = lax.convert_element_type(x, np.float64)
            wide = lax.clamp(_full(wide, -700.0), wide, _full(wide, 700.0))  # beyond float32
            doublings, rest = self._nearest_multiple(wide, math.log(2))
            factors = [1 / math.factorial(n) for n in range(EXPONENTIAL_TERMS)]
            scale = _power_of_two(lax.convert_element_type(doublings, np.int64))
            found = self.times(self._series(factors, rest), scale)
            return lax.convert_element_type(found, x.dtype)

    def _nearest_multiple(self, x: jax.Array, unit: float) -> tuple[jax.Array, jax.Array]:
        """Return which multiple of a unit is nearest to float64 numbers, and how far they are."""
        turns = lax.round(self.times(x, _full(x, 1 / unit)), _NEAREST)
        return turns, lax.sub(x, self.times(turns, _full(x, unit)))

    def _series(self, factors: list[float], x: jax.Array) -> jax.Array:
        """Return the sum of factors[n] * x**n, from its last term on."""
        found = _full(x, factors[-1])
        for factor in factors[-2::-1]:
            found = lax.add(self.times(found, x), _full(x, factor))
        return found


_NEAREST = lax.RoundingMethod.TO_NEAREST_EVEN


def _alike(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    """Return both operands in one shape; one of them may be a scalar."""
    shape = lax.broadcast_shapes(x.shape, y.shape)
    return [jnp.broadcast_to(z, shape) for z in (x, y)]


def _full(like: jax.Array, value: float) -> jax.Array:
    return lax.full_like(like, np.float64(value))


def _added(rows: jax.Array) -> jax.Array:
    """Return the sum over the first axis, one row after the other."""
    if not len(rows):
        return jnp.zeros(rows.shape[1:], rows.dtype)
    if len(rows) <= UNROLLED:
        found = rows[0]
        for row in range(1, len(rows)):
            found = lax.add(found, rows[row])
        return found

    def add(row: int, so_far: jax.Array) -> jax.Array:
        return lax.add(so_far, lax.dynamic_index_in_dim(rows, row, keepdims=False))

    return lax.fori_loop(1, len(rows), add, rows[0])


def _as_integers(x: jax.Array, over: tuple[int, ...], bits: int) -> tuple[jax.Array, jax.Array]:
    """Return x as float64 integers up to 2**bits, and the power of two that they are counted in.

    The power is that of the largest magnitude over the axes `over`, which are 1 long in it.
    """
    magnitude = lax.bitwise_and(lax.bitcast_convert_type(x, np.int32), np.int32(0x7FFFFFFF))
    largest = jnp.max(magnitude, over, keepdims=True, initial=0)  # of floats, as of their bits
    exponent = lax.convert_element_type(largest >> np.int32(23), np.int64) - 126  # |x| < 2**it
    inverse = _power_of_two(bits - exponent)
    wide = lax.convert_element_type(x, np.float64)
    whole = lax.round(lax.mul(wide, jnp.broadcast_to(inverse, x.shape)), _NEAREST)
    return whole, _power_of_two(exponent - bits)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Return 2**exponent as float64, of int64 exponents that it has."""
    return lax.bitcast_convert_type((exponent + np.int64(1023)) << np.int64(52), np.float64)


def _result_scale(
    scale: jax.Array,
    over: tuple[int, ...],
    batch: tuple[int, ...],
    before: int = 0,
    after: int = 0,
) -> jax.Array:
    """Return an operand's scale with the axes of the product: batch, x's own, y's own."""
    own = [axis for axis in range(scale.ndim) if axis not in (*over, *batch)]
    turned = lax.transpose(scale, (*batch, *own, *over))
    lead = tuple(scale.shape[axis] for axis in batch)
    rest = tuple(scale.shape[axis] for axis in own)
    return turned.reshape(*lead, *[1] * before, *rest, *[1] * after)


# ---- What each operation of JAX becomes ----

Rule = Callable[[Arithmetic, list[Any], dict[str, Any]], jax.Array]

# Results that are rounded in one way, or are some of the operands: whatever computes them.
ONE_WAY = {
    "abs", "add", "all_gather", "and", "argmax", "argmin", "bitcast_convert_type",
    "broadcast_in_dim", "ceil", "clamp", "concatenate", "convert_element_type", "copy",
    "dynamic_slice", "dynamic_update_slice", "eq", "floor", "gather", "ge", "gt", "iota",
    "is_finite", "le", "lt", "max", "min", "ne", "neg", "pad", "reduce_and", "reduce_max",
    "reduce_min", "reduce_or", "reduce_precision", "reshape", "rev", "round", "scatter",
    "scatter-max", "scatter-min", "select_n", "sharding_constraint", "sign", "slice", "sort",
    "split", "squeeze", "stack", "stop_gradient", "sub", "tile", "top_k", "transpose", "unstack",
}  # fmt: skip


def _apart(operation: Any) -> Rule:
    """Return the rule of an operation that is rounded in one way, unless it is joined to others."""
    return lambda arithmetic, inputs, _: arithmetic.apart(operation(*inputs))


def _rsqrt(arithmetic: Arithmetic, inputs: list[Any], _: dict[str, Any]) -> jax.Array:
    root: jax.Array = arithmetic.apart(lax.sqrt(inputs[0]))
    return arithmetic.over(lax.full_like(root, 1), root)


RULES: dict[str, Rule] = {
    "mul": _apart(lax.mul),
    "div": lambda arithmetic, inputs, _: arithmetic.over(*inputs),
    "square": _apart(lax.square),
    "sqrt": _apart(lax.sqrt),
    "rsqrt": _rsqrt,
    "reduce_sum": lambda arithmetic, inputs, how: arithmetic.total(*inputs, how["axes"]),
    "dot_general": lambda arithmetic, inputs, how: arithmetic.product(
        *inputs, how["dimension_numbers"]
    ),
    "integer_pow": lambda arithmetic, inputs, how: arithmetic.integer_power(*inputs, how["y"]),
    "pow": lambda arithmetic, inputs, _: arithmetic.power(*inputs),
    "cos": lambda arithmetic, inputs, _: arithmetic.cosine(*inputs),
    "exp": lambda arithmetic, inputs, _: arithmetic.exponential(*inputs),
}

# ---- A function, evaluated by these rules ----

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "custom_jvp_call", "custom_vjp_call")


def same_bits(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a function of the same arguments, each of whose operations is rounded in one way.

    Its last argument is a step, int32 [], at least 0.
    """

    def evaluated(*arguments: Tree) -> Tree:
        return _evaluate(function, arguments)[0]

    return evaluated


def without_rule(function: Callable[..., Tree], *arguments: Tree) -> frozenset[str]:
    """Return the names of the operations of a function that have no rule: their bits may differ.

    The function is as in `same_bits`; its arguments may be shapes.
    """
    found: set[str] = set()

    def evaluate(*arguments: Tree) -> Tree:
        result, names = _evaluate(function, arguments)
        found.update(names)
        return result

    jax.eval_shape(evaluate, *arguments)
    return frozenset(found)


def _evaluate(function: Callable[..., Tree], arguments: Sequence[Tree]) -> tuple[Tree, set[str]]:
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    evaluation = _Evaluation(Arithmetic.from_step(arguments[-1]))
    leaves = evaluation.run(closed, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), evaluation.unruled


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation in progress.

    Attributes:
      arithmetic: What operations of numbers become.
      unruled: Names of the operations that have no rule, taken as they are.
    """

    arithmetic: Arithmetic
    unruled: set[str] = field(default_factory=set)

    def run(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Return the results of a jaxpr."""
        jaxpr = closed.jaxpr
        values: dict[Any, Any] = {}
        values.update(zip(jaxpr.constvars, closed.consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))

        def value(variable: Any) -> Any:
            if isinstance(variable, Literal):
                return np.asarray(variable.val, variable.aval.dtype)
            return values[variable]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [value(v) for v in equation.invars])
            values.update(zip(equation.outvars, results, strict=True))
        return [value(variable) for variable in jaxpr.outvars]

    def _apply(self, equation: Any, inputs: list[Any]) -> Sequence[Any]:
        """Return the results of one operation."""
        name, settings = equation.primitive.name, equation.params
        if name in CALLS:
            inside = next(settings[key] for key in ("jaxpr", "call_jaxpr") if key in settings)
            return self.run(_closed(inside), inputs)
        if name == "scan":
            return self._scan(equation, inputs)
        if name == "while":
            return self._while(settings, inputs)
        if name == "cond":
            index, *operands = inputs
            branches = [
                lambda *x, branch=branch: self.run(branch, x) for branch in settings["branches"]
            ]
            found: list[Any] = lax.switch(index, branches, *operands)
            return found
        floats = any(map(_is_float, (*equation.invars, *equation.outvars)))
        if floats and name not in ONE_WAY and not _adds_once(equation):
            if _has_rule(equation):
                return [RULES[name](self.arithmetic, inputs, settings)]
            self.unruled.add(name)
        results = equation.primitive.bind(*inputs, **settings)
        return results if equation.primitive.multiple_results else [results]

    def _scan(self, equation: Any, inputs: list[Any]) -> list[Any]:
        settings, body = equation.params, equation.params["jaxpr"]
        # settings count them otherwise in each version of JAX: rows have an axis more than inside
        rows = sum(_ranks_differ(equation.invars, body.jaxpr.invars))
        carried = len(equation.outvars) - sum(_ranks_differ(equation.outvars, body.jaxpr.outvars))
        last = len(inputs) - rows
        first = last - carried

        def step(carry: list[Any], row: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(body, [*inputs[:first], *carry, *row])
            return results[:carried], results[carried:]

        carry, found = lax.scan(
            step, inputs[first:last], inputs[last:],
            settings["length"], settings["reverse"], settings["unroll"],
        )  # fmt: skip
        return [*carry, *found]

    def _while(self, settings: dict[str, Any], inputs: list[Any]) -> list[Any]:
        first = settings["cond_nconsts"]
        last = first + settings["body_nconsts"]
        of_test, of_body, carry = inputs[:first], inputs[first:last], inputs[last:]
        found: list[Any] = lax.while_loop(
            lambda carry: self.run(settings["cond_jaxpr"], [*of_test, *carry])[0],
            lambda carry: self.run(settings["body_jaxpr"], [*of_body, *carry]),
            carry,
        )
        return found


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _has_rule(equation: Any) -> bool:
    """Return whether a rule exists for an operation: in float32, and for integer powers only."""
    if equation.primitive.name == "pow":
        exponent = equation.invars[1].aval.dtype
        if not (jnp.issubdtype(exponent, jnp.integer) and np.can_cast(exponent, np.int32)):
            return False
    floats = [v for v in (*equation.invars, *equation.outvars) if _is_float(v)]
    return equation.primitive.name in RULES and all(v.aval.dtype == np.float32 for v in floats)


def _ranks_differ(outside: Sequence[Any], inside: Sequence[Any]) -> list[bool]:
    return [a.aval.ndim != b.aval.ndim for a, b in zip(outside, inside, strict=True)]


def _adds_once(equation: Any) -> bool:
    """Return whether a scatter adds to no element twice, so that order does not matter."""
    return equation.primitive.name == "scatter-add" and equation.params["unique_indices"]


def _closed(jaxpr: Any) -> Any:
    return ClosedJaxpr(jaxpr, ()) if isinstance(jaxpr, Jaxpr) else jaxpr
