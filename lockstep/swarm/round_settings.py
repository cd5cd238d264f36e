"""What a round reads of a run, from a run file or from `simulate`."""

from dataclasses import dataclass

import numpy as np

from lockstep.programs.local_steps import Work
from lockstep.programs.train_step import Programs
from lockstep.protocol import consensus
from lockstep.protocol.pace import Pace
from lockstep.protocol.round import Evidence, Round
from lockstep.protocol.run_state import Settings
from lockstep.swarm.peers import Rows
from lockstep.tables.links import Links


@dataclass(frozen=True)
class RoundSettings:
    """What a round reads of a run."""

    coordinator: Settings  # `[config]`, as the coordinator reads it
    links: Links
    peers: int
    seed: int  # `[peers] seed`
    row_tokens: int  # tokens of a row, by which `[links]` and the batch ramp count
    # rows of the largest batch, over all peers: shapes follow from it, not from a round's own
    # batch, so that a batch ramp compiles nothing anew.
    most_rows: int
    micro_batch: int  # rows of a gradient computation
    stores_epochs: bool = False  # whether a peer stores the params that end an epoch
    pace: Pace | None = None  # when rounds close without late messages; None if they wait for all

    @property
    def trainers(self) -> int:
        """The number of peers that train if all take part; the others verify."""
        return self.peers - self.peers * self.coordinator.verification_percent // 100

    @property
    def on_wall_clock(self) -> bool:
        """Whether real time decides who is late."""
        return self.links.clock == "wall"

    def closes(self, round_: Round, evidence: Evidence) -> float:
        """Return the seconds after its start at which a round closes."""
        return consensus.closes(self.pace, round_, evidence, self.coordinator)

    def work(self, programs: Programs, data: Rows, span: tuple[int, int], trainers: int) -> Work:
        """Return the work of a peer that is assigned the rows of `span`, first to last.

        Its shape follows from how many `trainers` there are in the round.
        """
        rows_N = data.take(np.arange(span[0], span[1] + 1))
        return programs.work(rows_N, self.capacity(trainers), self.micro_batch)

    def capacity(self, trainers: int) -> int:
        """Return the most rows that one of `trainers` peers is assigned in any round."""
        if self.pace:
            return self.pace.rows * max(self.pace.steps)
        return -(-self.most_rows // trainers)
