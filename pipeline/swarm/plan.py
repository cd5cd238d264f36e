"""What a run will take, from its shapes alone: nothing is computed, read or downloaded."""

from pathlib import Path
from typing import NamedTuple

import jax

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.programs.language_model import programs_of
from pipeline.stage.artifacts import read_json
from pipeline.stage.progress import size
from pipeline.weights.earlier_run import trained_steps

ROUND, ROUND_OF_PEER, ROUND_OF_WITNESS = 700, 250, 1000  # bytes of rounds.jsonl, about


class Footprint(NamedTuple):
    """What a run will take, in bytes.

    Attributes:
      params: The params, float32.
      state: Params and the optimizer's state, of all peers: what a snapshot or checkpoint holds.
      message: One peer's message of one round; of Rice-coded positions about, and rather less.
      kept: Whether the transcript keeps messages.
      snapshots: Of those that the transcript keeps whole.
      payloads: Of all messages that it keeps.
      rounds: Of its record of rounds, about.
      checkpoints: Of those that there are at most, while it trains.
    """

    params: int
    state: int
    message: int
    kept: bool
    snapshots: int
    payloads: int
    rounds: int
    checkpoints: int

    @property
    def trained(self) -> int:
        """Size of `data/trained`, about."""
        return self.snapshots + self.payloads + self.rounds

    def lines(self) -> list[str]:
        """Return it for people to read."""
        payloads = size(self.payloads) if self.kept else "none: only hashes of so large messages"
        return [
            f"params         {size(self.params)}, with the optimizer's state of all peers "
            f"{size(self.state)}",
            f"messages       {size(self.message)} from each peer in each round",
            f"data/trained   {size(self.trained)}",
            f"  snapshots    {size(self.snapshots)}",
            f"  payloads     {payloads}",
            f"  rounds       {size(self.rounds)}",
            f"data/runs      {size(self.checkpoints)} of checkpoints, while it trains",
        ]


def plan_of(run: runfile.Run, hf_config: dict, first_step: int = 0) -> Footprint:
    """Return what a run will take.

    Args:
      run: The whole run.
      hf_config: The model's `config.json`.
      first_step: Rounds trained by the run that this one extends, 0 for a new run.
    """
    programs = programs_of(run, hf_config, first_step)
    params, peers = programs.task.shapes, run.peers.count
    own, shared = jax.eval_shape(programs.optimizer.init, params)
    state = _bytes(params) + _bytes(shared) + peers * _bytes(own)
    rounds = run.config.total_steps - first_step
    form = programs.form
    witnesses = run.config.witness_nodes or peers
    a_round = ROUND + ROUND_OF_PEER * peers + ROUND_OF_WITNESS * witnesses
    return Footprint(
        params=_bytes(params),
        state=state,
        message=form.bytes_about,
        kept=form.kept,
        snapshots=len(run.snapshots(first_step).kept) * state,
        payloads=rounds * peers * form.bytes_about if form.kept else 0,
        rounds=rounds * a_round,
        checkpoints=(run.runtime.keep_steps + 1) * state,  # one more while it is written
    )


def plan(run: runfile.Run, root: Path) -> Footprint:
    """Return what a run takes whose model is in its run file, or converted already.

    Raises:
      LockstepError: It is neither.
    """
    init, checkpoint = root / "data" / "init", run.llm.checkpoint
    if isinstance(checkpoint, runfile.CheckpointInit):
        return plan_of(run, dict(checkpoint.config))
    if not (init / "hf" / "config.json").is_file():
        raise LockstepError(
            f"{init / 'hf' / 'config.json'} is missing, expected the model of "
            f"{runfile.variant_name(checkpoint)}: `lockstep convert` makes it"
        )
    return plan_of(run, read_json(init / "hf" / "config.json"), trained_steps(init))


def _bytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
