"""An operation as a record says it, and its rule: found again from these words alone."""

import json
from contextlib import suppress
from enum import Enum
from typing import Annotated, Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, primitives
from pydantic import Field

from lockstep.errors import LockstepError
from lockstep.files import loads
from lockstep.protocol.attestation import Hash
from lockstep.same_bits import rules
from lockstep.same_bits.elementary import Arithmetic
from lockstep.same_bits.products import PRODUCTS
from lockstep.tables.table import Table
from lockstep.transcript.trees import tree_hash
from parts.bits.in_numpy import in_numpy
from parts.bits.opened import Arrays, Opened, on_host
from parts.bits.tree import leaf
from pipeline.stage.keys import digest

LONGEST_TEXT, LONGEST_SETTINGS, MOST_ARRAYS = 400, 4000, 2**12
INPUT = "input"  # what is computed in no operation
MOST_ELEMENTS = 2**27  # of an array that is computed for a stranger
BoundedText = Annotated[str, Field(max_length=LONGEST_TEXT)]
Size = Annotated[int, Field(ge=0)]
Type = tuple[BoundedText, Annotated[tuple[Size, ...], Field(max_length=32)]]
# Settings that are no plain numbers, by their names in `lax`
KINDS = {"GatherDimensionNumbers", "ScatterDimensionNumbers", "GatherScatterMode", "Precision",
         "RoundingMethod"}  # fmt: skip
# Whose settings hold a program, or which JAX lists under no name
BY_FUNCTION = {"scatter": lax.scatter, "scatter-add": lax.scatter_add, "scatter-max":
               lax.scatter_max, "scatter-min": lax.scatter_min, "split": lax.split,
               "tile": lax.tile}  # fmt: skip
# Which depend on more than operands, or of which a stranger's settings could take for ever
NOT_ALONE = {"all_gather", "conv_general_dilated", "device_put", "reduce_window_max",
             "reduce_window_min", "reduce_window_sum", "sharding_constraint"}  # fmt: skip
ALLOWED = (rules.ONE_WAY | rules.OF_INTEGERS | set(rules.RULES)) - NOT_ALONE
PRIMITIVES = {x.name: x for x in vars(primitives).values() if getattr(x, "name", "") in ALLOWED}
# What is no operation of JAX: a row that a loop takes, all that it gives, and what a function gives
ALONE: dict[str, Any] = {
    "row": lambda inputs, settings: [inputs[0][settings["number"]]],
    "stacked": lambda inputs, _: [np.stack(inputs)],
    "output": lambda inputs, _: inputs,
}


class RecordedOperation(Table):
    """An operation: all that its result depends on, and the hash of that."""

    what: BoundedText
    """Its name with types and a line of code; of an input or output of the function, its path."""
    place: BoundedText
    """The loops that it is in, each with its iteration."""
    primitive: BoundedText
    """What JAX calls it; "input", or a name in `ALONE`, where it does not."""
    settings: Annotated[str, Field(max_length=LONGEST_SETTINGS)] | None
    """What the primitive is told besides its operands, as JSON; null where JSON cannot say it."""
    types: Annotated[tuple[Type, ...], Field(max_length=MOST_ARRAYS)]
    """Type and shape of its operands, and then of its results."""
    operands: Annotated[tuple[tuple[Size, Size] | Hash, ...], Field(max_length=MOST_ARRAYS)]
    """Of each, what gives it and which result of that it is; of a constant its hash."""
    results: Annotated[tuple[Hash, ...], Field(max_length=MOST_ARRAYS)]
    """Hash of each result."""

    @property
    def shown(self) -> str:
        """What it is, where, and of which shapes, for a reader."""
        types = [f"{dtype}{list(shape)}" for dtype, shape in self.types]
        types.insert(len(self.operands), "->")
        return f"{self.what}, {self.place or 'in no loop'}: {' '.join(types)}"

    def described(self, number: int) -> Hash:
        """Return the hash of what it is, as the operation of this number, whatever it gives."""
        return digest([number, self.model_dump(mode="json", exclude={"results"})])

    def leaf(self, number: int) -> bytes:
        """Return its leaf in the tree over what each operation is, and gives."""
        return leaf(self.described(number), *self.results)


def hash_of(array: Any) -> Hash:
    """Return the hash of an array, as of any tree."""
    return tree_hash([on_host(array)])


def written(settings: dict[str, Any]) -> str | None:
    """Return settings of a primitive as JSON; None where it cannot say one, as of a device."""
    with suppress(TypeError):
        text = json.dumps({name: _plain(settings[name]) for name in sorted(settings)})
        return text if len(text) <= LONGEST_SETTINGS else None
    return None


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it, if it can."""
    if isinstance(value, Enum):
        return {type(value).__name__: value.name}
    if isinstance(value, tuple | list):
        items = [_plain(item) for item in value]
        return {type(value).__name__: items} if hasattr(value, "_fields") else items
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, float):  # JSON has no NaN
        return {"float": value.hex()}
    return int(value) if isinstance(value, np.integer) else value


def _meant(said: Any) -> Any:
    """Return the setting that `_plain` made JSON of."""
    if isinstance(said, list):
        return tuple(map(_meant, said))
    if not isinstance(said, dict):
        return said
    ((kind, value),) = said.items()
    if kind in KINDS:
        known = getattr(lax, kind)
        return known[value] if issubclass(known, Enum) else known(*_meant(value))
    return {"dtype": np.dtype, "float": float.fromhex}[kind](value)


def recomputed(operation: RecordedOperation, inputs: Arrays) -> Arrays:
    """Return what an operation gives by its rule, computed in NumPy. It may be a stranger's.

    Raises:
      Exception: The operation cannot be computed alone, or is larger than is computed for others.
    """
    said = loads(operation.settings or "")
    settings = {name: _meant(value) for name, value in said.items()}
    shapes = [jax.ShapeDtypeStruct(shape, np.dtype(name)) for name, shape in operation.types]
    if operation.primitive in ALONE:
        results = ALONE[operation.primitive](inputs, settings)
    else:
        is_wide = any(shape.dtype.itemsize == 8 for shape in shapes)
        with jax.enable_x64(is_wide):  # as where it was asked for
            rule = _rule(operation.primitive, settings, shapes[: len(inputs)])
        with jax.enable_x64(True):
            results = Opened(_bounded).run(rule, [np.int32(0), *inputs])
    found = [(x.dtype.name, x.shape) for x in results]
    if found != list(operation.types[len(inputs) :]):
        raise LockstepError(f"results of types {found}")
    return list(results)


def _rule(name: str, settings: dict[str, Any], shapes: Arrays) -> ClosedJaxpr:
    """Return the rule of a primitive, of the zero of `Arithmetic` and of operands."""
    product, zero = PRODUCTS[settings.pop("product", 20)], np.int32(0)

    def asked(*inputs: jax.Array) -> Any:
        if name in BY_FUNCTION:
            return BY_FUNCTION[name](*inputs, **settings)
        return PRIMITIVES[name].bind(*inputs, **settings)

    as_it_is = jax.make_jaxpr(asked)(*shapes)
    if not as_it_is.eqns or rules.is_exact(*as_it_is.eqns):  # none: a conversion to what it is
        return jax.make_jaxpr(lambda _, *inputs: asked(*inputs))(zero, *shapes)
    (equation,) = as_it_is.eqns
    if not rules.has_rule(equation):
        raise LockstepError("no rule")

    def by_rule(zero: jax.Array, *inputs: jax.Array) -> jax.Array:
        numbers = rules.Numbers(Arithmetic(zero), product)
        return rules.apply_rule(numbers, equation, list(inputs))

    return jax.make_jaxpr(by_rule)(zero, *shapes)


def _bounded(equation: Any, inputs: Arrays) -> Arrays:
    """Return the results of an operation in NumPy, if they are of a bounded size."""
    if any(variable.aval.size > MOST_ELEMENTS for variable in equation.outvars):
        raise LockstepError(f"arrays of more than {MOST_ELEMENTS:,} elements")
    return in_numpy(equation, inputs)
