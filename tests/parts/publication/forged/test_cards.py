"""Model cards of which a word was changed."""

import pytest

from lockstep.files import sha256_file
from tests.parts.publication.forged.changes import change_card
from tests.parts.publication.published_run import forge, refusal

CARDS = {
    "a better loss": (
        ("(held_out_loss\n +value:) [0-9.]+", r"\1 1.0"),
        "README.md: held_out_loss of held_out is 1.0",
    ),
    "a better perplexity": (
        ("(type: perplexity\n +value:) [0-9.]+", r"\1 1.05"),
        "README.md: perplexity of held_out is 1.05",
    ),
    "a better loss, twice said": (
        ("(held_out_loss\n( +)value:)", r"\1 1.0\n\2value:"),
        "README.md: its front matter",
    ),
    "another name of the perplexity": (
        ("name: perplexity per token", "name: MMLU, accuracy"),
        "README.md: perplexity of held_out has another name",
    ),
    "a score that nobody measured": (
        ("type: held_out\n", "type: mmlu\n"),
        "README.md: held_out_loss of mmlu is ",
    ),
    "no results": (("(?s)model-index:.*?---\n", "---\n"), "README.md: "),
    "a word of praise": (
        ("\n## Data\n", "\nAudited by an independent lab; MMLU 91.2.\n\n## Data\n"),
        "README.md: line ",
    ),
    "a heading": (("\n# llama, ", "\n# GPT-5, "), "expected '# llama, "),
    "a word at the end": (("\\Z", "trust me\n"), "README.md: line "),
}


@pytest.mark.parametrize("case", CARDS)
def test_a_card_of_which_a_word_was_changed_is_not_verified(folder, case):
    (pattern, said), expected = CARDS[case]
    change_card(folder, pattern, said)
    forge(folder, card=False)
    assert expected in refusal(folder)


def test_a_card_of_other_weights_is_not_verified(folder):
    text = (folder / "README.md").read_text()
    weights = sha256_file(folder / "model.safetensors")
    (folder / "README.md").write_text(text.replace(weights, "0" * 64))
    forge(folder, card=False)
    assert refusal(folder).startswith("README.md: another SHA-256 of model.safetensors, expected")
