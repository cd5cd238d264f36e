"""The operations of a function by rules, one after the other: what each gives, and its hash."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from lockstep.protocol.attestation import Hash
from lockstep.same_bits.evaluation import OPENED, NamedOperation
from lockstep.transcript.trees import tree_hash
from parts.bits.in_numpy import in_numpy, moves
from parts.bits.opened import Arrays, Opened, on_host


class TakenOperation(NamedTuple):
    """An operation of a function by rules that was taken, with what it gave."""

    place: str  # the loops that it is in, each with its iteration, as in "while[0]/scan[2]"
    name: str  # what it is, of which types, and the line of code that asks for it
    program: ClosedJaxpr  # its rule
    inputs: Arrays
    results: Arrays

    @property
    def hash(self) -> Hash:
        """Hash of the operation's results, as of any tree."""
        return tree_hash([on_host(result) for result in self.results])


def by_operation(
    function: Callable[..., Any], heard: Callable[[TakenOperation], None]
) -> Callable[..., Any]:
    """Return a function by rules that takes its operations one after the other.

    `heard` is called with each. The function was not traced before, or is traced anew.
    """
    compiled: dict[str, Callable[..., Arrays]] = {}

    def take(equation: Any, inputs: Arrays) -> Arrays:
        if not isinstance(equation.params.get("name"), NamedOperation):
            results = equation.primitive.bind(*inputs, **equation.params)
            return list(results) if equation.primitive.multiple_results else [results]
        rule = equation.params["jaxpr"]
        results = _results(rule, inputs, compiled)
        heard(
            TakenOperation(
                "/".join(opened.place), str(equation.params["name"]), rule, inputs, results
            )
        )
        return results

    opened = Opened(take)

    def evaluated(*arguments: Any) -> Any:
        with OPENED(True):
            program, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        with jax.enable_x64(True):
            leaves = opened.run(program, [jnp.asarray(x) for x in jax.tree.leaves(arguments)])
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return evaluated


def _results(rule: ClosedJaxpr, inputs: Arrays, compiled: dict[str, Any]) -> Arrays:
    """Return what the rule of an operation gives here; moves are left to NumPy."""
    if len(rule.jaxpr.eqns) == 1 and moves(rule.jaxpr.eqns[0]):
        return Opened(in_numpy).run(rule, [on_host(x) for x in inputs])
    text = str(id(rule)) if rule.consts else str(rule)  # many operations have the same
    if text not in compiled:
        compiled[text] = jax.jit(jaxpr_as_fun(rule))
    return list(compiled[text](*inputs))


def recomputed(taken: TakenOperation) -> Arrays:
    """Return what the rule of an operation gives, all of it computed in NumPy."""
    with jax.enable_x64(True):
        return Opened(in_numpy).run(taken.program, [on_host(x) for x in taken.inputs])
