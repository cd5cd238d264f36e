"""The transcript of a publication as stage train left it: its packed files unpacked."""

from pathlib import Path
from typing import NamedTuple

from pipeline.errors import LockstepError
from pipeline.publication import packed
from pipeline.publication.layout import TRANSCRIPT, Publication, PublishedFile
from pipeline.stage.artifacts import link, sha256_file, writes


class Unpacked(NamedTuple):
    """A transcript's folder, and the files in it by the names that they have there."""

    folder: Path
    files: dict[str, PublishedFile]


def unpack(
    folder: Path, aside: Path, publication: Publication, skip: set[str], most: int
) -> Unpacked:
    """Put the transcript of a publication `aside`, but for the files to `skip`.

    Its files may have at most so many bytes together, unpacked.

    Raises:
      LockstepError: A packed file is damaged, or too large.
    """
    place, files = aside / "unpacked" / TRANSCRIPT, {}
    for name, file in publication.files.items():
        if not name.startswith(f"{TRANSCRIPT}/") or name in skip:
            continue
        original = packed.original_of(name.removeprefix(f"{TRANSCRIPT}/"))
        target = place / original
        with writes(target):
            target.parent.mkdir(parents=True, exist_ok=True)
        if packed.name_of(original) == original:
            link(folder / name, target)
        else:
            packed.unpack(folder / name, target, most)
            file = PublishedFile(bytes=target.stat().st_size, sha256=sha256_file(target))
        if file.bytes > most:
            raise LockstepError(
                f"{name}: {file.bytes} bytes, expected at most the {most} that other files leave"
            )
        most -= file.bytes
        files[original] = file
    return Unpacked(place, files)
