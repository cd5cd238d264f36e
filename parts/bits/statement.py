"""A dispute over one operation: a statement of two claims, which anybody judges who has no run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from lockstep.errors import LockstepError, expecting
from lockstep.files import check_regular_file, named_place
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from lockstep.transcript import tensorfile
from parts.bits.operation import MOST_ARRAYS, Arrays, RecordedOperation, hash_of, recomputed
from parts.bits.record import BitsClaim, BitsRecord, OfARun
from parts.bits.tree import leaf, path_of, top_of

MOST_BYTES = 2**30
RIGHT, WRONG, NOT_TOLD = "right", "WRONG", "not told: what is no number has one of several bits"
CLAIMS = "the first claim", "the second claim"
TreePath = Annotated[tuple[Hash, ...], Field(max_length=32)]
TreePaths = Annotated[tuple[TreePath, ...], Field(max_length=MOST_ARRAYS)]


class Statement(Table):
    """What two claims say of an operation; beside it lie its operands, and what the second has."""

    format: Literal[1] = 1
    """Version of the format."""
    claims: tuple[BitsClaim, BitsClaim]
    """What the roots of both stand for."""
    numbers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=MOST_ARRAYS)]
    """Of inputs and operations that give operands, and of the disputed one, which is the last."""
    operations: Annotated[
        tuple[RecordedOperation, ...], Field(min_length=1, max_length=MOST_ARRAYS)
    ]
    """These, as both claims have them; and the disputed one, as the second has it."""
    results: tuple[Hash, ...]
    """Hash of each result of the disputed one, as the first has them."""
    paths: tuple[TreePaths, TreePaths]
    """In each claim, the nodes beside the way of each of these to the top."""
    described: tuple[TreePath, TreePath]
    """And beside the way from what the disputed one is to the top of the program."""


class Judgement(NamedTuple):
    """What a statement shows."""

    statement: Statement
    says: tuple[str, str]  # of each claim: `RIGHT`, `WRONG` or `NOT_TOLD`
    first: str  # where the second differs from the rule; "" if nowhere


def write(
    path: Path, records: tuple[BitsRecord, BitsRecord], number: int, arrays: tuple[Arrays, Arrays]
) -> None:
    """Write the statement of two records that part at an operation.

    `arrays` are its operands and, as the second record has them, its results.
    """
    one, other = records
    sources = [x[0] for x in other.operations[number].operands if not isinstance(x, str)]
    numbers = (*sorted(set(sources)), number)
    paths = [tuple(path_of(record.tree, at) for at in numbers) for record in records]
    statement = Statement(
        claims=(one.claim, other.claim),
        numbers=numbers,
        operations=tuple(other.operations[at] for at in numbers),
        results=one.operations[number].results,
        paths=(paths[0], paths[1]),
        described=(path_of(one.program, number), path_of(other.program, number)),
    )
    named = {str(place): array for place, array in enumerate([*arrays[0], *arrays[1]])}
    specs = {name: tensorfile.spec_of(x.dtype, x.shape) for name, x in named.items()}
    metadata = {"statement": statement.model_dump_json()}
    tensorfile.write(
        named_place(path), specs, lambda name: tensorfile.pieces(named[name]), metadata
    )


def judge(path: Path) -> Judgement:
    """Compute the operation of a statement, which may be a stranger's, and say who is right.

    Raises:
      LockstepError: It proves nothing: it cannot be read, its claims are of unlike things, a path
        or an array does not belong to it, or its operation cannot be computed alone.
    """

    def check(what: str, found: object, expected: object) -> None:
        if found != expected:
            raise LockstepError(f"{path}: {what}: {found!r}, expected {expected!r}")

    statement, arrays = _read(path)
    *givers, disputed = statement.operations
    *earlier, number = statement.numbers
    for name in OfARun.model_fields:
        check(name, *(getattr(claim, name) for claim in statement.claims))
    for at, results in enumerate((statement.results, disputed.results)):
        claim, said = statement.claims[at], disputed.model_copy(update={"results": results})
        tops = [
            top_of(operation.leaf(place), place, claim.count, beside)
            for operation, place, beside in zip(
                (*givers, said), statement.numbers, statement.paths[at], strict=True
            )
        ]
        check(f"claims[{at}].top", tops, [claim.top] * len(tops))
        node = leaf(disputed.described(number))
        top = top_of(node, number, claim.count, statement.described[at])
        check(f"claims[{at}].program", top, claim.program)
    if statement.results == disputed.results:
        raise LockstepError(f"{path}: operation {number}: equal results, expected a dispute")
    given = {
        (place, at): result
        for place, giver in zip(earlier, givers, strict=True)
        for at, result in enumerate(giver.results)
        if place < number
    }
    sources = [x if isinstance(x, str) else given.get(x) for x in disputed.operands]
    check("arrays", [hash_of(x) for x in arrays], [*sources, *disputed.results])
    check("types", [(x.dtype.name, x.shape) for x in arrays], list(disputed.types))
    count = len(disputed.operands)
    with expecting(f"{path}: {disputed.what}", "an operation that is computed alone", Exception):
        right = recomputed(disputed, arrays[:count])
    as_found = [_nan_as_found(*pair) for pair in zip(arrays[count:], right, strict=True)]
    other = NOT_TOLD if any(_is_nan(array).any() for array in right) else WRONG
    hashes = [tuple(map(hash_of, array)) for array in (right, as_found)]
    first = _first_difference(arrays[count:], as_found)
    says = (RIGHT if statement.results in hashes else other, WRONG if first else RIGHT)
    return Judgement(statement, says, first)


def _read(path: Path) -> tuple[Statement, Arrays]:
    """Read a statement, and its arrays in their order: no more and no fewer than it needs."""
    check_regular_file(path, most=MOST_BYTES)
    file = tensorfile.TensorFile(path)
    statement = validate_json(Statement, file.metadata.get("statement", ""), str(path))
    counts = {len(x) for x in (statement.numbers, statement.operations, *statement.paths)}
    if len(counts) > 1:
        raise LockstepError(f"{path}: lists of {counts} operations, expected one number of them")
    disputed = statement.operations[-1]
    names = [str(place) for place in range(len(disputed.operands) + len(disputed.results))]
    if set(file) != set(names):
        raise LockstepError(f"{path}: arrays {sorted(file)}, expected {names}")
    return statement, [np.array(file[name]) for name in names]


def _is_nan(array: np.ndarray) -> np.ndarray:
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    return np.isnan(array) if is_real else np.zeros(array.shape, bool)


def _nan_as_found(found: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return what is right; what is no number may have any of the bits that say so."""
    return np.where(_is_nan(found) & _is_nan(right), found, right)


def _first_difference(found: Arrays, right: Arrays) -> str:
    """Return the first element that differs, with both values and their bits; "" if none does."""
    for number, pair in enumerate(zip(found, right, strict=True)):
        flat = [np.ascontiguousarray(x).reshape(-1) for x in pair]
        unsigned = np.dtype(f"u{flat[0].dtype.itemsize}")
        places = np.flatnonzero(np.not_equal(*(x.view(unsigned) for x in flat)))
        if len(places):
            index = [int(at) for at in np.unravel_index(places[0], found[number].shape)]
            values = [f"{x[places[0]]} (bits {x[places[0]].view(unsigned):x})" for x in flat]
            return f"element {index} of result {number} is {values[0]}, by the rule {values[1]}"
    return ""


def lines(verdict: Judgement) -> Iterator[str]:
    """Yield what a verdict comes to, and what of it is proven and what stated."""
    number, operation = verdict.statement.numbers[-1], verdict.statement.operations[-1]
    claim = verdict.statement.claims[1]
    yield f"{claim.of} of peer {claim.peer}, round {claim.round}: operation {number}"
    yield operation.shown
    for name, claim, says in zip(CLAIMS, verdict.statement.claims, verdict.says, strict=True):
        yield f"{name}, root {claim.root}, program {claim.program}: {says}"
    if verdict.first:
        yield f"{CLAIMS[1]}: {verdict.first}"
    yield (
        "proven: both claims have this operation, on operands that both claims give, and other "
        "results; it alone was computed again, by its rule"
    )
    yield (
        f"stated: that a program is the one of the run of key {claim.key}, as `lockstep bits "
        "record` finds it, and whose the roots are"
    )
