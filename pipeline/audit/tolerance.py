"""How far a message may be from its replay where bits cannot be equal.

The bound is fixed for models of `models/`. A workload may compute in any way, so the auditor
repeats an honest step of its own and measures how far its own messages are from each other: the
trainer's word for that could hide a lie.
"""

import jax
import numpy as np

from pipeline import runfile
from pipeline.programs.placement import device_groups
from pipeline.programs.replica import Replica
from pipeline.swarm.begin import Setup

# The largest distance (`Optimizer.compare`) of a sent message from the replayed one, by the
# precision of the gradients. docs/explanation/verification.md says what was measured.
TOLERANCE = {"float32": 0.05, "bfloat16": 0.5}
REPEATS = 4  # honest ones of a step
MARGIN = 4  # times the largest distance among them; of what is not seen in so few
MOST = 0.5  # beyond it, a lie could hide


def limit(run: runfile.Run, repeats: float | None) -> float:
    """Return the largest distance that is accepted.

    `repeats` is the largest among an auditor's honest repeats, None where none were taken.
    """
    fixed = TOLERANCE[run.peers.precision]
    return fixed if repeats is None else max(fixed, min(MOST, MARGIN * repeats))


def repeated(setup: Setup) -> float | None:
    """Return the largest distance among honest repeats of a peer's first step; None of no workload.

    Repeats say how far bits scatter on this machine, and nothing of another one.
    """
    if not setup.run.workload.factory:
        return None
    programs, (state, step, index) = setup.programs, setup.start
    group = device_groups(jax.devices(), programs.parts)[0]
    replica = Replica.put(programs, group, state.params, state.shared)
    work = setup.settings.work(
        programs,
        setup.data,
        (index, index + programs.optimizer.inner_steps - 1),
        setup.run.peers.count,
    )
    first = replica.step(group.put(state.own[0]), work, step + 1).message
    distances = [
        replica.compare(group.put(state.own[0]), work, step + 1, first)[0] for _ in range(REPEATS)
    ]
    return float(np.max(jax.device_get(distances)))
