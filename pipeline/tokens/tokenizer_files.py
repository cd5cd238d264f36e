"""The files of a tokenizer in Hugging Face form, and what they say of its ids."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import LockstepError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
# Nothing else is fetched or copied: no code, no pickle.
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
)


def load_tokenizer(path: Path, name: str | None = None) -> "Tokenizer":
    """Read a tokenizer.json, called `name` or else by its path in errors.

    Raises:
      LockstepError: it is not a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise LockstepError(
            f"{name or path}: expected a tokenizer of the `tokenizers` library: {error}"
        ) from error


def vocab_size(tokenizer: "Tokenizer") -> int:
    """Return one more than the largest token id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
