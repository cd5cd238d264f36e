"""The first operation in which two records differ."""

from collections.abc import Iterator

from lockstep.errors import LockstepError
from parts.bits.operation import INPUT
from parts.bits.record import BitsRecord, OfARun
from parts.bits.tree import first_parting


def first_difference(one: BitsRecord, other: BitsRecord) -> int | None:
    """Return the number of the first operation in which two records differ, or None.

    Raises:
      LockstepError: They are of unlike things, or of other operations: nothing can be told.
    """
    for name in OfARun.model_fields:
        _check_same(name, getattr(one, name), getattr(other, name))
    counts = [len(record.operations) for record in (one, other)]
    if counts[0] == counts[1]:
        if one.claim.top == other.claim.top:
            return None
        number = first_parting(one.tree, lambda height, at: other.tree[height][at])
    else:
        pairs = zip(one.operations, other.operations, strict=False)
        parted = (at for at, (mine, theirs) in enumerate(pairs) if mine != theirs)
        if (first := next(parted, None)) is None:
            raise LockstepError(f"operations: {counts[1]}, expected {counts[0]} as in the first")
        number = first
    mine, theirs = (record.operations[number].model_dump() for record in (one, other))
    if one.operations[number].primitive != INPUT:
        mine["results"] = theirs["results"]  # which differ, if all else does not
    for name in mine:
        _check_same(f"operations[{number}], {mine['what']}: {name}", mine[name], theirs[name])
    return number


def _check_same(name: str, mine: object, theirs: object) -> None:
    """Check that two compared records agree: else they are of other rounds, states or versions."""
    if mine != theirs:
        raise LockstepError(f"{name}: found {theirs!r}, expected {mine!r} as in the first record")


def lines(files: tuple[str, str], one: BitsRecord, other: BitsRecord) -> Iterator[str]:
    """Yield what the comparison of two records of operations, of these files, comes to."""
    number = first_difference(one, other)
    yield f"{one.of} of peer {one.peer}, round {one.round}: {len(one.operations):,} operations"
    if number is None:
        yield f"equal: every operation has the same bits, root {one.claim.root}"
        return
    yield f"first difference: operation {number}, {one.operations[number].shown}"
    for file, record in zip(files, (one, other), strict=True):
        yield f"{file}: stated by {', '.join(record.machine.values())}; root {record.claim.root}"
    yield "which is right: `lockstep bits record --against` one of them writes it for any judge"
