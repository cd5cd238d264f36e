"""What a run will take, from its shapes alone: nothing is computed, read or downloaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.machine import memory as machine_memory
from lockstep.machine.progress import size
from lockstep.optim.optimizer import Tree
from lockstep.programs.device_memory import DeviceMemory, device_memory
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.committee import MAX_WITNESSES
from lockstep.wire.message import KEPT_BYTES
from pipeline import runfile
from pipeline.convert import fresh_config
from pipeline.preflight.model import model_of_run
from pipeline.start import in_time
from pipeline.start.round_settings import round_settings
from pipeline.subject import Model, programs_of, subject_of
from pipeline.weights.earlier_run import trained_steps

ROUND_BYTES, PEER_BYTES, WITNESS_BYTES = 700, 250, 1000  # bytes of rounds.jsonl, about


class Footprint(NamedTuple):
    """What a run will take, in bytes, and its simulated time."""

    params: int  #: The params, float32.
    #: Params and the optimizer's state, of all peers: what a snapshot or checkpoint holds.
    state: int
    #: One peer's message of one round; of Rice-coded positions about, and rather less.
    message: int
    kept: bool  #: Whether the transcript keeps messages.
    kept_states: int  #: How many whole states the transcript keeps.
    snapshots: int  #: Size of all of them.
    payloads: int  #: All messages that the transcript keeps.
    rounds: int  #: The transcript's record of rounds, about.
    checkpoints: int  #: The most checkpoints that exist at a time, while it trains.
    #: Messages of a round that are on disk until it is over; 0 where this machine's memory holds
    #: them. A device may have less memory, which is not known here.
    spooled: int
    seconds: float  #: Simulated time of the whole run, about.
    #: Simulated time until all messages of an average round have arrived, or enough of them; at
    #: most the limit.
    round_seconds: float
    late: str | None  #: A warning, where some messages cannot be in time.

    @property
    def trained(self) -> int:
        """Size of `data/trained` that a run will take, about."""
        return self.snapshots + self.payloads + self.rounds

    def lines(self) -> list[str]:
        """Return what a run will take, in lines for people."""
        payloads = size(self.payloads)
        if not self.kept:
            payloads += f": of over {KEPT_BYTES} bytes a param, messages are not kept"
        return [
            f"params         {size(self.params)}, with the optimizer's state of all peers "
            f"{size(self.state)}",
            f"messages       {size(self.message)} from each peer in each round",
            f"data/trained   {size(self.trained)}",
            f"  snapshots    {size(self.snapshots)}",
            f"  payloads     {payloads}",
            f"  rounds       {size(self.rounds)}",
            f"data/runs      {size(self.checkpoints)} of checkpoints, while it trains"
            + (f", and {size(self.spooled)} of a round's messages" if self.spooled else ""),
            f"simulated time {self.seconds / 3600:,.2f} hours, at the speeds of [links] and the "
            "times of [config]; what this machine takes is another matter",
            f"  a round      {self.round_seconds:,.2f} seconds until its messages have arrived",
            *([f"warning: {self.late}"] if self.late else []),
        ]


def plan_of(run: runfile.Run, model: Model, first_step: int = 0) -> Footprint:
    """Return what a run will take.

    `model` is what is trained, as a transcript's header has it, and `first_step` the rounds trained
    by the run that this one extends, 0 for a new run.
    """
    programs = programs_of(run, model, first_step)
    params, peers = programs.task.shapes, run.peers.count
    own, shared = jax.eval_shape(programs.optimizer.init, params)
    state = _bytes(params) + _bytes(shared) + peers * _bytes(own)
    saved = 0 if first_step else (peers - 1) * _bytes(own)  # at the start peers share one file
    kept_states = len(run.snapshots(first_step).kept)
    rounds = run.config.total_steps - first_step
    form = programs.form
    witnesses = run.config.witness_nodes or min(peers, MAX_WITNESSES)
    round_seconds = _round_seconds(run, programs)
    a_round = ROUND_BYTES + PEER_BYTES * peers + WITNESS_BYTES * witnesses
    return Footprint(
        params=_bytes(params),
        state=state,
        message=form.bytes_about,
        kept=form.kept,
        kept_states=kept_states,
        snapshots=kept_states * state - saved,
        payloads=rounds * peers * form.bytes_about if form.kept else 0,
        rounds=rounds * a_round,
        checkpoints=(run.runtime.keep_steps + 1) * state,  # one more while it is written
        spooled=peers * form.bytes_about if form.large(peers, machine_memory.total()) else 0,
        seconds=_seconds(run, rounds, round_seconds, _bytes(params) + _bytes(shared)),
        round_seconds=round_seconds,
        late=in_time.check(run, programs),
    )


def _round_seconds(run: runfile.Run, programs: Programs) -> float:
    """Return the planned seconds until an average round's messages arrive, without faults."""
    config = run.config
    total = sum(size * count for size, count in config.sizes(run.llm.max_seq_len))
    settings = round_settings(run)
    times = in_time.arrivals(settings, programs, total / config.total_steps).values()
    return settings.closing.usual(times)


def _seconds(run: runfile.Run, rounds: int, round_seconds: float, agreed: int) -> float:
    """Return about how long the planned rounds take by the simulated clock, without faults."""
    config, peers = run.config, range(run.peers.count)
    of_round = round_seconds + config.round_witness_time
    loaded = max(links.load_seconds(run.links, peer, size=agreed) for peer in peers)
    epochs = -(-rounds // config.rounds_per_epoch) if config.rounds_per_epoch else None
    if epochs is None:
        epochs = -(-rounds * of_round // (config.epoch_time - min(loaded, config.warmup_time)))
    pauses = epochs * config.waiting_for_members_extra_time + (epochs - 1) * config.cooldown_time
    return rounds * of_round + min(loaded, config.warmup_time) + pauses


def plan(run: runfile.Run, root: Path, *, converted: bool = True) -> Footprint:
    """Return what a run takes; for a model on the hub, its config.json is enough.

    `converted` says whether `data/init` is this run's, and not another's.
    """
    if not converted and _is_on_hub(run) and (model := model_of_run(run, root)):
        return plan_of(run, model.config)
    return plan_of(run, *_model(run, root))


def memory_lines(run: runfile.Run, root: Path, *, converted: bool) -> Iterator[str]:
    """Yield the memory that the run takes on the devices here, for people to read."""
    if not converted and _is_on_hub(run):
        yield "memory         not known before `lockstep convert`"
        return
    if run.peers.attention == "cudnn" and jax.default_backend() != "gpu":
        yield (
            'memory         not known here: [peers] attention = "cudnn" is compiled for an NVIDIA '
            f"GPU, and this is a {jax.default_backend()}"
        )
        return
    subject, (model, first_step) = subject_of(run), _model(run, root)
    if subject.memory_unknown:
        yield f"memory         not known: {subject.memory_unknown}"
        return
    import orbax.checkpoint  # noqa: F401 - counts too: training loads it

    memory = run_memory(run, programs_of(run, model, first_step))
    if memory is None:
        yield "memory         this backend does not say"
        return
    yield from _lines_of(memory)
    if not run.runtime.in_one_process:
        yield "  all of it in one process; as processes, each peer takes Python and programs again"
    if run.peers.layout != "each":
        yield f"  all of it for layout each; {run.peers.layout} is one larger program"


def run_memory(run: runfile.Run, programs: Programs) -> DeviceMemory | None:
    """Return the memory that a planned run takes on devices; None if the backend has no figures."""
    settings = round_settings(run)
    rows = np.zeros((run.peers.micro_batch, run.llm.max_seq_len), np.int32)
    work = programs.work(rows[:1], settings.closing.capacity(settings.trainers), len(rows))
    return device_memory(programs, run.peers.count, work, rows, load_all=True)


def _lines_of(memory: DeviceMemory) -> Iterator[str]:
    devices = memory.groups * memory.parts
    on = "1 device" if devices == 1 else f"{devices} devices"
    limit = size(memory.limit)
    if memory.in_one:
        yield f"memory         {size(memory.on_all_devices)} of arrays on {on}, of the {limit} here"
    else:
        yield f"memory         {size(memory.on_each_device)} of the {limit} of each of {on}"
    yield f"  each device  {size(memory.agreed)} that peers agree on, one copy"
    yield f"  each peer    {size(memory.own)} of its own, and {size(memory.message)} of message"
    for name in ("step", "receive", "measure"):
        yield f"  {name:<13}{size(getattr(memory, name).beyond)} while it runs"
    if memory.large:
        sent = memory.parts * memory.peers * memory.message
        yield f"  a round      {size(sent)} of messages on disk, and merged a part at a time"
    if memory.whole_process is not None:
        yield (
            f"  the process  {size(memory.whole_process)} at its peak, with Python, programs, a "
            "checkpoint that is being saved and the allocator's pool"
        )


def _is_on_hub(run: runfile.Run) -> bool:
    return isinstance(run.llm.checkpoint, runfile.CheckpointHub)


def _model(run: runfile.Run, root: Path) -> tuple[Model, int]:
    """Return what the planned run trains, and the rounds that it was trained for already."""
    checkpoint, init, subject = run.llm.checkpoint, root / "data" / "init", subject_of(run)
    if isinstance(checkpoint, runfile.CheckpointInit):
        return fresh_config(run, checkpoint), 0
    path = init / subject.described_in
    if not path.is_file():
        raise LockstepError(
            f"{path} is missing, expected the model of {runfile.variant_name(checkpoint)}: "
            "`lockstep convert` makes it"
        )
    return subject.read_model(run, path, None), trained_steps(init)


def _bytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
