"""One round of all peers, from their batches to the params they agree on next."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.programs.train_step import Work
from pipeline.protocol import committee, consensus, driver, links
from pipeline.protocol.coordinator import ClientState, CoordinatorError
from pipeline.protocol.dispute import Check, Claim, Ruling
from pipeline.protocol.driver import RunProgress
from pipeline.protocol.round import Evidence, Message, Round, Span
from pipeline.swarm.faults import FaultSchedule
from pipeline.swarm.peers import Done, RoundSteps, Rows, RunningPeers
from pipeline.swarm.round_settings import RoundSettings
from pipeline.transcript.entry import Entry
from pipeline.wire import exchange
from pipeline.wire import message as wire
from pipeline.wire.exchange import Sent


class Taken(NamedTuple):
    """A round that was taken: its record, and the bytes that were sent, by peer.

    others: An equivocator's other message.
    """

    entry: Entry
    payloads: dict[int, bytes]
    others: dict[int, bytes]


class NotFiniteError(Exception):
    """No peer's loss, or no peer's message, is finite: training diverged."""


@dataclass(frozen=True)
class Swarm:
    """A run's peers, and all that a round of them needs.

    Attributes:
      settings: What it reads of the run.
      peers: Peers that train.
      data_of: Returns the rows that a peer is assigned some of.
      faults: The run's schedule of faults.
      must_pause: Returns whether the run's owner asks for a pause.
      timed: Returns a block whose time counts for a phase of the round.
    """

    settings: RoundSettings
    peers: RunningPeers
    data_of: Callable[[int], Rows]
    faults: FaultSchedule
    must_pause: Callable[[], bool] = bool
    timed: Callable[[str], AbstractContextManager[None]] = nullcontext

    @property
    def form(self) -> wire.Form:
        """The form of the run's messages."""
        return self.peers.programs.form

    def take_round(self, progress: RunProgress) -> tuple[RunProgress, Taken | None]:
        """Take the next round, or return None where the run has finished.

        A run that was paused is resumed.

        Raises:
          NotFiniteError: No peer's loss is finite, or no peer's message.
          LockstepError: Too few peers are left.
        """
        with self.timed("assign"):
            progress, asked, round_ = self._begin(progress)
            if round_ is None:
                return progress, None
            joined_params = self._join(round_)
            self.peers.take_back(set(round_.peers).difference(round_.joined))
        silent = {*self.faults.silence(round_), *progress.unready}
        silent |= self.peers.absent.intersection(round_.peers)

        # Work: what was assigned, and what is really done
        spans = {peer: span for peer, span in round_.assignment.items() if peer not in silent}
        with self.timed("read"):
            given = {peer: self._read(peer, span, round_) for peer, span in spans.items()}
        checked = {v: p for v, p in round_.verifiers.items() if v not in silent and p in given}
        with self.timed("verify"):
            before = {peer: self.peers.own(peer) for peer in sorted(set(checked.values()))}
        with self.timed("train"):
            done, loss = self._step(given, round_)
            self.peers.sit_out(round_.idle.difference(silent), round_.step)
        true = {peer: one.message for peer, one in done.items()}

        # Who was lost meanwhile did not take part, as far as the others can tell
        silent |= (given.keys() - done.keys()) | self.peers.absent.intersection(round_.peers)
        silent = tuple(sorted(silent))
        given = {peer: work for peer, work in given.items() if peer in done}
        checked = {v: p for v, p in checked.items() if v not in silent and p in given}
        for peer in silent:  # its state is lost, or nobody knows it
            self.peers.restart(peer)

        # Exchange: bytes, when they arrive, and what they decode to
        with self.timed("encode"):
            messages = self.faults.messages(true, round_.step)
            sent = {p: exchange.send(m, p, round_, self.form) for p, m in messages.items()}
            sent, others, to = self.faults.tamper(sent, messages, round_)
        with self.timed("decode"):
            received = self._received(sent, round_)
        evidence = Evidence(
            messages={p: replace(_message(s), state=done[p].state) for p, s in sent.items()},
            others={p: replace(_message(s), to=to[p]) for p, s in others.items()},
            arrivals=self._arrivals(sent, done, round_, silent),
            silent=silent,
            broken=tuple(peer for peer in sent if peer not in received),
            attestations=(),
            checks=(),
            rulings=(),
            settle_seconds=0.0,
        )

        # What witnesses, verifiers and tie-breakers make of it
        with self.timed("witness"):
            honest = consensus.witnessed(
                round_, evidence, self.settings.coordinator.max_round_train_time
            )
            evidence = replace(evidence, attestations=self.faults.attest(honest, round_, evidence))
        if checked:
            with self.timed("verify"):
                evidence = _Verification(self, round_, before, given).verify(evidence, checked)
        left = self.peers.part(set(round_.peers).difference(silent))
        progress = driver.leave(progress, left)
        paused = round_.step < self.settings.coordinator.total_steps and self.must_pause()
        if paused:
            progress = driver.pause(progress)
        with self.timed("decide"):
            progress, decision = driver.finish_round(progress, round_, evidence)

        # the sender too applies what decoding the bytes gives, nothing better
        applied = {peer: received[peer] for peer in decision.applied}
        with self.timed("apply"):
            self.peers.receive(applied, round_.sequences, round_.step)
        entry = Entry(
            asked=asked,
            left=left,
            paused=paused,
            round=round_,
            joined_params=joined_params,
            evidence=evidence,
            decision=decision,
            loss=loss,
            held_out_loss=None,
        )
        payloads, other_payloads = (
            {peer: s.payload for peer, s in those.items()} for those in (sent, others)
        )
        return progress, Taken(entry, payloads, other_payloads)

    def _begin(self, progress: RunProgress) -> tuple[RunProgress, tuple[int, ...], Round | None]:
        """The next round, and who asked to take part before it."""
        if progress.pausing:
            progress = driver.resume(progress)
        step = progress.state.step
        if progress.begun:
            back = (*self.faults.asks(step), *self._sent_off(progress), *self.peers.returned())
            asked = driver.may_ask(progress, back)
        else:
            away = self.faults.away(step) | self.peers.absent
            asked = tuple(peer for peer in range(self.settings.peers) if peer not in away)
        progress = driver.ask(progress, asked)
        try:
            progress, round_ = driver.next_round(progress)
        except CoordinatorError:  # it waits: members that are away hear of it
            early = self.faults.return_early(step) or self.peers.await_return()
            back = driver.may_ask(progress, early)
            asked = (*asked, *back)
            try:
                progress, round_ = driver.next_round(driver.ask(progress, back))
            except CoordinatorError as error:
                least = self.settings.coordinator.init_min_clients
                raise LockstepError(
                    f"[config] init_min_clients = {least}: fewer peers are left at round {step}, "
                    f"and the run cannot go on: {error}"
                ) from error
        return progress, asked, round_

    def _sent_off(self, progress: RunProgress) -> tuple[int, ...]:
        """Present peers that left the epoch because no witness spoke; they ask again."""
        away = self.faults.away(progress.state.step) | self.peers.absent | {*progress.left}
        exited = progress.state.exited
        gone = (record.peer for record in exited if record.state == ClientState.Withdrawn)
        return tuple(peer for peer in gone if peer not in away)

    def _join(self, round_: Round) -> str | None:
        """Joining peers take over the others' params, and begin with a new state of their own."""
        for peer in round_.joined:
            self.peers.join(peer)
        if not round_.joined:
            return None
        return self.peers.params_hash()

    def _read(self, peer: int, span: Span, round_: Round) -> Work:
        return self.settings.work(self.peers.programs, self.data_of(peer), span, round_.trainers)

    def _step(
        self, given: Mapping[int, Work], round_: Round
    ) -> tuple[dict[int, Done], float | None]:
        """What everybody with work did, and their mean loss.

        A peer whose loss or message is not finite is lost, where that is not so of all.
        """
        if not given:
            return {}, None
        read = partial(self._read, round_=round_)
        work = self.faults.work(given, round_, read)
        imprecise = self.faults.imprecise(given, round_.step)
        hashed = bool(round_.verifiers)
        done = self.peers.step(RoundSteps(work, round_.step, imprecise, hashed))
        if not done:
            return {}, None
        bad = {peer: why for peer, d in done.items() if (why := _not_finite(d))}
        if len(bad) == len(done):
            loss = sum(d.loss for d in done.values())
            raise NotFiniteError(
                f"no peer's message is finite at round {round_.step}: gradients are infinite or "
                "NaN though the loss is not"
                if np.isfinite(loss)
                else f"loss is {loss} at round {round_.step}"
            )
        for peer, why in bad.items():
            self.peers.distrust(peer, f"{why} at round {round_.step}, others' are finite")
        done = {peer: d for peer, d in done.items() if peer not in bad}
        return done, float(np.mean([d.loss for d in done.values()]))

    def _arrivals(
        self,
        sent: Mapping[int, Sent],
        done: Mapping[int, Done],
        round_: Round,
        silent: tuple[int, ...],
    ) -> dict[int, float]:
        """Seconds, of the run's clock, until messages are at every peer that is present."""
        if self.settings.on_wall_clock:
            return self.faults.delay({peer: done[peer].seconds for peer in sent}, round_.step)
        present = [peer for peer in round_.peers if peer not in silent]
        length = self.settings.row_tokens
        tokens = {peer: round_.sequences[peer] * length for peer in sent}
        sizes = {peer: len(s.payload) for peer, s in sent.items()}
        overlapped = self.peers.programs.optimizer.overlapped
        arrivals = links.arrivals(self.settings.links, present, tokens, sizes, overlapped)
        return self.faults.delay(arrivals, round_.step)

    def _received(self, sent: Mapping[int, Sent], round_: Round) -> dict[int, Tree]:
        """What the bytes decode to, where every receiver accepts them."""
        received = {}
        for peer, s in sent.items():
            try:
                received[peer] = exchange.receive(s, peer, round_, self.form)
            except wire.WireError:
                continue
        return received


@dataclass(frozen=True)
class _Verification:
    """The checks of a round: verifiers recompute steps, tie-breakers the disputed ones.

    before, given: State before the step, and work, of each checked peer.
    """

    swarm: Swarm
    round_: Round
    before: Mapping[int, Tree]
    given: Mapping[int, Work]

    def verify(self, evidence: Evidence, checked: Mapping[int, int]) -> Evidence:
        """Return the evidence with checks and rulings; `checked` has the peer of each verifier."""
        faults, step = self.swarm.faults, self.round_.step
        pairs = sorted(checked.items())
        checks = []
        for (verifier, peer), result in zip(pairs, self._recompute(pairs), strict=True):
            check = Check(verifier, peer, result, self._seconds(verifier, peer), self._size)
            claimed = evidence.messages[peer].claim
            checks.append(replace(check, found=faults.found(check, claimed, step)))
        evidence = replace(evidence, checks=tuple(checks))

        rulings, took = [], [0.0]
        present = evidence.present(self.round_.peers)
        for check, claimed in consensus.disputes(evidence, checks):
            parties = check.verifier, check.peer
            judges = committee.tie_breakers(self.round_.seed, present, parties)
            honest = self._recompute((judge, check.peer) for judge in judges)
            found = {
                judge: faults.ruled(judge, check, claimed, claim, step)
                for judge, claim in zip(judges, honest, strict=True)
            }
            rulings.append(Ruling(*parties, found))
            took += [self._seconds(judge, check.peer) for judge in judges]
        return replace(evidence, rulings=tuple(rulings), settle_seconds=max(took))

    @property
    def _size(self) -> int:
        """Bytes of a peer's state."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(next(iter(self.before.values()))))

    def _seconds(self, other: int, peer: int) -> float:
        settings = self.swarm.settings
        if settings.on_wall_clock:  # checks are made while the round waits
            return 0.0
        tokens = self.given[peer].count * settings.row_tokens
        return links.check_seconds(settings.links, other, peer, tokens=tokens, size=self._size)

    def _recompute(self, pairs: Iterable[tuple[int, int]]) -> list[Claim]:
        """Recompute the step of `peer` as `other`, for each pair (other, peer)."""
        pairs = list(pairs)
        cases = [(other, self.before[peer], self.given[peer]) for other, peer in pairs]
        results = self.swarm.peers.recompute(cases, self.round_.step)
        return [
            Claim(exchange.commit(message, peer, self.round_).hex(), state)
            for (_, peer), (message, state) in zip(pairs, results, strict=True)
        ]


def _not_finite(done: Done) -> str:
    """What of a peer's step is infinite or NaN, or nothing."""
    if not np.isfinite(done.loss):
        return f"its loss is {done.loss}"
    with np.errstate(over="ignore", invalid="ignore"):  # a sum takes half the time
        for leaf in map(np.asarray, jax.tree.leaves(done.message)):
            if leaf.dtype.kind not in "biu" and not (
                np.isfinite(leaf.sum()) or np.isfinite(leaf).all()
            ):
                return "its message is not finite"
    return ""


def _message(sent: Sent) -> Message:
    return Message(sent.commitment.hex(), len(sent.payload))
