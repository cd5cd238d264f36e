"""A text's tokens in two parts are those of the whole, and its parts lose nothing."""

from functools import partial

import pytest
from tokenizers import Regex, pre_tokenizers, processors

from parts.tasks import two_parts
from tests.pipeline.trained_run import make_tokenizer

# As of GPT-4, Llama 3 and Qwen: a sign takes the line breaks after it along.
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CONTEXT = "first = [a, b][3];"
CHOICES = ("\n    if first == 7:", "\n    return first", " # a", "\n")


def joining_tokenizer():
    """Bytes, `;` and a line break as one token, and <b> that is put before a text."""
    made = make_tokenizer(["<b>"], (";\u010a",), [(";", "\u010a")])
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.post_processor = processors.TemplateProcessing("<b> $A", special_tokens=[("<b>", 0)])
    return made


@pytest.fixture
def tokenizer():
    return joining_tokenizer()


def test_a_token_that_joins_both_parts_belongs_to_what_follows_in_every_choice(tokenizer):
    encode = partial(two_parts.encode, tokenizer, 0)
    parts = two_parts.in_two_parts(encode, 0, CONTEXT, CHOICES)
    assert len({tuple(before) for before, _ in parts}) == 1  # one context to choose after
    for (before, after), choice in zip(parts, CHOICES, strict=True):
        assert before + after == tokenizer.encode(CONTEXT + choice).ids
        assert tokenizer.decode(before) == CONTEXT[:-1]
        assert tokenizer.decode(after) == ";" + choice
    [(before, after)] = two_parts.in_two_parts(encode, 0, CONTEXT, CHOICES[2:3])
    assert before == tokenizer.encode(CONTEXT).ids  # nothing joins them
    assert tokenizer.decode(after) == CHOICES[2]


def test_without_a_context_a_text_follows_the_token_that_begins_one(tokenizer):
    encode = partial(two_parts.encode, tokenizer, 0)
    for context in ("", " \n"):
        [(before, after), (_, begun)] = two_parts.in_two_parts(encode, 0, context, ["if", "<b>if"])
        assert before == [0] and tokenizer.decode(after) == context + "if"
        assert begun == (after if not context else begun)
    assert two_parts.encode(tokenizer, 0, "<b>if") == two_parts.encode(tokenizer, 0, "if")
