"""A few bytes that stand for many, in each format that unpacks; small ones, for limits as they are.

What a server sends is read by who reads a file, so these are of folders.
"""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

from tests.pipeline.tokens.test_growth import LONG, definition

BLANK = (b" " * 255 + b"\n") * 2**15


def of(target: Path) -> bytes:
    """The bomb of a file's name."""
    return next(make for end, make in BOMBS.items() if target.name.endswith(end))()


def _parquet() -> bytes:
    """Texts in the place of rows of numbers are none; so the columns are of both."""
    text, numbers = "a" * 2**23, np.zeros(2**18, np.int32)
    table = pyarrow.table({"text": [text] * 3, "inputs": [numbers] * 3})
    parquet.write_table(table, file := io.BytesIO(), compression="zstd")
    return file.getvalue()


def _aliases(key: str) -> bytes:
    """Nine values of nine of nine, and so on."""
    lines = ["l0: &l0 [a]"]
    lines += [f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 9)}]" for n in range(9)]
    return "\n".join([*lines, f"{key}: *l9", ""]).encode()


# The end of a name -> what is in the file.
BOMBS: dict[str, Callable[[], bytes]] = {
    ".gz": lambda: gzip.compress(BLANK),
    ".zst": lambda: pyarrow.compress(BLANK, "zstd", asbytes=True),
    ".parquet": _parquet,
    ".safetensors": lambda: (2**60).to_bytes(8, "little") + b'{"a":',
    "README.md": lambda: b"---\n" + _aliases("configs") + b"---\n",
    "tokenizer.json": lambda: json.dumps(definition(normalizer=LONG)).encode(),
}
