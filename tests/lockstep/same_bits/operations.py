"""Each operation of JAX that has an example, of each type; as a program, a hash of what is taken.

Operands are made with NumPy, so that they are the same wherever this runs. None is subnormal, and
all NaN count alike: these two are not the same everywhere.
"""

import hashlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives

from lockstep.same_bits.evaluation import same_bits, without_rule

INTEGERS = ("bool", "int8", "int32", "uint32", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
TYPES = (*INTEGERS, *FLOATS, "complex64")
WIDTHS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
AT = np.int32([2, 0, 3, 2])  # a place is named twice
ONCE = np.int32([2, 0, 3, 1])
BY = ("and", "or", "xor", "sum", "prod", "max", "min")
MATRIX = (((1,), (1,)), ((), ()))
PADDED = [(1, 1, 0), (0, 2, 1)]
SPECIAL = (0.0, -0.0, 0.5, 1.5, 2.5, -2.5, 3e9, -3e9, 1e38, np.inf, -np.inf, np.nan)

Example = Callable[[Any, Any], Any]


def placed(name: str, **settings: Any) -> Example:
    """An example that writes rows to places, one of them twice unless they are unique."""
    at = ONCE if settings else AT
    return lambda x, y: getattr(x.at[at], name)(y, **settings)


def reduced(name: str) -> Example:
    return lambda x, _: getattr(lax, name)(x, (1,))


def windows(operation: Callable, first: Callable[[Any], Any]) -> Example:
    def reduce(x: Any, _: Any) -> Any:
        start = np.asarray(first(x.dtype), x.dtype)
        return lax.reduce_window(x, start, operation, (2, 2), (1, 1), "VALID")

    return reduce


def least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def drawn(name: str, *arguments: Any) -> Example:
    """An example of random numbers, whose key's data are integers of 32 bits."""

    def draw(x: Any, _: Any) -> Any:
        key = jax.random.wrap_key_data(x.reshape(-1)[:2], impl="threefry2x32")
        return jax.random.key_data(getattr(jax.random, name)(key, *arguments))

    return draw


def bits(x: Any, impl: str) -> Any:
    size = {"threefry2x32": 2, "rbg": 4}[impl]
    return jax.random.bits(jax.random.wrap_key_data(x.reshape(-1)[:size], impl=impl), (3,))


def callback(x: Any, _: Any) -> Any:
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


EXAMPLES: dict[str, Example] = {
    "argmax": lambda x, _: jnp.argmax(x, axis=1),
    "argmin": lambda x, _: jnp.argmin(x, axis=1),
    "bitcast_convert_type": lambda _, y: lax.bitcast_convert_type(y, WIDTHS[y.dtype.itemsize]),
    "broadcast_in_dim": lambda x, _: jnp.broadcast_to(x, (2, *x.shape)),
    "concatenate": lambda x, y: lax.concatenate([x, y], 0),
    "conv_general_dilated": lambda x, y: lax.conv_general_dilated(
        x[None], y[None, :, :4].T, (1,), "SAME", dimension_numbers=("NCW", "IOW", "NCW")
    ),
    **{f"convert_element_type to {t}": lambda x, _, t=t: x.astype(t) for t in TYPES},
    "cumlogsumexp": lambda x, _: lax.cumlogsumexp(x),
    "device_put": lambda x, _: jax.device_put(x),
    "dot_general": lambda x, y: lax.dot_general(x, y, MATRIX),
    "dot_general (to float32)": lambda x, y: lax.dot_general(
        x, y, MATRIX, preferred_element_type=np.float32
    ),
    "dynamic_slice": lambda x, _: lax.dynamic_slice(x, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (1, 1)),
    "fft": lambda x, _: lax.fft(x, "fft", (6,)),
    "gather": lambda x, _: x[AT],
    "integer_pow": lambda x, _: lax.integer_pow(x, 5),
    "integer_pow (negative)": lambda x, _: lax.integer_pow(x, -2),
    "iota": lambda x, _: lax.iota(x.dtype, 5),
    "pad": lambda x, _: lax.pad(x, jnp.zeros((), x.dtype), PADDED),
    "pow (of an array)": lambda x, y: lax.pow(x, y),
    "pow": lambda x, y: lax.pow(x, y.astype(np.int32) % 5 if x.dtype != bool else y),
    "pure_callback": callback,
    "random_bits": lambda x, _: bits(x, "threefry2x32"),
    "random_bits (rbg)": lambda x, _: bits(x, "rbg"),
    "random_clone": drawn("clone"),
    "random_fold_in": drawn("fold_in", 7),
    "random_seed": lambda x, _: jax.random.key_data(jax.random.key(x[0, 0].astype(np.int32))),
    "random_split": drawn("split"),
    "random_unwrap": drawn("clone"),
    "random_wrap": drawn("clone"),
    **{f"reduce_{n}": reduced(f"reduce_{n}") for n in BY},
    "reduce_precision": lambda x, _: lax.reduce_precision(x, 5, 7),
    "reduce_window_max": windows(lax.max, least),
    "reduce_window_min": windows(lax.min, lambda dtype: jnp.iinfo(dtype).max),
    "reduce_window_sum": windows(lax.add, lambda _: 0),
    "reshape": lambda x, _: x.reshape(-1),
    "rev": lambda x, _: x[::-1],
    "rng_bit_generator": lambda x, _: lax.rng_bit_generator(
        jnp.zeros(4, np.uint32) + (x.dtype == np.uint32), (3,)
    ),
    "round": lambda x, _: [lax.round(x, way) for way in lax.RoundingMethod],
    "scatter": placed("set", unique_indices=True),
    "scatter (of equal places)": placed("set"),
    "scatter (of one place)": lambda x, y: x.at[:, -1].set(y[:, 0]),
    "scatter-add": placed("add"),
    "scatter-add (unique)": placed("add", unique_indices=True),
    "scatter-max": placed("max"),
    "scatter-min": placed("min"),
    "scatter-mul": placed("mul"),
    "scatter-sub": lambda x, y: jax.lax.scatter_sub(
        x, AT[:, None], y, lax.ScatterDimensionNumbers((1,), (0,), (0,))
    ),
    "select_n": lambda x, y: lax.select_n(jnp.zeros(x.shape, bool).at[0].set(True), x, y),
    "slice": lambda x, _: x[1:3, ::2],
    "sort": lambda x, y: lax.sort([x[0], y[0]], num_keys=1),
    "sort (unstable)": lambda x, y: lax.sort([x[0], y[0]], num_keys=1, is_stable=False),
    "sort (of keys alone, unstable)": lambda x, _: lax.sort(x, is_stable=False),
    "split": lambda x, _: lax.split(x, (1, 3)),
    "squeeze": lambda x, _: lax.squeeze(x[:1], (0,)),
    "stack": lambda x, y: jnp.stack([x, y]),
    "threefry2x32": lambda x, y: primitives.threefry2x32_p.bind(*x[:2], *y[:2]),
    "tile": lambda x, _: jnp.tile(x, (2, 1)),
    "top_k": lambda x, _: lax.top_k(x, 2),
    "transpose": lambda x, _: x.T,
    "unstack": lambda x, _: jnp.unstack(x),
    "approx_top_k": lambda x, _: lax.approx_max_k(x, 2),
    "cholesky": lambda x, _: lax.linalg.cholesky(x[:, :4]),
    "eigh": lambda x, _: lax.linalg.eigh(x[:, :4]),
    "qr": lambda x, _: jnp.linalg.qr(x),
    "reduce": lambda x, _: lax.reduce(x, np.ones((), x.dtype), lambda x, y: x - y, (1,)),
    "rng_uniform": lambda x, y: primitives.rng_uniform_p.bind(x[0, 0], y[0, 0], shape=(3,)),
    "select_and_scatter_add": lambda x, _: jax.grad(
        lambda x: windows(lax.max, least)(x, x).sum()
    )(x),
    "svd": lambda x, _: jnp.linalg.svd(x),
    "triangular_solve": lambda x, y: lax.linalg.triangular_solve(x[:, :4], y),
    **{n: lambda x, _, n=n: getattr(lax, n)(x) for n in ("cummax", "cummin", "cumprod", "cumsum")},
}  # fmt: skip


def known() -> dict[str, Any]:
    """Return the operations of JAX by their names."""
    of_modules = ((module, name) for module in (primitives, lax) for name in dir(module))
    found = [getattr(module, name) for module, name in of_modules if name.endswith("_p")]
    return {primitive.name: primitive for primitive in found}


def examples() -> dict[str, Example]:
    """Return those above, and of each other operation that takes one, two or three arrays one."""
    found = dict(EXAMPLES)
    for name, primitive in known().items():
        if name not in found:
            found[name] = lambda x, y, primitive=primitive: _bound(primitive, x, y)
    return found


def _bound(primitive: Any, x: Any, y: Any) -> Any:
    """Return the result of an operation of one array, or of two, or of three."""
    named = getattr(lax, primitive.name, primitive.bind)
    for call in (named, primitive.bind):
        for operands in ((x,), (x, y), (x, x, y)):
            try:
                return jax.tree.leaves(call(*operands)) and call(*operands)
            except Exception:  # noqa: BLE001, S110  (another number of operands is tried)
                pass
    raise TypeError(primitive.name)


def operands(dtype: str) -> tuple[Any, Any]:
    """Return two arrays of a type, [4, 6]: of many sizes, with the numbers that are special."""
    draw = np.random.default_rng(0)
    wide = draw.standard_normal((2, 4, 6)) * 10.0 ** draw.integers(-3, 4, (2, 4, 6))
    if dtype in FLOATS:
        wide[0].reshape(-1)[: len(SPECIAL)] = SPECIAL
    with np.errstate(all="ignore"):
        x, y = wide.astype(jnp.dtype(dtype)) if dtype != "bool" else wide > 0
    return x, y


def equations(function: Example, dtype: str) -> set[str] | None:
    """Return the names of a function's operations; None if it takes no arrays of this type."""
    try:
        closed = jax.make_jaxpr(function)(*operands(dtype))
    except (TypeError, ValueError, NotImplementedError, KeyError, AttributeError):
        return None
    return {equation.primitive.name for equation in _within(closed.jaxpr)}


def _within(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation
        inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
        if inner is not None:
            yield from _within(getattr(inner, "jaxpr", inner))


def outcomes(dtype: str) -> dict[str, frozenset[str]]:
    """Return what has no rule in each example that there is of a type; nothing if it is taken."""
    found = {}
    for name, function in examples().items():
        if name.partition(" ")[0] in (equations(function, dtype) or ()):
            found[name] = without_rule(function, *operands(dtype))
    return found


def hashes(dtype: str, types: list[str]) -> dict[str, str]:
    """Return the hash of each example's results that is taken, all computed by one program.

    Of conversions only those to one of `types`: not every CPU has float16.
    """
    others = tuple(f" to {name}" for name in {*TYPES} - {*types})
    found = outcomes(dtype)
    taken = [name for name in found if not (found[name] or name.endswith(others))]
    chosen = {name: function for name, function in examples().items() if name in taken}
    program = same_bits(lambda x, y: {name: chosen[name](x, y) for name in taken})
    return {name: hash_of(result) for name, result in program(*operands(dtype)).items()}


def hash_of(result: Any) -> str:
    """Return the hash of arrays, in which all NaN are one."""
    digest = hashlib.sha256()
    for leaf in map(np.asarray, jax.tree.leaves(result)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            leaf = np.where(np.isnan(leaf), np.zeros((), leaf.dtype), leaf)
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def main(types: list[str]) -> None:
    with jax.enable_x64(True):
        for dtype in types:
            for name, digest in hashes(dtype, types).items():
                print(f"{dtype} {name}", digest)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TYPES))
