"""Bounds how much longer a tokenizer can make a text, by its definition alone.

A stranger's tokenizer.json may write 100,000 characters for each one, or double a text forty times;
the library then fills the memory, and aborts the process. So its steps are looked at before it is
loaded: each turns n bytes into `factor * n + added` at most, and steps after each other multiply.

Of the library's kinds of steps all are known; of another one, no bound is. The time of a regular
expression is not bounded.
"""

import base64
import binascii
from collections.abc import Callable
from typing import Any, NamedTuple

MOST_GROWTH = 2**13  # the largest bound of the published tokenizers tried is ALBERT's, 4,356
MOST_ADDED = 2**20


class Growth(NamedTuple):
    """A bound: n bytes become at most `factor * n + added` bytes or tokens."""

    factor: float = 1
    added: float = 0

    def then(self, other: "Growth") -> "Growth":
        """Return the bound of this step of a tokenizer and another after it."""
        return Growth(self.factor * other.factor, self.added * other.factor + other.added)


class GrowthError(ValueError):
    """A definition has a step that is unknown, or steps that grow a text too far."""


def check(definition: dict[str, Any]) -> None:
    """Check how far a tokenizer.json lets a text grow as it is encoded, and tokens as decoded."""
    before = _of(definition.get("normalizer"), "normalizer", "normalizers", NORMALIZERS)
    words = _of(definition.get("pre_tokenizer"), "pre_tokenizer", "pretokenizers", PRE_TOKENIZERS)
    tokens = _of(definition.get("post_processor"), "post_processor", "processors", PROCESSORS)
    texts = _of(definition.get("decoder"), "decoder", "decoders", DECODERS)
    for what, growth in (
        ("normalizer, pre_tokenizer and post_processor", before.then(words).then(tokens)),
        ("decoder", texts),
    ):
        if growth.factor > MOST_GROWTH or growth.added > MOST_ADDED:
            raise GrowthError(
                f"{what} may write {growth.factor:.3g} times a text and {growth.added:.3g} bytes, "
                f"expected at most {MOST_GROWTH} times and {MOST_ADDED}"
            )


Step = Callable[[dict[str, Any]], Growth]


def _of(step: Any, what: str, parts: str, kinds: dict[str, Step]) -> Growth:
    """Return the growth of a tokenizer's step or Sequence of steps; for None, `Growth()`: none."""
    if step is None:
        return Growth()
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        total = Growth()
        for part in _list(step, parts):
            total = total.then(_of(part, what, parts, kinds))
        return total
    if kind not in kinds:
        raise GrowthError(f"{what} is {kind!r}, expected one of {', '.join(sorted(kinds))}")
    return kinds[kind](step)


def _list(step: dict[str, Any], key: str) -> list:
    value = step.get(key)
    if not isinstance(value, list):
        raise GrowthError(f"{key} is {type(value).__name__}, expected a list")
    return value


def _bytes(text: Any) -> int:
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0


def _replace(step: dict[str, Any]) -> Growth:
    """Return the growth of a replacement; a regular expression may match between any two bytes."""
    pattern, content = step.get("pattern"), _bytes(step.get("content"))
    length = _bytes(pattern.get("String")) if isinstance(pattern, dict) else 0
    return Growth(max(1, content / length)) if length else Growth(1 + content, content)


def _prepend(step: dict[str, Any]) -> Growth:
    return Growth(1, _bytes(step.get("prepend")))


def _precompiled(step: dict[str, Any]) -> Growth:
    """Parse a table of SentencePiece: a length, an index of that size, texts that end with 0."""
    try:
        table = base64.b64decode(step.get("precompiled_charsmap") or "")
    except (TypeError, ValueError, binascii.Error) as error:
        raise GrowthError(f"precompiled_charsmap: {error}, expected base64") from error
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return Growth(max(1, *map(len, texts.split(b"\0"))))


def _template(step: dict[str, Any]) -> Growth:
    """Return the growth of a template: special tokens, and the text as often as it occurs."""
    special, factor, added = step.get("special_tokens"), 0, 0
    for piece in _list(step, "single"):
        name = piece.get("SpecialToken") if isinstance(piece, dict) else None
        token = special.get(name.get("id")) if isinstance(name, dict) and special else None
        ids = token.get("ids") if isinstance(token, dict) else None
        added += len(ids) if isinstance(ids, list) else 0
        factor += token is None
    return Growth(max(1, factor), added)


def _times(factor: float, added: float = 0) -> Step:
    return lambda _: Growth(factor, added)


def _kinds(growth: Step, names: str) -> dict[str, Step]:
    return dict.fromkeys(names.split(), growth)


# The longest of Unicode: U+FDFA has 3 bytes, and 33 as NFKD; U+0390 2, and 6 as NFD; U+023A 2, and
# 3 in lower case.
NORMALIZERS = {
    **_kinds(_times(1), "Nmt Strip StripAccents"),
    **_kinds(_times(3), "NFC NFD"),
    **_kinds(_times(11), "NFKC NFKD"),
    "BertNormalizer": _times(8),
    "ByteLevel": _times(2),
    "Lowercase": _times(1.5),
    "Precompiled": _precompiled,
    "Prepend": _prepend,
    "Replace": _replace,
}
# They cut a text; two of them write a byte as 2 or 3, and as many before each piece.
PRE_TOKENIZERS = {
    **_kinds(
        _times(1),
        "BertPreTokenizer CharDelimiterSplit Delimiter Digits FixedLength Punctuation Split "
        "UnicodeScripts Whitespace WhitespaceSplit",
    ),
    "ByteLevel": _times(4, 2),
    "Metaspace": _times(4, 4),
}
PROCESSORS = {
    **_kinds(_times(1, 2), "BertProcessing RobertaProcessing"),
    "ByteLevel": _times(1),
    "TemplateProcessing": _template,
}
# Growth of a token's text; the text itself is as long as tokenizer.json says.
DECODERS = {
    **_kinds(_times(3, 1), "BPEDecoder ByteFallback ByteLevel CTC Fuse Metaspace Strip WordPiece"),
    "Replace": _replace,
}
