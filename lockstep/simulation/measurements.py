"""Measurements of a simulation between its rounds: the rows of its curves."""

import functools
import time
from collections.abc import Iterator
from dataclasses import asdict

import jax
import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.optim.transform import next_step
from lockstep.protocol import links
from lockstep.protocol.driver import RunProgress
from lockstep.simulation.arguments import Arguments
from lockstep.simulation.examples import ExampleSet
from lockstep.simulation.result import Log
from lockstep.swarm.peers import SimulatedPeers
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer

MEASURED_AT_ONCE = 256  # examples of `eval_data`


class Measurements(Observer):
    """Measures a simulation after `step` rounds, on `held_out`, and adds to the curves of `log`."""

    def __init__(
        self,
        asked: Arguments,
        peers: SimulatedPeers,
        held_out: ExampleSet | None,
        log: Log,
        step: int,
    ):
        self.asked, self.peers, self.held_out, self.log = asked, peers, held_out, log
        self.step = step
        self.ejected: dict[int, tuple[int, str]] = {}
        self._lookahead = jax.jit(peers.programs.optimizer.lookahead)

    def begins(self, step: int, progress: RunProgress) -> None:
        """Note when a round begins."""
        del step, progress
        self._began = time.monotonic()

    def took(self, entry: Entry) -> Entry:
        """Add a round to the curves, and what is measured after it."""
        seconds, curves = time.monotonic() - self._began, self.log.curves
        self.step = entry.round.step
        for peer, why in entry.decision.ejected.items():
            self.ejected[peer] = self.step, why
        before = curves.train[-1] if curves.train else {}
        sizes = [message.bytes for message in entry.evidence.messages.values()]
        peers, sequences = self.asked.peers, entry.round.sequences
        sent, received = links.traffic(self.asked.links.topology, sizes, peers)
        more = {
            "examples": sum(sequences[peer] for peer in entry.decision.applied),
            "bytes_up": sent / peers,
            "bytes_down": received / peers,
            "link_seconds": entry.decision.train_seconds,
            "seconds": seconds,
        }
        so_far = {name: before.get(name, 0) + value for name, value in more.items()}
        applied = len(entry.decision.applied)
        self.log.add("train", {"step": self.step, "loss": entry.loss, "applied": applied, **so_far})

        every = self.asked.correlation_every
        if every and self.step % every == 0:
            self.log.add("correlation", {"step": self.step, "correlation": self._correlation()})
        if self.step == self.asked.steps or self.step % self.asked.eval_every == 0:
            self.measure()
        return entry

    def saves(self) -> dict:
        """Return the curves, and who was ejected."""
        return {"ejected": self.ejected, "curves": asdict(self.log.curves)}

    def measure(self) -> None:
        """Measure the loss on the held-out examples: of the params, and of local ones."""
        if self.held_out is None:
            return
        loss = local = averaged = self._mean_loss(self._params)
        if not self._together:
            first, *others = self.local_params()
            local = self._mean_loss(first)
            total = functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), others, first)
            averaged = self._mean_loss(jax.tree.map(lambda x: x / self.asked.peers, total))
        row = {"step": self.step, "loss": loss, "local_loss": local, "averaged_loss": averaged}
        self.log.add("validation", row)

    def local_params(self) -> Iterator[Tree]:
        """Yield where each peer takes its next gradient: NumPy arrays."""
        params, optimizer = self._params, self.peers.programs.optimizer
        step = next_step(optimizer, np.int32(self.step * optimizer.inner_steps))
        if self._together:
            yield from [jax.tree.map(np.array, params)] * self.asked.peers
            return
        for peer in range(self.asked.peers):
            local = self._lookahead(params, self.peers.own(peer), self.peers.shared, step)
            yield jax.tree.map(np.array, local)

    def shown(self) -> dict[str, str]:
        """Return what the bar shows."""
        curves = self.log.curves
        row, measured = curves.train[-1], curves.validation[-1:]
        return {
            "loss": "-" if row["loss"] is None else f"{row['loss']:.4f}",
            "eval": f"{measured[0]['loss']:.4f}" if measured else "-",
            "sent_per_peer": f"{row['bytes_up'] / 1e3:,.1f} kB",
        }

    def _mean_loss(self, params: Tree) -> float:
        total, count = 0.0, self.held_out.count
        for first in range(0, count, MEASURED_AT_ONCE):
            index_N = np.arange(first, min(first + MEASURED_AT_ONCE, count))
            loss = self.peers.programs.steps.measure(params, self.held_out.take(index_N))
            total += float(loss) * len(index_N)
        return total / count

    def _correlation(self) -> float | None:
        """Return Pearson's correlation of local params, mean over pairs; None for one peer."""
        count = self.asked.peers
        if count < 2:
            return None
        rows = [
            np.concatenate([x.ravel() for x in jax.tree.leaves(local)])
            for local in self.local_params()
        ]
        matrix = np.corrcoef(np.stack(rows))
        return float((matrix.sum() - np.trace(matrix)) / (count * (count - 1)))

    @property
    def _params(self) -> Tree:
        return next(iter(self.peers.params_on.values()))

    @property
    def _together(self) -> bool:
        """Return whether peers take their gradients at the agreed params."""
        return not self.peers.programs.optimizer.looks_ahead
