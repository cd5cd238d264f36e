"""The state of a training, as status.json in its folder of work in progress has it."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from lockstep.protocol.driver import RunProgress
from lockstep.protocol.run_state import ClientState
from lockstep.tables.table import Table
from lockstep.transcript.entry import Entry

STATUS_FILE = "status.json"


class Members(Table):
    """Who did what in the last round, and who took no part in it: numbers of peers, ascending."""

    training: tuple[int, ...] = ()
    """Peers that trained."""
    verifying: tuple[int, ...] = ()
    """Peers that recomputed others' steps."""
    witnessing: tuple[int, ...] = ()
    """Peers that attested to what arrived."""
    late: tuple[int, ...] = ()
    """Peers whose message arrived too late, or never."""
    waiting: tuple[int, ...] = ()
    """Peers that asked to take part, and do from the next epoch on."""
    dropped: tuple[int, ...] = ()
    """Peers that are out of the epoch, since nobody heard from them."""
    left: tuple[int, ...] = ()
    """Peers that left by themselves."""
    ejected: tuple[int, ...] = ()
    """Proven liars, out of the run."""

    @classmethod
    def after(cls, progress: RunProgress, entry: Entry) -> "Members":
        """Return who did what in a round; `progress` is the run after it."""
        round_, state, silent = entry.round, progress.state, {*entry.evidence.silent}

        def heard(peers: Collection[int]) -> tuple[int, ...]:
            return tuple(sorted({*peers} - silent))

        dropped = {r.peer for r in state.exited if r.state == ClientState.Dropped}
        return cls(
            training=heard(round_.assignment),
            verifying=heard(round_.verifiers),
            witnessing=heard(round_.witnesses),
            late=heard(entry.decision.late),
            waiting=tuple(sorted(state.pending)),
            dropped=tuple(sorted(dropped - {*state.pending})),
            left=tuple(sorted(progress.left)),
            ejected=tuple(sorted(state.ejected)),
        )


class Status(Table):
    """status.json: where a training is."""

    state: Literal["starting", "training", "paused"] = "starting"
    """What it does."""
    run: str
    """Path of the run file."""
    process: int
    """Its process id."""
    round: int
    """The last round that was taken; 0 before the first."""
    rounds: int
    """The run's last round."""
    epoch: int = 0
    """The epoch of the last round, from 0."""
    loss: float | None = None
    """Mean loss of the peers before the last round, nats per token."""
    held_out_loss: float | None = None
    """The last that was measured, nats per token."""
    rounds_per_second: float | None = None
    """Mean rate since training began, or went on; null before the second round."""
    tokens_per_second: float | None = None
    """The same, in tokens of all peers."""
    message_bytes: float | None = None
    """Bytes that a peer sent in the last round, mean over peers."""
    peers: Members = Members()
    """Who takes part in it."""
    updated: float
    """When this was written, seconds since 1970."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last round, at the mean rate."""
        if not self.rounds_per_second:
            return None
        return (self.rounds - self.round) / self.rounds_per_second

    def write(self, folder: Path) -> None:
        """Replace status.json. It is not flushed to disk: it is for those who look now."""
        aside = folder / f".{STATUS_FILE}.part"
        aside.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        os.replace(aside, folder / STATUS_FILE)
