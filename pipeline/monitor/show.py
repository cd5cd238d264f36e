"""The state of a training as text: a few lines for a person."""

import time
from collections.abc import Iterator, Sequence

from pipeline.monitor.training import Training
from pipeline.stage.progress import size

SAID = {
    "starting": "starting: no round is taken yet",
    "training": "training",
    "pausing": "training until this round is over, then paused",
    "paused": "paused; `lockstep resume` goes on",
    "stopped": "stopped; the same command goes on",
}


def ranges(peers: Sequence[int]) -> str:
    """Return ascending numbers as text: 0-3 5."""
    runs: list[list[int]] = []
    for peer in peers:
        if runs and peer == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], peer]
        else:
            runs.append([peer])
    return " ".join("-".join(map(str, run)) for run in runs)


def duration(seconds: float) -> str:
    """Return a number of seconds as text, in its two largest units: 3 h 12 min."""
    left, parts = round(seconds), []
    for name, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def rows(training: Training) -> Iterator[tuple[str, str]]:
    """Yield what is known of a training, by name."""
    status, peers = training.status, training.status.peers
    process = f", process {training.process}" if training.process else ""
    yield "run", f"{status.run}{process}"
    yield "state", SAID[training.state]
    ago = duration(max(0.0, time.time() - status.updated))
    yield "round", f"{status.round} of {status.rounds}, epoch {status.epoch}, {ago} ago"
    if status.rounds_per_second and status.tokens_per_second is not None and training.process:
        rounds, tokens = status.rounds_per_second, status.tokens_per_second
        yield "rate", f"{rounds:,.3g} rounds/s, {tokens:,.0f} tokens/s"
        yield "left", duration(status.seconds_left or 0.0)
    if status.loss is not None:
        held_out = status.held_out_loss
        measured = "" if held_out is None else f", held out {held_out:.3f}"
        yield "loss", f"{status.loss:.3f}{measured}"
    for name, value in peers:
        if value:
            yield name, ranges(value)
    if status.message_bytes is not None:
        yield "sent", f"{size(status.message_bytes)} by each peer in a round"
    free = size(training.free_bytes)
    yield "disk", f"{size(training.disk_bytes)} in {training.folder}, {free} free"
