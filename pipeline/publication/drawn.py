"""Which windows are published: drawn by the transcript, so that nobody picks the good ones."""

import random

from pipeline import runfile
from pipeline.audit.bundle import files_of
from pipeline.transcript.transcript import Transcript

Drawn = list[tuple[runfile.Window, tuple[int, ...]]]


def draw(
    transcript: Transcript, windows: list[runfile.Window], seed: str | None, count: int, kept: bool
) -> Drawn:
    """Draw `count` windows, each with the peers to replay: the last window, and others.

    The seed is the SHA-256 of rounds.jsonl, and what a reader asked for. The last window ends in
    the params that are exported, so it is always drawn, and only its peers are left to chance. A
    peer that sent nothing in a window is not drawn for it: its replay would show nothing. Unless
    messages are `kept`, a window is replayed for all its peers or none.
    """
    senders = {
        window: sorted({peer for e in transcript.window(window) for peer in e.evidence.messages})
        for window in windows
    }
    groups = {
        window: [(peer,) for peer in peers] if kept else [tuple(peers)]
        for window, peers in senders.items()
        if peers
    }
    generator = random.Random(f"publication {transcript.hash} {seed or ''}")
    *_, last = groups
    chosen = [(last, generator.choice(groups[last]))]
    rest = [(w, peers) for w, several in groups.items() for peers in several]
    rest = [pair for pair in rest if pair not in chosen]
    chosen += generator.sample(rest, min(count - 1, len(rest)))
    return [
        (window, tuple(sorted(peer for w, peers in chosen if w == window for peer in peers)))
        for window in sorted({window for window, _ in chosen})
    ]


def files(transcript: Transcript, drawn: Drawn, run: runfile.Run) -> set[str]:
    """Return the transcript's files that a publication has: no other is ever looked at.

    These are all rounds, the hashes of all snapshots, and what the replay of the drawn windows
    takes, without the last params where the published weights are these.
    """
    names = {"rounds.jsonl", "header.json"}
    names |= {f"snapshots/{step:05}/state.json" for step in transcript.snapshots}
    for window, peers in drawn:
        names |= files_of(transcript, list(transcript.window(window)), window, peers)
    if run.export.dtype == "float32":
        names.remove(f"snapshots/{transcript.snapshots[-1]:05}/params.safetensors")
    return names
