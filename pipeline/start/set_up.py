"""What a training and its audit begin with: programs, data and the state before the first round."""

import logging
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.machine.jax_settings import other_settings
from lockstep.programs.columns import Column
from lockstep.programs.local_training import Work
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.programs.train_step import PeerResult, Programs
from lockstep.protocol.attestation import Hash
from lockstep.protocol.driver import RoundSettings
from lockstep.same_bits.operations import hash_of_operations
from lockstep.swarm.peers import Rows, work_of
from lockstep.swarm.training_loop import Start
from lockstep.transcript.state import State
from lockstep.transcript.trees import load_nested, load_tree, tree_hash
from pipeline import runfile
from pipeline.stage import devices
from pipeline.stage.keys import digest
from pipeline.start.round_settings import round_settings
from pipeline.subject import Model, Subject, programs_of, subject_of
from pipeline.tokens.ids import check_ids
from pipeline.tokens.sequences import Sequences
from pipeline.tokens.shards import read_shards
from pipeline.weights import hf
from pipeline.weights.earlier_run import EARLIER, trained_steps
from pipeline.weights.fresh import fresh_params

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setup:
    """The set-up of a run: programs and data with which trainers and auditors compute.

    `model` is what is trained, as the transcript's header has it; `data` are the rows to train on,
    and `start` is the state before the first round.
    """

    run: runfile.Run
    model: Model
    programs: Programs
    data: Rows
    start: Start

    @cached_property
    def settings(self) -> RoundSettings:
        """What a round reads of the run that was set up."""
        return round_settings(self.run)

    @cached_property
    def subject(self) -> Subject:
        """What the run that was set up trains."""
        return subject_of(self.run)

    def work(self, span: tuple[int, int], trainers: int) -> Work:
        """Return the work of a peer in the set-up run that is assigned the rows of `span`."""
        return work_of(self.settings, self.programs, self.data, span, trainers)

    @cached_property
    def operations(self) -> Hash:
        """Hash of the operations of a set-up run by rules, from which all of its bits follow."""
        count = self.run.peers.count
        no_row = self.data.take(np.arange(0))  # a bundle may lack any that was named here
        row = jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), x.dtype), no_row)
        most, size = self.settings.closing.capacity(count), self.settings.micro_batch
        hashes = self.programs.operations(self.programs.work(row, most, size).rows_MB, count)
        checkpoint = self.run.llm.checkpoint
        if isinstance(checkpoint, runfile.CheckpointInit) and self.subject.begins is None:
            drawn = partial(fresh_params, *hf.model_of(self.model, "model"))
            hashes.append(hash_of_operations(lambda _: drawn(checkpoint.seed), 0))
        return digest(hashes)

    def environment(self, processes: int = 1) -> dict[str, str]:
        """Return what can change a set-up run's bits here, with so many processes per peer.

        By rules that is which operations there are, whatever version of JAX traced them.
        """
        if self.run.peers.bits == "everywhere":
            return other_settings() | {"operations": self.operations}
        return devices.describe(processes) | self.programs.steps.by.environment


def read(run: runfile.Run, init: Path, shards: Path) -> Setup:
    """Set up a run from what the stages convert and download left in `init` and `shards`.

    Raises:
      LockstepError: The run asks for what the model or the data cannot have, or an earlier run's
        state is of another number of peers or another optimizer.
    """
    listed = read_shards(shards)
    subject = subject_of(run)
    model = subject.read_model(run, init / subject.described_in, listed)
    programs = programs_of(run, model, trained_steps(init), listed.columns)
    programs.steps.by.shards = shards
    start = _read_start(init, run, programs)
    return Setup(run, model, programs, rows(run, model, shards), start)


def read_to_train(run: runfile.Run, init: Path, shards: Path) -> Setup:
    """Set up a run as `read` does, and check that it can be trained on these rows."""
    _check_kind(run, shards)
    setup = read(run, init, shards)
    _check_tokens(setup, shards)
    return setup


def rows(run: runfile.Run, model: Model, shards: Path) -> Rows:
    """Return the set-up run's rows, from what stage download left in `shards`."""
    listed = read_shards(shards)
    if not run.held_out.sequences:  # nothing is measured
        listed = listed.all_to_train()
    length, bound = run.llm.max_seq_len, subject_of(run).vocab_size(model)
    return Sequences(shards, listed, "train", length, run.runtime, bound, run.peers.passes)


def blank(
    run: runfile.Run,
    model: Model,
    data: Rows,
    columns: tuple[Column, ...],
    step: int,
    data_index: int,
) -> Setup:
    """Return a set-up whose state is zeros that take no memory until they are written to.

    The run starts after `step` rounds and `data_index` sequences, 0 unless it extends another one.
    """
    programs = programs_of(run, model, step, columns)
    params = programs.task.shapes
    own, shared = jax.eval_shape(programs.optimizer.init, params)
    shapes = State(params, shared, (own,) * run.peers.count)
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return Setup(run, model, programs, data, Start(state, step, data_index))


def self_test(setup: Setup) -> str:
    """Return the hash of the result of the set-up run's first step, on its first sequences."""
    programs, (state, step, index) = setup.programs, setup.start
    group = device_groups(jax.devices(), programs.parts)[0]
    replica = Replica.put(programs, group, state.params, state.shared)
    rows = index, index + programs.optimizer.inner_steps - 1
    work = setup.work(rows, setup.settings.peers)
    return tree_hash(jax.device_get(replica.step(group.put(state.own[0]), work, step + 1)))


def repeats_bit_for_bit(setup: Setup) -> bool:
    """Return whether this machine gives a peer's first steps the same bits twice: a self-test.

    A user's own code repeats the step after other rows at other params, and once more in a fresh
    process.

    Raises:
      LockstepError: The user's code does not repeat it, and the run file does not say so.
    """
    programs, (state, step, index) = setup.programs, setup.start
    group = device_groups(jax.devices(), programs.parts)[0]
    replica = Replica.put(programs, group, state.params, state.shared)
    peers, of_user = setup.settings.peers, setup.subject.code(setup.model) is not None
    # A row for each local step, or a micro-batch: a batch norm, say, needs two rows.
    count = programs.optimizer.inner_steps * (setup.settings.micro_batch if of_user else 1)
    count = min(count, max(setup.settings.closing.capacity(peers), programs.optimizer.inner_steps))

    def work(first: int) -> Work:
        return setup.work((first, first + count - 1), peers)

    def once(work: Work, replica: Replica = replica) -> PeerResult:
        own = group.put(state.own[0])  # donated, so each time a copy
        return jax.device_get(replica.step(own, work, step + 1))

    rows = work(index)
    if not of_user:
        return tree_hash(once(rows)) == tree_hash(once(rows))
    programs.steps.by.close()  # it starts anew
    first = once(rows)
    moved = jax.tree.map(lambda x: np.float32(1.01) * x, state.params)
    once(work(index + count), Replica.put(programs, group, moved, state.shared))
    again = once(rows)
    programs.steps.by.close()
    for result, where in ((again, "after another step"), (once(rows), "in a fresh process")):
        if tree_hash(result) == tree_hash(first):
            continue
        if setup.subject.repeats(setup.run):
            losses = f"loss {first.loss:.9g} and, {where}, {result.loss:.9g}"
            raise _not_repeated(setup, f"{losses}, with other bits in the message")
        return False
    return True


def _not_repeated(setup: Setup, what: str) -> LockstepError:
    return LockstepError(
        f"{setup.subject.title(setup.model)}: the same params, rows and seed gave {what}, expected "
        "a step that repeats: it keeps nothing between steps, and draws random numbers only from "
        "the seeded generators of Python, NumPy and torch; or [workload] repeats = false, with "
        "which nobody can audit the run"
    )


def _read_start(init: Path, run: runfile.Run, programs: Programs) -> Start:
    """Return the set-up run's start from stage convert: fresh params, or an earlier run's."""
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
            f"{earlier['key']}, which this one extends: each peer continues with its own state"
        )
    folder = init / "earlier"
    names = [f"own-{peer:03}.safetensors" for peer in range(run.peers.count)]
    owned = tuple(load_tree(folder / name, own) for name in names)
    state = State(params, load_tree(folder / "shared.safetensors", shared), owned)
    return Start(state, earlier["step"], earlier["data_index"])


def _check_kind(run: runfile.Run, shards: Path) -> None:
    listed = read_shards(shards)
    if listed.rows is not None and not subject_of(run).any_rows:
        raise LockstepError(
            f"{runfile.variant_name(run.llm.data_location)}: rows are {listed.rows.kind}, expected "
            "tokens: a language model trains on them; other rows are for a workload"
        )
    if run.llm.data_type == "Finetuning" and "labels" not in listed.columns:
        raise LockstepError(
            f"model.LLM.data_type: Finetuning: {shards} has no labels to train on, expected "
            "Pretraining, or Preprocessed data with labels"
        )
    length = listed.row_length
    if length not in (None, run.llm.max_seq_len):
        unit = "tokens" if listed.rows is None else "words"
        raise LockstepError(
            f"model.LLM.max_seq_len is {run.llm.max_seq_len}, expected {length}, the number of "
            f"{unit} in a row of {listed.source['read']}"
        )


def _check_tokens(setup: Setup, shards: Path) -> None:
    run, start, data = setup.run, setup.start, setup.data
    needed = run.config.last_index(run.llm.max_seq_len, start.step, start.data_index)
    listed = read_shards(shards)
    if needed > len(data):
        row, unit = ("sequence", "tokens") if listed.rows is None else ("row", "words")
        raise LockstepError(
            f"{shards}: {data.count} {row}s of {run.llm.max_seq_len} {unit}, expected {needed} for "
            f"[config] total_steps = {run.config.total_steps}; [peers] passes is {data.passes}, "
            f"and passes = {-(-needed // data.count)} would be enough"
        )
    vocab_size, bound = listed.vocab_size, setup.subject.vocab_size(setup.model)
    if listed.rows is not None or bound is None:  # no ids, or no bound of them
        return
    if vocab_size is not None and vocab_size > bound:
        log.warning(
            f"train: warning: the tokenizer in {shards} has {vocab_size} tokens, and the model "
            f"{bound}: token ids beyond the model's vocabulary are rejected when read"
        )
    check_ids(shards, bound, run.llm.max_seq_len)
