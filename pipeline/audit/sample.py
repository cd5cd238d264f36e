"""Which windows an audit replays, and of which peers."""

import random

from pipeline import runfile
from pipeline.transcript.transcript import Transcript


def seed_of(run: runfile.Run, transcript: Transcript) -> str:
    """Return the auditor's own seed, or the hash of the rounds.

    The default needs no secret, and cannot stop whoever writes a whole transcript from trying until
    the sample suits: an auditor who does not trust that author supplies a seed.
    """
    return run.witness.seed if run.witness.seed is not None else transcript.hash


def draw(
    run: runfile.Run, windows: list[runfile.Window], seed: str, kept: bool
) -> list[tuple[runfile.Window, int]]:
    """Draw the windows to replay, and of which peers.

    These are `[witness] replay_percent` of all, rounded up, and those that `[witness] replay`
    names. If messages are not `kept`, a window is replayed for all its peers or none.
    """
    peers = range(run.peers.count)
    groups = [[(window, peer)] for window in windows for peer in peers]
    named = {(windows[index], p) for index, p in run.witness.chosen if index < len(windows)}
    if not kept:
        groups = [[(window, peer) for peer in peers] for window in windows]
        named = {(window, peer) for window, _ in named for peer in peers}
    count = -int(-len(groups) * run.witness.replay_percent // 100)
    drawn = random.Random(seed).sample(groups, count)
    return sorted({pair for group in drawn for pair in group} | named)
