"""The operations of a function by rules, one after the other: of what, and what each gives."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from lockstep.errors import brief
from lockstep.same_bits.evaluation import OPENED, NamedOperation
from lockstep.same_bits.products import PRODUCTS
from lockstep.transcript.trees import flatten
from parts.bits.in_numpy import in_numpy, moves
from parts.bits.opened import Arrays, Opened, on_host
from parts.bits.operation import INPUT, LONGEST_TEXT, RecordedOperation, hash_of, written

UPDATES = {"update_jaxpr", "update_consts"}  # of a scatter, which follow from its name


class Value(NamedTuple):
    """An array in a program, the number of the operation that gave it, and which result it is."""

    array: Any
    source: tuple[int, int]


class TakenOperation(NamedTuple):
    """An operation of a function by rules that was taken, with what it gave."""

    said: RecordedOperation
    operands: Arrays
    results: Arrays


class _Taking(Opened):
    """A program taken operation by operation, of which each is heard."""

    def __init__(self, heard: Callable[[TakenOperation], None]):
        super().__init__(self._take)
        self.heard, self.count = heard, 0
        self.compiled = dict[str, Callable[..., Arrays]]()

    def hear(
        self, what: str, primitive: str, settings: dict[str, Any], operands: Arrays, results: Arrays
    ) -> Arrays:
        """Hand an operation to who hears it; return its results, each with its source."""
        arrays = list(map(self._seen, operands))
        said = RecordedOperation(
            what=brief(what, LONGEST_TEXT),
            place="/".join(self.place),
            primitive=primitive,
            settings=written(settings),
            types=tuple((str(x.dtype), tuple(x.shape)) for x in (*arrays, *results)),
            operands=tuple(x.source if isinstance(x, Value) else hash_of(x) for x in operands),
            results=tuple(map(hash_of, results)),
        )
        self.heard(TakenOperation(said, arrays, results))
        self.count += 1
        return [Value(result, (self.count - 1, at)) for at, result in enumerate(results)]

    def _seen(self, value: Any) -> Any:
        return value.array if isinstance(value, Value) else value

    def _row(self, rows: Any, number: int) -> Any:
        return self.hear("row", "row", {"number": number}, [rows], [self._seen(rows)[number]])[0]

    def _stacked(self, rows: Arrays) -> Any:
        whole = jnp.stack([self._seen(row) for row in rows])
        return self.hear("stacked", "stacked", {}, rows, [whole])[0]

    def _take(self, equation: Any, inputs: Arrays) -> Arrays:
        primitive, name = equation.primitive, equation.params.get("name")
        if primitive.name == "optimization_barrier":  # gives what it takes
            return inputs
        arrays = list(map(self._seen, inputs))
        if not isinstance(name, NamedOperation):  # they make the zero of `Arithmetic`
            results = primitive.bind(*arrays, **equation.params)
            return list(results) if primitive.multiple_results else [results]
        asked = name.equation
        settings = {key: value for key, value in asked.params.items() if key not in UPDATES}
        if asked.primitive.name == "dot_general":
            whole = getattr(name.product, "product", name.product)  # of a broken chip, too
            settings["product"] = next(bits for bits, one in PRODUCTS.items() if one is whole)
        results = _results(equation.params["jaxpr"], arrays, self.compiled)
        operands = inputs[len(inputs) - len(asked.invars) :]  # behind that zero
        return self.hear(str(name), asked.primitive.name, settings, operands, results)


def by_operation(
    function: Callable[..., Any], heard: Callable[[TakenOperation], None], names: Sequence[str] = ()
) -> Callable[..., Any]:
    """Return a function by rules that takes its operations one after the other.

    `heard` is called with each, and before them with the arrays of the arguments, after them with
    those of the result. The function was not traced before, or is traced anew. `names` are those of
    its arguments.
    """

    def evaluated(*arguments: Any) -> Any:
        taking = _Taking(heard)
        named = namedtuple("Named", names)(*arguments) if names else arguments  # noqa: PYI024
        with OPENED(True):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        with jax.enable_x64(True):
            given = [
                taking.hear(f"input {path}", INPUT, {}, [], [jnp.asarray(array)])[0]
                for path, array in flatten(named).items()
            ]
            results = taking.run(program, given)
        whole = jax.tree.unflatten(jax.tree.structure(shapes), map(taking._seen, results))
        for path, result in zip(flatten(whole), results, strict=True):
            taking.hear(f"output {path}", "output", {}, [result], [taking._seen(result)])
        return whole

    return evaluated


def _results(rule: ClosedJaxpr, inputs: Arrays, compiled: dict[str, Any]) -> Arrays:
    """Return what the rule of an operation gives here; moves are left to NumPy."""
    if len(rule.jaxpr.eqns) == 1 and moves(rule.jaxpr.eqns[0]):
        return Opened(in_numpy).run(rule, [on_host(x) for x in inputs])
    text = str(id(rule)) if rule.consts else str(rule)  # many operations have the same
    if text not in compiled:
        compiled[text] = jax.jit(jaxpr_as_fun(rule))
    return list(compiled[text](*inputs))
