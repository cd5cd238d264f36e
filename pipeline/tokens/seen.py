"""Windows of the held-out split that stand word for word in the train split.

A window is WINDOW tokens in a row, and stands for its hash of 64 bits, which is the same on every
machine. In memory are the hashes of the held-out split alone, and of more than MOST a sample: those
that a number divides. The train split is read once.

Shapes: T tokens, H hashes.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lockstep.programs.columns import PLAIN
from pipeline.tokens.shards import ShardFile, Shards

WINDOW = 32
MOST = 2**24
CHUNK_TOKENS = 2**20  # tokens that are read at once
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd: a product loses no bit


def share(folder: Path, shards: Shards) -> float | None:
    """Return the share of the held-out split's windows that are seen in the train split.

    None where that is not known: of rows with columns or of other numbers, and of tokens that are
    read while training; and where the split has no window.
    """
    held_out, train = shards.split("held_out"), shards.split("train")
    are_here = all(file.is_here for file in shards.files)
    if shards.columns != PLAIN or shards.rows is not None or not are_here or not held_out:
        return None
    size, every = shards.token_size_in_bytes, sampled(held_out)
    seen_H = seen(read(folder, held_out, size), read(folder, train, size), every)
    found = total = 0
    for tokens_T in read(folder, held_out, size):
        total += len(windows_H := windows(tokens_T, every))
        found += int(among(windows_H, seen_H).sum())
    return found / total if total else None


def sampled(held_out: Sequence[ShardFile]) -> int:
    """Return of how many windows one is looked up: the number that divides its hash."""
    return -(-sum(file.tokens for file in held_out) // MOST)


def seen(held_out: Iterable[np.ndarray], train: Iterable[np.ndarray], every: int = 1) -> np.ndarray:
    """Return the hashes of windows seen in both splits, ascending; one in `every`."""
    own_H = np.unique(np.concatenate([windows(tokens_T, every) for tokens_T in held_out]))
    found_H = np.zeros(len(own_H), bool)
    # most windows of the train split are told by a table of the hashes' first bits
    bits = min(27, max(16, len(own_H).bit_length() + 3))
    first = np.uint64(64 - bits)
    table = np.zeros(2**bits, bool)
    table[own_H >> first] = True
    for tokens_T in train:
        windows_H = windows(tokens_T, every)
        windows_H = windows_H[table[windows_H >> first]]
        windows_H = windows_H[among(windows_H, own_H)]
        found_H[np.searchsorted(own_H, windows_H)] = True
    return own_H[found_H]


def windows(tokens_T: np.ndarray, every: int = 1) -> np.ndarray:
    """Return the hashes of all windows, in their order, that `every` divides."""
    hash_H = tokens_T.astype(np.uint64) + np.uint64(1)
    for half in (1, 2, 4, 8, 16):  # each time a hash is of twice as many tokens
        hash_H = hash_H[:-half] * HASH_FACTOR + hash_H[half:]
        hash_H ^= hash_H >> np.uint64(29)
    return hash_H if every == 1 else hash_H[hash_H % np.uint64(every) == 0]


def among(hash_H: np.ndarray, sorted_H: np.ndarray) -> np.ndarray:
    """Return whether each window's hash is one of these, which ascend."""
    if not len(sorted_H):
        return np.zeros(len(hash_H), bool)
    place_H = np.searchsorted(sorted_H, hash_H)
    return sorted_H[np.minimum(place_H, len(sorted_H) - 1)] == hash_H


def read(
    folder: Path, files: Sequence[ShardFile], size: int, overlap: int = WINDOW - 1
) -> Iterator[np.ndarray]:
    """Yield the tokens of files to look windows up in, in chunks that overlap."""
    last_T = np.empty(0, f"<u{size}")
    for file in files:
        with open(folder / file.path, "rb") as opened:
            while len(read_T := np.fromfile(opened, f"<u{size}", CHUNK_TOKENS)):
                yield (chunk_T := np.concatenate([last_T, read_T]))
                last_T = chunk_T[len(chunk_T) - min(overlap, len(chunk_T)) :]
