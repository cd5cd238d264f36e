"""Combinations of options in which each two values of two options stand together somewhere."""

from collections.abc import Iterator
from itertools import combinations

Options = dict[str, tuple]


def pairwise(options: Options) -> Iterator[dict[str, object]]:
    """Yield few combinations of one value for each option; None is the option left out."""
    pairs = {
        frozenset([(a, x), (b, y)])
        for a, b in combinations(options, 2)
        for x in options[a]
        for y in options[b]
    }
    while pairs:
        # one that is left, in an order that does not change, and what covers most of the others
        row = dict(min(pairs, key=lambda pair: sorted(map(str, pair))))
        for name, values in options.items():
            if name not in row:
                row[name] = max(values, key=lambda value: _new(pairs, row | {name: value}))
        covered = {frozenset(two) for two in combinations(row.items(), 2)}
        pairs -= covered
        yield {name: row[name] for name in options}


def _new(pairs: set, row: dict[str, object]) -> int:
    return sum(frozenset(two) in pairs for two in combinations(row.items(), 2))


def flags(row: dict[str, object]) -> list[str]:
    """The options of a combination as a command line has them."""
    return [word for name, value in row.items() if value is not None for word in (name, str(value))]
