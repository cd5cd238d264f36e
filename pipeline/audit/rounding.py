"""Measures rounding: an honest window replayed here, and in a process whose bits differ.

The auditor measures this on its own machine, from the transcript's snapshots and its own data. What
peers sent does not matter: nobody's message is compared but the auditor's with the auditor's.

    python -m pipeline.audit.rounding FOLDER

is that process. It reads FOLDER/asked.json and the sequences beside it, and writes its messages to
FOLDER/messages.bin. It computes on the CPU with another number of threads and other vector
instructions; JAX reads both when it is imported, so they are in the process's environment.
"""

import json
import logging
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from lockstep.optim.optimizer import Tree
from lockstep.programs.columns import Column
from lockstep.programs.placement import device_groups
from lockstep.transcript.entry import Entry, Header
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from lockstep.wire import message as wire
from lockstep.wire.pieces import MOST_DRAWN
from pipeline import runfile
from pipeline.audit import rows_file
from pipeline.audit.replay import WindowPeers
from pipeline.audit.tolerance import (
    PeersOfWindows,
    distance_of_state,
    distance_of_update,
    distances_by_kind,
)
from pipeline.audit.verdict import Varied
from pipeline.stage import devices
from pipeline.start import begin
from pipeline.start.begin import Setup

JOB, RESULTS, TOKENS = "asked.json", "messages.bin", "tokens.safetensors"
ISA = "--xla_cpu_max_isa="
VARIED = {"threads", "instruction_set"}  # of an environment: what is varied here
LENGTH = struct.Struct("<Q")

log = logging.getLogger(__name__)


class OtherBits(NamedTuple):
    """Settings under which bits differ from those of this process: threads, and XLA's flags."""

    threads: str
    flags: str
    words: str

    @classmethod
    def than(cls, environment: Mapping[str, str]) -> "OtherBits":
        """Return other settings than an environment has."""
        flags = environment["XLA_FLAGS"].split()
        widest = [flag for flag in flags if not flag.startswith(ISA)]
        limited = widest != flags
        threads = "4" if environment["NPROC"] == "1" else "1"
        isa = "the CPU's widest vector instructions" if limited else "AVX instructions"
        words = f"{isa} and {threads} thread{'' if threads == '1' else 's'}"
        return cls(threads, " ".join(widest if limited else [*widest, f"{ISA}AVX"]), words)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that set them."""
        return {
            "NPROC": self.threads,
            "XLA_FLAGS": self.flags,
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_PLATFORMS": "cpu",
        }


def measurable(setup: Setup, header: Header) -> bool:
    """Return whether what differs from training is what can be varied here.

    Other devices or versions may differ by more, so that the fixed bounds hold for them.
    """
    peers, environments = setup.run.peers, (setup.environment(), header.environment)
    here, there = (e | {"xla_flags": _others(e)} for e in environments)
    different = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    return (
        header.bitwise
        and setup.subject.varies_here
        and (peers.layout, peers.fsdp, peers.processes) == ("each", 1, 1)
        and here.get("platform") == "cpu"
        and different <= VARIED
    )


def _others(environment: Mapping[str, str]) -> str:
    """Return XLA's flags without those for vector instructions."""
    flags = environment.get("xla_flags", "").split()
    return " ".join(flag for flag in flags if not flag.startswith(ISA))


def measure(
    setup: Setup, transcript: Transcript, work: PeersOfWindows, compiled: str = ""
) -> Varied | None:
    """Return how far honest messages are from those of other bits; None where not measured.

    The first of the windows and the last are replayed, of one peer or, where messages are not kept,
    of all: early steps change more, and late gradients scatter more for their size.
    `work` lists the windows to replay; `compiled` is the folder of compiled programs.
    """
    header, kept = transcript.header, setup.programs.form.kept
    chosen = [(window, peers) for window, peers in work if peers]
    if not chosen or not measurable(setup, header) or not (kept or header.sketched):
        return None
    ends = chosen[:1] + chosen[1:][-1:]
    work = [(window, peers[:1] if kept else peers) for window, peers in ends]
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name), OtherBits.than(os.environ)
        _ask(setup, transcript, work, folder, compiled)
        rounds = ", ".join(f"{window.first}-{window.last}" for window, _ in work)
        log.info(f"witness: rounds {rounds} again, with {other.words}")
        process = subprocess.run(
            [sys.executable, "-m", __name__, name],
            env=os.environ | other.variables, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if process.returncode:
            last = (process.stderr.strip().splitlines() or ["no word"])[-1]
            log.warning(f"witness: it ended with status {process.returncode}: {last}")
            return None
        with open(folder / RESULTS, "rb") as file:
            windows = [HonestWindow(setup, transcript, *pair).distances(file) for pair in work]
    distances = [distance for window in windows for distance in window.messages]
    return Varied(
        max(distances, default=0.0),
        other.words,
        len(distances),
        max((window.params for window in windows if window.params is not None), default=None),
        _largest(own for window in windows for own in window.own),
    )


def main(folder: Path) -> None:
    """Replay the windows that a folder asks for, and write the honest messages there."""
    job = read_json(folder / JOB)
    if job["compiled"]:
        devices.keep_compiled(Path(job["compiled"]))
    run, transcript = runfile.parse(job["run"], JOB), Transcript(Path(job["transcript"]))
    columns: tuple[Column, ...] = tuple(job["columns"])
    rows = rows_file.read(folder / TOKENS, columns, run, None)
    setup = begin.blank(run, job["model"], rows, columns, job["step"], job["data_index"])
    with open(folder / RESULTS, "wb") as file:
        for window, peers in job["work"]:
            for data in HonestWindow(setup, transcript, Window(*window), peers).results():
                file.write(LENGTH.pack(len(data)) + data)


def _ask(
    setup: Setup, transcript: Transcript, work: PeersOfWindows, folder: Path, compiled: str
) -> None:
    columns = setup.programs.task.columns
    rows = [rows_file.assigned(transcript.window(window), peers) for window, peers in work]
    rows_file.write(folder / TOKENS, setup.data, np.concatenate(rows))
    job = {
        "run": setup.run.model_dump(mode="json"),
        "model": setup.model,
        "columns": columns,
        "step": setup.start.step,
        "data_index": setup.start.data_index,
        "transcript": str(transcript.folder.absolute()),
        "work": [(window, [*peers]) for window, peers in work],
        "compiled": compiled,
    }
    write_json(folder / JOB, json.loads(json.dumps(job)))


class Distances(NamedTuple):
    """Distances between honest results of the other process and of this one, in a window.

    One of each message; `params` as in `Varied`, and `own` of each peer.
    """

    messages: list[float]
    params: float | None
    own: list[dict[str, float]]


def _largest(distances: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest number of each name."""
    largest: dict[str, float] = {}
    for d in distances:
        largest |= {name: max(number, largest.get(name, 0.0)) for name, number in d.items()}
    return largest


def _read(file: BinaryIO) -> bytes:
    (size,) = LENGTH.unpack(file.read(LENGTH.size))
    return file.read(size)


def _read_like(tree: Tree, file: BinaryIO) -> Tree:
    return jax.tree.map(lambda x: np.frombuffer(_read(file), x.dtype).reshape(x.shape), tree)


class HonestWindow(WindowPeers):
    """A window in which all peers are honest."""

    def __init__(self, setup: Setup, transcript: Transcript, window: Window, peers: Sequence[int]):
        group = device_groups(jax.devices(), setup.programs.parts)[0]
        super().__init__(setup, transcript, window, peers, group)
        self.kept = setup.programs.form.kept

    def results(self) -> Iterator[bytes]:
        """Yield each honest message as bytes or, if messages are not kept, many of its pieces.

        If messages are not kept, the arrays of the params and of the shared state after the window
        follow; in any case, those of what each peer owns then.
        """
        form = self.setup.programs.form
        for entry, _, message in self.messages():
            if self.kept:
                yield bytes(wire.encode(message, form))
            else:
                yield form.pieces.chosen(wire.fields(message), self._pieces(entry))
        if not self.kept:
            yield from map(bytes, wire.fields(self._agreed()))
        for own in self.own.values():
            yield from map(bytes, wire.fields(jax.device_get(own)))

    def distances(self, file: BinaryIO) -> Distances:
        """Return how far another process's results are from those computed here."""
        form, distances, params = self.setup.programs.form, list[float](), None
        for entry, peer, message in self.messages():
            theirs = _read(file)
            if self.kept:
                work, sent = self.work(entry, peer), wire.decode(theirs, form)
                distance, _ = self.replica.compare(self.own[peer], work, entry.round.step, sent)
                distances.append(float(distance))
            else:
                pieces = form.pieces.split(theirs, self._pieces(entry))
                distances.append(form.pieces.distance(wire.fields(message), pieces))
        if not self.kept:
            params = self._distance_of_agreed(file)
        own = [self._distances_of_own(peer, file) for peer in self.own]
        if not np.isfinite([*distances, params or 0.0, *_largest(own).values()]).all():
            raise LockstepError("honest messages are not finite, expected finite ones")
        return Distances(distances, params, own)

    def _distance_of_agreed(self, file: BinaryIO) -> float:
        mine = self._agreed()
        theirs = _read_like(mine, file)
        opening = self.transcript.agreed(self.window.opening, self.setup.start.state)
        return max(
            distance_of_update(theirs[0], mine[0], opening[0]),
            distance_of_state(theirs[1], mine[1], opening[1], mine[0]),
        )

    def _distances_of_own(self, peer: int, file: BinaryIO) -> dict[str, float]:
        mine, like = jax.device_get(self.own[peer]), self.setup.start.state
        opening = self.transcript.own_before(self.window, peer, like.own[peer])
        return distances_by_kind(_read_like(mine, file), mine, opening, like.params)

    def _agreed(self) -> tuple[Tree, Tree]:
        """Return the params now, and what peers share."""
        return jax.device_get((self.replica.params, self.replica.shared))

    def _pieces(self, entry: Entry) -> range:
        """Return evenly spaced pieces, others in each round, and more than a sketch has."""
        count = self.setup.programs.form.pieces.count
        stride = -(-count // MOST_DRAWN)
        return range(entry.round.step % stride, count, stride)

    def messages(self) -> Iterator[tuple[Entry, int, Tree]]:
        """Yield the window's honest messages; peers are as before them, if they are kept."""
        for entry in self.transcript.window(self.window):
            self.begin(entry)
            honest: dict[int, Tree] = {}
            for peer in self.senders(entry):
                if self.kept:
                    own = jax.tree.map(jnp.copy, self.own[peer])  # which the step takes
                    result = self.replica.step(own, self.work(entry, peer), entry.round.step)
                    yield entry, peer, jax.device_get(result.message)
                    self.compare(entry, peer)
                else:
                    honest[peer] = jax.device_get(self.step(entry, peer))
                    yield entry, peer, honest[peer]
            self.receive(entry, honest)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
