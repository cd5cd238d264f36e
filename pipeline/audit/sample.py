"""Which windows an audit replays, and of which peers."""

import random
from typing import Literal

from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit import beacon


def seed_of(run: runfile.Run, transcript: Transcript) -> str:
    """Return the auditor's own seed, or the hash of the rounds, with the beacon if there is one.

    The default needs no secret, and cannot stop whoever writes a whole transcript from trying until
    the sample suits: an auditor who does not trust that author supplies a seed, or a beacon that
    was not known when the transcript was public.
    """
    if run.witness.seed is not None:
        return run.witness.seed
    found = beacon.read(run.witness.beacon)
    return transcript.hash if found is None else f"{found.value} {transcript.hash}"


def whose_seed(run: runfile.Run) -> Literal["auditor", "beacon", "transcript"]:
    """Return who chose that seed."""
    if run.witness.seed is not None:
        return "auditor"
    return "beacon" if run.witness.beacon else "transcript"


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
