"""The tokens of a text in two parts: a context, and what may follow it."""

from collections.abc import Callable, Sequence
from os.path import commonprefix

from tokenizers import Tokenizer

Encode = Callable[[str, bool | None], list[int]]
Parts = tuple[list[int], list[int]]  # the tokens of a context, and those of what follows


def encode(
    tokenizer: Tokenizer, beginning: int, text: str, add_special_tokens: bool | None = None
) -> list[int]:
    """Return the tokens of a text, with special ones as the tokenizer adds them.

    By default none are added to a text that begins with the one that begins texts.
    """
    if add_special_tokens is None:
        first = tokenizer.decode([beginning], skip_special_tokens=False)
        add_special_tokens = not text.startswith(first)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def in_two_parts(
    encode: Encode, beginning: int, context: str, continuations: Sequence[str]
) -> list[Parts]:
    """Return the tokens of two parts of texts: one context, and each of its continuations.

    Together they are those of the whole text. All are cut where one of the whole texts first has
    another token than the context alone, since a token may join the context's end to what follows.
    White space that ends the context belongs to what follows, as in lm_eval. What has no context
    follows the token that begins a text.
    """
    bare = context.rstrip()
    if not bare:
        parts = [encode(context + text, False) for text in continuations]
        own = [beginning]
        return [(own, part[1:] if part[:1] == own else part) for part in parts]
    wholes = [encode(context + text, None) for text in continuations]
    shared = commonprefix([encode(bare, None), *wholes])
    return [(shared or [beginning], whole[len(shared) :]) for whole in wholes]
