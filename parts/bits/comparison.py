"""The first operation in which two records differ, and which of them is right there."""

from collections.abc import Iterator

from lockstep.errors import LockstepError
from parts.bits.record import BitsRecord

SAME = ("key", "of", "round", "peer")


def first_difference(one: BitsRecord, other: BitsRecord) -> int | None:
    """Return the number of the first operation in which two records differ, or None.

    Raises:
      LockstepError: They are of unlike things, or of other operations: nothing can be told.
    """
    for name in SAME:
        _check_same(name, getattr(one, name), getattr(other, name))
    for name in sorted(one.inputs.keys() | other.inputs.keys()):
        _check_same(f"inputs.{name}", *(record.inputs.get(name) for record in (one, other)))
    pairs = zip(one.operations, other.operations, strict=False)
    for number, (mine, theirs) in enumerate(pairs):
        _check_same(f"operations[{number}]", mine[:2], theirs[:2])
        if mine != theirs:
            return number
    _check_same("operations", len(one.operations), len(other.operations))
    return None


def _check_same(name: str, mine: object, theirs: object) -> None:
    """Check that two compared records agree: else they are of other rounds, states or versions."""
    if mine != theirs:
        raise LockstepError(f"{name}: found {theirs!r}, expected {mine!r} as in the first record")


def lines(records: dict[str, BitsRecord]) -> Iterator[str]:
    """Yield what the comparison of two records of operations, by their files, comes to."""
    one, other = records.values()
    number = first_difference(one, other)
    yield f"{one.of} of peer {one.peer}, round {one.round}: {len(one.operations):,} operations"
    if number is None:
        yield f"equal: every operation has the same bits, root {one.root}"
        return
    name, place, _ = one.operations[number]
    yield f"first difference: operation {number}, {name}, {place or 'in no loop'}"
    opened = {f: r.opened for f, r in records.items() if r.opened and r.opened.number == number}
    if shapes := next((operation.shapes for operation in opened.values()), None):
        yield f"shapes: {', '.join(shapes[:-1])} -> {shapes[-1]}"
    rights = {operation.right for operation in opened.values()}
    for file, record in records.items():
        says = "has what the rule gives" if record.operations[number][2] in rights else "WRONG"
        says = says if len(rights) == 1 else "nobody knows yet whether it is right"
        yield f"{file}: {says}; computed by {', '.join(record.machine.values())}"
        if file in opened and (at := opened[file].first):
            yield (
                f"{file}: element {list(at.index)} is {at.found[0]} (bits {at.found[1]}), by the "
                f"rule {at.right[0]} (bits {at.right[1]})"
            )
    if rights:
        yield f"stated by {' and '.join(opened)}: whoever has the run repeats it with --against"
    else:
        yield "to know who is right, record it with --against one of them"
