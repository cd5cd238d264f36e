"""The transcript of a publication as stage train left it: its packed files unpacked."""

from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import sha256_file, writes
from parts.publication import layout, packed
from parts.publication.layout import TRANSCRIPT, Publication, PublishedFile


class Unpacked(NamedTuple):
    """A transcript's folder, and the files in it by the names that they have there."""

    folder: Path
    files: dict[str, PublishedFile]


def unpack(
    folder: Path, aside: Path, publication: Publication, skip: set[str], most: int
) -> Unpacked:
    """Put the transcript of a publication `aside`, but for the files to `skip`.

    Its files may have at most so many bytes together, unpacked. How many a packed one has is known
    before, of what stage train left.

    Raises:
      LockstepError: A packed file is damaged, too large, or of another size than stage train left.
    """
    place, files = aside / "unpacked" / TRANSCRIPT, {}
    left = layout.read_made(folder, "train").files
    for name, file in publication.files.items():
        if not name.startswith(f"{TRANSCRIPT}/") or name in skip:
            continue
        original = packed.original_of(name.removeprefix(f"{TRANSCRIPT}/"))
        target = place / original
        with writes(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        is_packed = packed.name_of(original) != original
        if is_packed and f"transcript/{original}" not in left:
            raise LockstepError(f"{name}: expected a file that {layout.made('train')} has")
        size = left[f"transcript/{original}"].bytes if is_packed else file.bytes
        if size > most:
            raise LockstepError(
                f"{name}: {size} bytes, expected at most the {most} that other files leave"
            )
        most -= size
        if is_packed:
            packed.unpack(folder / name, target, size)
            file = PublishedFile(bytes=size, sha256=sha256_file(target))
        else:
            target.symlink_to((folder / name).resolve())  # a hard link would change the file
        files[original] = file
    return Unpacked(place, files)
