"""Token files that a test wrote, as `shards.json` lists them."""

from collections.abc import Mapping
from pathlib import Path

from lockstep.files import sha256_file
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import ShardFile, read_shards


def open_shards(folder: Path, *arguments: object, **fields: object) -> Sequences:
    """Open the sequences of a split of a shards folder."""
    return Sequences(folder, read_shards(folder), *arguments, **fields)


def measure(
    folder: Path, token_size_in_bytes: int, names: Mapping[str, str] | None = None
) -> tuple[ShardFile, ...]:
    """Describe the token files in `train/` and `held_out/`, by name.

    Args:
      folder: the shards folder.
      token_size_in_bytes: 2 or 4.
      names: path in the folder -> name at the source; by default the same.
    """
    names = names or {}
    return tuple(
        ShardFile(
            path=(inside := f"{split}/{path.name}"),
            split=split,
            tokens=path.stat().st_size // token_size_in_bytes,
            sha256=sha256_file(path),
            name=names.get(inside, inside),
        )
        for split in ("train", "held_out")
        for path in sorted((folder / split).glob("*.ds"))
    )
