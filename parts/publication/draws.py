"""Which windows are published, and which of them a reader repeats; imports no JAX.

The author's draw follows from the transcript's hash. A reader draws among the published windows,
with a seed that their author did not know. What is drawn and repeated as one is a window of one
peer or, where messages are not kept, of all its peers together.
"""

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lockstep.errors import RequestError
from lockstep.files import read_json
from lockstep.transcript.windows import Window
from parts.publication import layout, packed
from parts.publication.layout import MANIFEST, Publication
from pipeline.again import outputs

if TYPE_CHECKING:  # they import JAX
    from lockstep.transcript.transcript import Transcript
    from pipeline.audit.sample import Beacon

# that JAX knows; it ends with any other at its import
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


class DrawnWindow(NamedTuple):
    """A window, and those of its peers that are replayed."""

    window: Window
    peers: tuple[int, ...]


# ---- The author's draw ----


def possible(transcript: "Transcript", windows: list[Window], kept: bool) -> list[DrawnWindow]:
    """Return all windows of a run that can be drawn, in order.

    A peer that sent nothing in a window has none there: its replay would show nothing.
    """
    found = []
    for window in windows:
        peers = sorted({peer for e in transcript.window(window) for peer in e.evidence.messages})
        several = [(peer,) for peer in peers] if kept else [tuple(peers)]
        found += [DrawnWindow(window, some) for some in several if some]
    return found


def seed_of(transcript: "Transcript", seed: str | None, beacon: "Beacon | None") -> str:
    """Return what an author draws with: the hash of the rounds, a reader's word, a beacon."""
    return " ".join((transcript.hash, seed or "", *([] if beacon is None else [beacon.value])))


def draw(
    transcript: "Transcript", windows: list[Window], seed: str, count: int, kept: bool
) -> list[DrawnWindow]:
    """Draw `count` windows to publish with a seed of `seed_of`.

    Where messages are kept, each window of a peer is as likely. Where they are not, the last one is
    always drawn: only its replay connects anything with the weights.
    """
    every = possible(transcript, windows, kept)
    generator = random.Random(f"publication {seed}")
    chosen = [] if kept else every[-1:]
    rest = [one for one in every if one not in chosen]
    return sorted(chosen + generator.sample(rest, min(count - len(chosen), len(rest))))


def name(drawn: DrawnWindow, kept: bool) -> str:
    """Return the file with the rows of a drawn window."""
    peer = f"-{drawn.peers[0]:03}" if kept else ""
    return f"{outputs.ROWS}/{drawn.window.first:05}{peer}.safetensors"


# ---- The reader's ----


class ReaderAsks(NamedTuple):
    """A reader's options.

    Attributes:
      seed: What the windows are drawn with, or None.
      windows: How many are repeated, or None, see `choose`.
      checkpoint: The reader's folder with the checkpoint that the run began with, or None.
      shards: The reader's folder with the run's data, as stage download leaves it, or None.
      tasks: Whether scores of tasks are repeated.
      key: File of the public key with which the publication has to be signed, or None.
    """

    seed: str | None = None
    windows: int | None = None
    checkpoint: Path | None = None
    shards: Path | None = None
    tasks: bool = False
    key: Path | None = None


def choose(publication: Publication, asks: ReaderAsks) -> list[str]:
    """Choose the windows to repeat, by the names of their rows, before anything is fetched.

    Those are all that are published or, with a number of `windows` or a reader's own `seed`, so
    many (1 by default) that the seed and the hash of the rounds draw among them. A seed that the
    author has drawn with draws no second time.

    Raises:
      RequestError: So many are not published.
    """
    names, seed, count = publication.row_files, asks.seed, asks.windows
    asked = seed is not None and seed == publication.seed
    if count is None:
        count = len(names) if seed is None or asked else 1
    if count > len(names):
        raise RequestError(
            f"--windows: {MANIFEST} has {len(names)} windows, expected {count}; ask the author for "
            f"`publish --windows {count}`"
        )
    generator = random.Random(
        f"reader {publication.rounds} {'' if asked or seed is None else seed}"
    )
    of_all_peers = re.fullmatch(layout.ROW_FILE, names[-1])[2] is None
    always = names[-1:] if of_all_peers else []  # nothing else is connected with the weights
    rest = [name for name in names if name not in always]
    return sorted(always + generator.sample(rest, count - len(always)))


def not_needed(publication: Publication, chosen: list[str]) -> set[str]:
    """Return the published files that only windows which were not chosen need.

    Of windows of all peers, whose snapshots are each other's, only rows are told apart.
    """
    left = set(publication.row_files) - set(chosen)
    owned = (re.fullmatch(layout.ROW_FILE, name) for name in left)
    snapshots = f"{outputs.TRANSCRIPT}/snapshots"
    return left | {
        f"{snapshots}/{int(found[1]) - 1:05}/own-{found[2]}.safetensors{packed.PLANES}"
        for found in owned
        if found[2]
    }


def matmul_precision(folder: Path) -> str | None:
    """Return the precision of matrix products that a publication was trained with, or None.

    It is a setting and no property of a machine, so the reader takes it over: else a header that
    names another would be reason enough to compare by tolerance.
    """
    environment = read_json(folder / outputs.HEADER).get("environment")
    said = environment.get("matmul_precision") if isinstance(environment, dict) else None
    return said if said in PRECISIONS else None
