"""The transcript of a publication: which of its files are published, and as stage train left it."""

from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import sha256_file, writes
from lockstep.transcript.transcript import Transcript
from parts.publication import layout, packed
from parts.publication.draws import DrawnWindow
from parts.publication.layout import Publication
from pipeline import runfile
from pipeline.again.convert import is_given
from pipeline.again.outputs import TRANSCRIPT, PublishedFile
from pipeline.again.published import joined
from pipeline.audit.bundle import files_of


def files(
    transcript: Transcript, published: list[DrawnWindow], run: runfile.Run, *, kept: bool
) -> set[str]:
    """Return the transcript's files that a publication has: no other is ever looked at.

    These are all rounds and the hashes of all snapshots. Where messages are kept, all of them, and
    what the peers of the published windows owned: the params follow from the run's start, which is
    here where nobody else has it. Where they are not, whole snapshots, without the last params
    where the published weights are these.
    """
    names = {packed.ROUNDS, "header.json"}
    names |= {f"snapshots/{step:05}/state.json" for step in transcript.snapshots}
    if not kept:
        for window, peers in joined(published):
            names |= files_of(transcript, list(transcript.window(window)), window, peers)
        if run.export.dtype == "float32":
            names.remove(f"snapshots/{transcript.snapshots[-1]:05}/params.safetensors")
        return names
    for entry in transcript.rounds:
        sent = (*entry.evidence.messages.values(), *entry.evidence.others.values())
        names |= {f"payloads/{message.payload}" for message in sent}
    start = f"snapshots/{transcript.snapshots[0]:05}"
    if is_given(run):
        names |= {f"{start}/{part}.safetensors" for part in ("params", "shared")}
    return names | {
        f"snapshots/{window.opening:05}/own-{peers[0]:03}.safetensors"
        for window, peers in published
    }


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
    place, found = aside / "unpacked" / TRANSCRIPT, {}
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
        found[original] = file
    return Unpacked(place, found)
