"""Which windows are published: the author's draw, by the transcript's hash.

What is drawn and repeated as one is a window of one peer or, where messages are not kept, of all
its peers together.
"""

import random
from typing import NamedTuple

from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from parts.publication import layout, packed
from pipeline import runfile
from pipeline.audit.bundle import files_of
from pipeline.audit.sample import Beacon

Drawn = list[tuple[Window, tuple[int, ...]]]


class DrawnWindow(NamedTuple):
    """A window, and those of its peers that are replayed."""

    window: Window
    peers: tuple[int, ...]


def possible(transcript: Transcript, windows: list[Window], kept: bool) -> list[DrawnWindow]:
    """Return all windows of a run that can be drawn, in order.

    A peer that sent nothing in a window has none there: its replay would show nothing.
    """
    found = []
    for window in windows:
        peers = sorted({peer for e in transcript.window(window) for peer in e.evidence.messages})
        several = [(peer,) for peer in peers] if kept else [tuple(peers)]
        found += [DrawnWindow(window, some) for some in several if some]
    return found


def seed_of(transcript: Transcript, seed: str | None, beacon: Beacon | None) -> str:
    """Return what an author draws with: the hash of the rounds, a reader's word, a beacon."""
    return " ".join((transcript.hash, seed or "", *([] if beacon is None else [beacon.value])))


def draw(
    transcript: Transcript, windows: list[Window], seed: str, count: int, kept: bool
) -> list[DrawnWindow]:
    """Draw `count` windows to publish with a seed of `seed_of`; the author's draw.

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
    return f"{layout.ROWS}/{drawn.window.first:05}{peer}.safetensors"


def merged(some: list[DrawnWindow]) -> Drawn:
    """Return each window once, with all its drawn peers, which are replayed together."""
    return [
        (window, tuple(sorted(peer for w, peers in some if w == window for peer in peers)))
        for window in sorted({window for window, _ in some})
    ]


def files(
    transcript: Transcript,
    published: list[DrawnWindow],
    run: runfile.Run,
    *,
    kept: bool,
    given: bool,
) -> set[str]:
    """Return the transcript's files that a publication has: no other is ever looked at.

    These are all rounds and the hashes of all snapshots. Where messages are kept, all of them, and
    what the peers of the published windows owned: the params follow from the run's start, which is
    here where it is `given`. Where they are not, whole snapshots, without the last params where the
    published weights are these.
    """
    names = {packed.ROUNDS, "header.json"}
    names |= {f"snapshots/{step:05}/state.json" for step in transcript.snapshots}
    if not kept:
        for window, peers in merged(published):
            names |= files_of(transcript, list(transcript.window(window)), window, peers)
        if run.export.dtype == "float32":
            names.remove(f"snapshots/{transcript.snapshots[-1]:05}/params.safetensors")
        return names
    for entry in transcript.rounds:
        sent = (*entry.evidence.messages.values(), *entry.evidence.others.values())
        names |= {f"payloads/{message.payload}" for message in sent}
    start = f"snapshots/{transcript.snapshots[0]:05}"
    if given:
        names |= {f"{start}/{part}.safetensors" for part in ("params", "shared")}
    return names | {
        f"snapshots/{window.opening:05}/own-{peers[0]:03}.safetensors"
        for window, peers in published
    }
