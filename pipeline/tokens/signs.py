"""Signs of a file's format: its first bytes, its name, and the files beside it.

A file that says it is something else is refused with what it says, before its bytes are read as
other numbers or as other text. `FORMATS`, `MARKS`, `BESIDE` and `HELD_OUT_SPLITS` are the tables.
"""

import codecs
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath

import numpy as np

from lockstep.errors import LockstepError, brief

HEAD_BYTES = 512  # that are looked at
TEXT_BYTES = 32  # at least, of a text: fewer bytes of tokens may look like one
TRAIN = "train"
# Words for what is not trained on. The first that a location has is what is held out.
HELD_OUT_SPLITS = ("held_out", "heldout", "validation", "valid", "val", "dev", "eval", "test")
HEADER_BYTES = 1024  # of llm.c and modded-nanogpt: 256 int32, of which the first is a date
HEADER_DATES = range(2024_01_01, 2030_00_00)
MEGATRON_INDEX = b"MMIDIDX\0\0"  # what an .idx begins with; a version and the dtype's code follow
MEGATRON_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}  # of a token, by that code
OLD_TORCH = bytes.fromhex("80028a0a6cfc9c46f9206aa85019")
PAIRS, SMALL, MOSTLY = 64, 4, 0.99  # see `check_size`


# ---- First bytes ----


def _is_gzip(head: bytes) -> bool:
    if not head.startswith(b"\x1f\x8b\x08"):  # which two tokens may begin with too
        return False
    try:
        zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1)
    except zlib.error:
        return False
    return True


def _has_dated_header(head: bytes) -> bool:
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<i4").tolist()
    if len(numbers) < HEAD_BYTES // 4:
        return False
    date, version, _, *rest = numbers
    return date in HEADER_DATES and 0 < version < 10 and not any(rest)


def _is_safetensors(head: bytes) -> bool:
    return head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 2**32


# What it is -> whether a file begins like it.
FORMATS: dict[str, Callable[[bytes], bool]] = {
    "a NumPy header": lambda head: head.startswith(b"\x93NUMPY"),
    "a zip archive, as of torch or NumPy": lambda head: head.startswith(b"PK\x03\x04"),
    "a pickle of torch": lambda head: head.startswith(OLD_TORCH),
    "gzip data": _is_gzip,
    "zstd data": lambda head: head.startswith(b"\x28\xb5\x2f\xfd"),
    "a parquet file": lambda head: head.startswith(b"PAR1"),
    "a safetensors file": _is_safetensors,
    "an index of Megatron": lambda head: head.startswith(MEGATRON_INDEX),
    "a header of 256 int32, as of llm.c": _has_dated_header,
}
# Byte-order marks; those of UTF-32 first, since one of them begins with one of UTF-16.
MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def _format_of(head: bytes) -> str | None:
    """Return what a file says it is by its first bytes; None of text and of numbers alone."""
    return next((kind for kind, matches in FORMATS.items() if matches(head)), None)


def _encoding_of(head: bytes) -> str | None:
    """Return the encoding that a byte-order mark names, other than UTF-8; None without one."""
    return next((encoding for mark, encoding in MARKS.items() if head.startswith(mark)), None)


def check_tokens(head: bytes, name: str) -> None:
    """Check that a file of tokens does not say that it is something else, and is no text."""
    if kind := _format_of(head):
        cut = f"; tail -c +{HEADER_BYTES + 1} cuts it off" if "256 int32" in kind else ""
        raise LockstepError(
            f"{name}: found {kind}, expected tokens alone, as `tofile` writes them{cut}"
        )
    if text := _text(head):
        raise LockstepError(
            f"{name}: found text, {brief(repr(text))}, expected tokens; is it a page to sign in?"
        )


def _text(head: bytes) -> str | None:
    """Return the beginning of a file as text if it is text: half of all tokens' bytes are not."""
    try:  # its end may be cut
        text = codecs.getincrementaldecoder(_encoding_of(head) or "utf-8")().decode(head)
    except UnicodeDecodeError:
        return None
    text = text.removeprefix("\ufeff")
    is_text = all(character.isprintable() or character.isspace() for character in text)
    return text if is_text and len(head) >= TEXT_BYTES else None


def check_text(head: bytes, name: str) -> None:
    """Check that a file of text does not say that it is anything other than UTF-8."""
    if encoding := _encoding_of(head):
        raise LockstepError(
            f"{name}: begins with the mark of {encoding.upper()}, expected UTF-8: "
            f"iconv -f {encoding} -t utf-8 FILE makes it so"
        )
    if kind := _format_of(head):
        raise LockstepError(f"{name}: found {kind}, expected text in UTF-8")


def check_lines(lines: Sequence[bytes], name: str) -> None:
    """Check by its first two lines that a file is not an array, or one value over several lines."""
    first, second = ([line.strip() for line in lines] + [b"", b""])[:2]
    is_array = first[:1] == b"[" and (first[1:].lstrip() or second)[:1] == b"{"
    if is_array or (first == b"{" and second[:1] == b'"'):
        kind, items = ("a JSON array", ".[]") if is_array else ("JSON over several lines", ".")
        raise LockstepError(
            f"{name}: found {kind}, expected JSON lines, an object in each: "
            f"jq -c '{items}' FILE > FILE.jsonl makes them"
        )


def check_size(numbers: np.ndarray, name: str) -> None:
    """Check that what is read as tokens of two bytes is not tokens of four.

    Of these every other number is the upper half of a token, which is 0 or a little more. So it is
    an error if, of the first `numbers`, nearly all at odd places are below SMALL, and most at even
    ones are not.
    """
    lower, upper = numbers[: len(numbers) // 2 * 2].reshape(-1, 2).T
    if len(upper) < PAIRS or np.mean(upper < SMALL) < MOSTLY or np.mean(lower < SMALL) > 0.5:
        return
    raise LockstepError(
        f"{name}: every other token is below {SMALL}, as the upper halves of tokens of 4 bytes "
        "are, and token_size_in_bytes is TwoBytes; expected FourBytes"
    )


# ---- Files beside ----


def _bytes_by_metadata(content: bytes, size: int) -> int | None:
    """Return a token's bytes by datatrove's first line: `tokenizer|bytes of a token`."""
    number = content.partition(b"\n")[0].rpartition(b"|")[2].strip()
    return int(number) if number in (b"1", b"2", b"4", b"8") else None


def _bytes_by_index(content: bytes, size: int) -> int | None:
    """Return a token's bytes by datatrove's index: each document's end, in 8 bytes."""
    tokens = int.from_bytes(content[-8:], "little")
    width, rest = divmod(size, tokens) if tokens else (0, 1)
    return width if not rest and width in (1, 2, 4, 8) else None


# What follows a token file's name, without its ending for Megatron's -> the bytes of a token that
# it says, of its content and the token file's size.
BESIDE: dict[str, Callable[[bytes, int], int | None]] = {
    ".idx": lambda of, _: MEGATRON_BYTES.get(of[17]) if of.startswith(MEGATRON_INDEX) else None,
    ".metadata": _bytes_by_metadata,
    ".index": _bytes_by_index,
}
MASK = ".loss"  # a byte for each token: whether a loss counts it
MOST_BESIDE = 2**26  # bytes of a file that is read for that; a larger one is not


def beside(name: str) -> tuple[str, ...]:
    """Return the names of files that would say something of a token file."""
    return tuple(
        name.removesuffix(".bin") + ending if ending == ".idx" else name + ending
        for ending in (*BESIDE, MASK)
    )


# ---- Names ----


def split_of(name: str) -> str | None:
    """Return the split that a path's signs name: `train`, one of HELD_OUT_SPLITS, or None.

    It is the first word of the nearest folder that begins with one, else any word of the file's
    name, as in `test/000.ds`, `fineweb_val_000000.bin` and `train-00000-of-00009.parquet`.
    """
    *folders, file = PurePosixPath(name.lower()).parts
    splits = (TRAIN, *HELD_OUT_SPLITS)
    for folder in reversed(folders):
        if folder in splits or (folder := re.split("[-_.]", folder)[0]) in splits:
            return folder
    if "held_out" in file:
        return "held_out"
    return next((word for word in re.split("[-_.]", file) if word in splits), None)


def held_out_beside(names: Iterable[str]) -> set[str]:
    """Return the names of held-out files that have a like train file, as test.txt has train.txt.

    A text file may be about anything, so without one a word in its name is no split.
    """

    def like(name: str, split: str | None) -> str:
        digits_alike = re.sub(r"\d+", "0", name.lower())
        return re.sub(rf"(?<![a-z]){split}(?![a-z])", "", digits_alike, count=1)

    splits = {name: split_of(name) for name in names}
    trained = {like(name, TRAIN) for name, split in splits.items() if split == TRAIN}
    return {
        name
        for name, split in splits.items()
        if split in HELD_OUT_SPLITS and like(name, split) in trained
    }
