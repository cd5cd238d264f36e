"""Methods of training, a card each: one word means the same method wherever it is written.

A file here holds a method or a family: its table in a run file, what builds its optimizer, what it
needs of a run, and its cards. A new file is found by being here.
"""

from importlib import import_module
from pkgutil import iter_modules

from lockstep.methods.card import Card, OptimizerVariant
from lockstep.tables.variant import one_of

_FILES = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]

CARDS: dict[str, Card] = {
    card.name: card
    for card in sorted(card for file in _FILES for card in getattr(file, "CARDS", ()))
}
"""All cards, by name."""

AnyOptimizer = one_of(OptimizerVariant)


def card_of(word: str) -> Card | None:
    """Return the card of a name, as "streaming-diloco", "streaming_diloco" or "StreamingDiLoCo"."""
    return next((card for name, card in CARDS.items() if _plain(name) == _plain(word)), None)


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
