"""The files of a tokenizer in Hugging Face form, and what they say of its ids."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import PANIC, LockstepError, brief, first_line
from lockstep.files import check_regular_file, once, read_json, write_json, write_text
from pipeline import extras
from pipeline.tokens import growth

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import TokenizersBackend

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
GENERATION = "generation_config.json"  # tokens that begin, end and pad a text
PIECES = "tokenizer.model"  # of SentencePiece
OLDER = ("vocab.json", "vocab.txt", PIECES)  # what `transformers` makes a tokenizer.json from
KINDS = (TOKENIZER, *OLDER)  # one of them is in every tokenizer's folder
PROBE = "The 12 cats, naïve:\n\tsat  on日. "  # its ids are compared after a conversion
MOST_BYTES = 2**28  # the largest tokenizer.json; those of large vocabularies have 2**25
UNKNOWN, LARGEST_ID = "<|without a token|>", 2**31 - 1
# Nothing else is fetched or copied: no code, no pickle.
TOKENIZER_FILES = (
    TOKENIZER,
    SETTINGS,
    SPECIAL,
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    PIECES,
)


def load_tokenizer(path: Path, name: str | None = None) -> "Tokenizer":
    """Read a tokenizer.json, called `name` or else by its path in errors.

    Texts are neither cut nor padded, whatever the file says, as with `transformers`.

    Raises:
      LockstepError: it is not a tokenizer, or one that may fill the memory.
    """
    from tokenizers import Tokenizer

    where = name or path
    check_regular_file(path, most=MOST_BYTES)
    with library_errors(f"{where}: expected a tokenizer of the `tokenizers` library"):
        data = path.read_bytes()
        growth.check(json.loads(data, object_pairs_hook=once))
        tokenizer = Tokenizer.from_buffer(data)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def save_tokenizer(tokenizer: "Tokenizer", folder: Path, special: dict[str, str]) -> None:
    """Write a tokenizer as transformers 4 and 5 read it; version 4 cannot read what 5 writes.

    Its decoding needs no clean-up of spaces. `special` are its special tokens by their names in
    transformers, such as `eos_token`.
    """
    write_text(folder / TOKENIZER, tokenizer.to_str(pretty=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(folder / SETTINGS, config | special)
    write_json(folder / SPECIAL, special)


def encode(tokenizer: "Tokenizer", text: str, where: object) -> list[int]:
    """Return a tokenizer's tokens of a text, with the special ones that it adds.

    Raises:
      LockstepError: it has no token for a word or a character, or the text is no Unicode; `where`
        names both.
    """
    expected = f"{where}: expected a text that the tokenizer has tokens for"
    with library_errors(expected):
        ids, tokenless = tokenizer.encode(text).ids, Tokenless(tokenizer)
        tokenless.add([text], [])
    if tokenless.count:
        raise LockstepError(f"{expected}, found {tokenless.count} characters that have none")
    return ids


class Tokenless:
    """Counts what of some texts has no token, and is left out or becomes the unknown token.

    `count` is of characters that are left out, or of tokens that stand for what is unknown; `name`
    is that token's, None if characters are left out.
    """

    def __init__(self, tokenizer: "Tokenizer"):
        from tokenizers import Tokenizer, models

        self.count, self._tokenizer, self._also = 0, tokenizer, None
        model = tokenizer.model
        self.name: str | None = getattr(model, "unk_token", None)
        self._id = tokenizer.token_to_id(self.name) if self.name else None
        if isinstance(model, models.Unigram):  # which has the token's id alone
            self._id = json.loads(model.__getstate__())["unk_id"]
            self.name = None if self._id is None else tokenizer.id_to_token(self._id)
        if isinstance(model, models.BPE) and self._id is None and not _has_all_bytes(tokenizer):
            # it leaves out in silence what this one, which is no other but for that, counts
            spec = json.loads(tokenizer.to_str())
            spec["model"]["vocab"][UNKNOWN] = self._id = LARGEST_ID
            spec["model"] |= {"unk_token": UNKNOWN, "fuse_unk": False}
            self._also = Tokenizer.from_str(json.dumps(spec))
            self._also.no_padding()
            self._also.no_truncation()

    def add(self, texts: list[str], ids: Iterable[list[int]]) -> None:
        """Count in further texts, which have these ids."""
        if self._also is not None:
            self._also.encode_special_tokens = self._tokenizer.encode_special_tokens
            also = self._also.encode_batch_fast(texts, add_special_tokens=False)
            ids = (encoding.ids for encoding in also)
        if self._id is not None:
            self.count += sum(some.count(self._id) for some in ids)


def _has_all_bytes(tokenizer: "Tokenizer") -> bool:
    """Whether a tokenizer's BPE has a token for each byte, so that it leaves out nothing."""
    from tokenizers.pre_tokenizers import ByteLevel

    model = tokenizer.model
    names = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else []
    steps = [
        step.__getstate__() for step in (tokenizer.pre_tokenizer, tokenizer.normalizer) if step
    ]
    if not names and any(b'"ByteLevel"' in step for step in steps):
        parts = model.continuing_subword_prefix or model.end_of_word_suffix
        names = [] if parts else ByteLevel.alphabet()
    return bool(names) and all(tokenizer.token_to_id(name) is not None for name in names)


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn errors of the library `tokenizers` (Exceptions, Rust's panics) into one line."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise LockstepError(f"{what}: {brief(str(error), 200)}") from error


def convert_older(folder: Path, name: str) -> None:
    """Write the tokenizer.json that a folder lacks, from the files of an older form, if any.

    `transformers` converts them, without running code of the folder's; its config.json may say of
    which class they are. Equal files give equal bytes. The folder, which holds copies of the files,
    gets a tokenizer_config.json too, which names the special tokens.

    Raises:
      LockstepError: `transformers` is not installed, cannot convert them, or does it wrongly.
    """
    older = [file for file in OLDER if (folder / file).is_file()]
    if not older or (folder / TOKENIZER).is_file():
        return
    what = f"{name}: found {', '.join(older)} without {TOKENIZER}"
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging

        if PIECES in older:
            import sentencepiece  # noqa: F401 - transformers reads them with it
    except ImportError:
        raise LockstepError(
            f"{what}, expected that, or transformers to convert them: {extras.install('hf')}"
        ) from None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        fast = tokenizer.backend_tokenizer
        _check_converted(tokenizer, folder, what)
    except LockstepError:
        raise
    except Exception as error:  # any kind: the libraries check little
        reason = first_line(error)
        raise LockstepError(f"{what}, expected what transformers converts: {reason}") from error
    finally:
        logging.set_verbosity(verbosity)
    write_text(folder / TOKENIZER, fast.to_str(pretty=True))
    settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    # every version of transformers takes this class as it is in tokenizer.json
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {key: text for key, text in tokenizer.special_tokens_map.items() if type(text) is str}
    write_json(folder / SETTINGS, config | settings)


def _check_converted(tokenizer: "TokenizersBackend", folder: Path, what: str) -> None:
    """Check that a converted tokenizer had all its files, and gives the same ids as they do.

    Where a file is missing, its vocabulary is empty.
    """
    kind, files = type(tokenizer).__name__, type(tokenizer).vocab_files_names.values()
    for file in files:
        if file != TOKENIZER and not (folder / file).is_file():
            raise LockstepError(f"{what}, expected {file} too, which a {kind} is made from")
    if PIECES in files:
        from sentencepiece import SentencePieceProcessor

        expected = SentencePieceProcessor(model_file=str(folder / PIECES)).encode(PROBE)
        if tokenizer.encode(PROBE, add_special_tokens=False) != expected:
            raise LockstepError(
                f"{what}, and transformers makes a {kind} with other ids from it; expected the "
                f"same ids, from the class that tokenizer_class in {SETTINGS} names"
            )


def vocab_size(tokenizer: "Tokenizer") -> int:
    """Return one more than the tokenizer's largest token id, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
