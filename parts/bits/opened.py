"""A program evaluated one operation after the other, with its loops opened."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.same_bits.evaluation import Evaluation, NamedOperation

Arrays = list[Any]


def on_host(value: Any) -> np.ndarray:
    """Return an opened program's array in NumPy; of a key its numbers."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)


class Opened(Evaluation):
    """The evaluation of a program, whose loops are taken one iteration after the other."""

    def __init__(self, take: Callable[[Any, Arrays], Arrays]):
        """Evaluate each operation, loops aside, by take(equation, inputs)."""
        self.take, self.place = take, list[str]()

    def _apply(self, equation: Any, inputs: Arrays) -> Arrays:
        name, settings = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(settings, inputs)
        if name == "while":
            return self._while(settings, inputs)
        if name == "cond":
            index, *operands = inputs
            branches = settings["branches"]
            chosen = np.clip(self._seen(index), 0, len(branches) - 1)
            return self.run(branches[int(chosen)], operands)
        if name in ("jit", "pjit") and not isinstance(settings["name"], NamedOperation):
            return self.run(settings["jaxpr"], inputs)
        return self.take(equation, inputs)

    def _seen(self, value: Any) -> Any:
        """Return the array of a value, on which it depends what is taken next."""
        return value

    def _row(self, rows: Any, number: int) -> Any:
        return rows[number]

    def _stacked(self, rows: Arrays) -> Any:
        return jnp.stack(rows)

    @contextmanager
    def _within(self, loop: str, number: int) -> Iterator[None]:
        self.place.append(f"{loop}[{number}]")
        yield
        self.place.pop()

    def _scan(self, settings: dict[str, Any], inputs: Arrays) -> Arrays:
        body, length = settings["jaxpr"], settings["length"]
        first = settings["num_consts"]
        last = first + settings["num_carry"]
        constants, carry, rows = inputs[:first], inputs[first:last], inputs[last:]
        stacked: list[Arrays] = []
        for number in reversed(range(length)) if settings["reverse"] else range(length):
            with self._within("scan", number):
                of_row = [self._row(array, number) for array in rows]
                results = self.run(body, [*constants, *carry, *of_row])
            carry = results[: len(carry)]
            stacked.append(results[len(carry) :])
        if settings["reverse"]:
            stacked.reverse()
        avals = body.out_avals[len(carry) :]
        empty = [np.zeros((0, *aval.shape), aval.dtype) for aval in avals]
        whole = [self._stacked(list(column)) for column in zip(*stacked, strict=True)]
        return [*carry, *(whole if stacked else empty)]

    def _while(self, settings: dict[str, Any], inputs: Arrays) -> Arrays:
        first = settings["cond_nconsts"]
        last = first + settings["body_nconsts"]
        of_test, of_body, carry = inputs[:first], inputs[first:last], inputs[last:]
        for number in itertools.count():
            with self._within("while", number):
                if not self._seen(self.run(settings["cond_jaxpr"], [*of_test, *carry])[0]):
                    return carry
                carry = self.run(settings["body_jaxpr"], [*of_body, *carry])
        raise AssertionError("a loop ends")
