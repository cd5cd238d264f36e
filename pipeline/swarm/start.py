"""What training starts from: fresh params, or the whole state in which an earlier run ended."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.programs.placement import device_groups
from pipeline.programs.train_step import Programs
from pipeline.protocol import driver as rounds
from pipeline.protocol import links
from pipeline.stage.artifacts import read_json
from pipeline.transcript.state import State
from pipeline.weights.earlier_run import EARLIER
from pipeline.weights.trees import load_nested, load_tree


class Start(NamedTuple):
    """The state before the first round, and how many rounds and sequences are behind it."""

    state: State
    step: int
    data_index: int

    def progress(self, run: runfile.Run) -> rounds.Progress:
        """Where the run is before its first round, nobody having joined yet."""
        size = sum(leaf.nbytes for leaf in jax.tree.leaves((self.state.params, self.state.shared)))
        loads = [links.load_seconds(run.links, p, size=size) for p in range(run.peers.count)]
        return rounds.start(
            run.config,
            run.peers.count,
            run.peers.seed,
            run.llm.max_seq_len,
            self.step,
            self.data_index,
            loads,
        )


def read(init: Path, run: runfile.Run, programs: Programs) -> Start:
    """Reads what stage convert left.

    Raises:
      LockstepError: an earlier run's state is of another number of peers or another optimizer.
    """
    params = load_nested(init / "params.safetensors")
    group = device_groups(jax.devices(), programs.parts)[0]
    own, shared = jax.tree.map(np.asarray, programs.init(group.put(params)))
    fresh = State(params, shared, (own,) * run.peers.count)
    if not (init / EARLIER).exists():
        return Start(fresh, 0, 0)
    earlier = read_json(init / EARLIER)
    if earlier["peers"] != run.peers.count:
        raise LockstepError(
            f"[peers] count = {run.peers.count}, expected {earlier['peers']} as in run "
            f"{earlier['key']}, which this one extends: each peer goes on with its own state"
        )
    folder = init / "earlier"
    state = State(
        params,
        load_tree(folder / "shared.safetensors", shared),
        tuple(
            load_tree(folder / f"own-{peer:03}.safetensors", own) for peer in range(run.peers.count)
        ),
    )
    return Start(state, earlier["step"], earlier["data_index"])


def sequences_needed(run: runfile.Run, start: Start) -> int:
    """Where the data index stands after the run's last round."""
    return run.config.last_index(run.llm.max_seq_len, start.step, start.data_index)
