"""One round of all peers: from their batches, by what they agree on, to their next params."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.programs.replica import RoundMerge
from lockstep.protocol import consensus, driver, links
from lockstep.protocol.attestation import Check, Claim, Hash, Ruling
from lockstep.protocol.coordinator import ClientState
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.protocol.round import Evidence, Message, Round, Span
from lockstep.swarm.delivery import Delivered, Outbox, Packed, SimulatedDelivery
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RoundSteps, Rows, RunningPeers, StepResult, work_of
from lockstep.transcript.entry import Entry, EpochParams
from lockstep.transcript.params import TravellingMessages
from lockstep.wire import bound, exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Asked, Sent
from lockstep.wire.facts import MessageFacts


class Checked(NamedTuple):
    """The steps that verifiers recompute: each trainer's state before the step, and its work."""

    before: Mapping[int, Tree]
    work: Mapping[int, Work]

    def own_bytes(self, peer: int) -> int:
        """Return the bytes of what a checked peer owned."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.before[peer]))


@dataclass(frozen=True)
class Agreement:
    """How a swarm agrees on a round: honest peers by the rules, faulty ones as scheduled."""

    settings: RoundSettings
    peers: RunningPeers
    faults: FaultSchedule
    timed: Callable[[str], AbstractContextManager[None]]

    def reach(self, evidence: Evidence, round_: Round, work: Mapping[int, Work]) -> Evidence:
        """Reach agreement: return the evidence with what witnesses, verifiers and others say.

        `work` is each peer's. Only now, when all have committed to their messages, the steps to
        check are drawn, and only now their peers are asked for the state before them.
        """
        with self.timed("witness"):
            limit = self.settings.closing.closes(round_, evidence)
            honest = consensus.witnessed(round_, evidence, limit)
            evidence = replace(evidence, attestations=self.faults.attest(honest, round_, evidence))
        pairs = consensus.checked(round_, evidence)
        if not pairs:
            return evidence
        with self.timed("verify"):
            trainers = sorted(set(pairs.values()))
            states = {peer: self.peers.before(peer) for peer in trainers}
            withheld = tuple(peer for peer in trainers if states[peer] is None)
            checked = Checked({p: own for p, own in states.items() if own is not None}, work)
            cases = [pair for pair in pairs.items() if pair[1] not in withheld]
            checks = self._checks(evidence, round_, cases, checked)
            evidence = replace(evidence, withheld=withheld, checks=checks)
            return self._settle(evidence, round_, checked)

    def _checks(
        self, evidence: Evidence, round_: Round, pairs: list[tuple[int, int]], checked: Checked
    ) -> tuple[Check, ...]:
        checks = []
        for pair, result in zip(pairs, self._recompute(pairs, round_, checked), strict=True):
            size = checked.own_bytes(pair[1])
            check = Check(*pair, result, self._seconds(*pair, checked), size)
            claim = evidence.messages[check.peer].claim
            checks.append(replace(check, found=self.faults.verify(check, claim, round_.step)))
        return tuple(checks)

    def _settle(self, evidence: Evidence, round_: Round, checked: Checked) -> Evidence:
        """Settle the disputes between verifiers and trainers, by all other peers."""
        rulings, seconds = [], [0.0]
        present = evidence.present(round_.peers)
        for check, claimed in consensus.disputes(evidence, evidence.checks):
            parties = check.verifier, check.peer
            judges = [peer for peer in present if peer not in parties]
            pairs = [(judge, check.peer) for judge in judges]
            honest = self._recompute(pairs, round_, checked)
            claims = {
                judge: self.faults.rule(judge, check, claimed, claim, round_.step)
                for judge, claim in zip(judges, honest, strict=True)
            }
            rulings.append(Ruling(*parties, claims))
            seconds += [self._seconds(*pair, checked) for pair in pairs]
        return replace(evidence, rulings=tuple(rulings), settle_seconds=max(seconds))

    def _seconds(self, other: int, peer: int, checked: Checked) -> float:
        tokens = checked.work[peer].count * self.settings.row_tokens
        size = checked.own_bytes(peer)
        return links.check_seconds(self.settings.links, other, peer, tokens=tokens, size=size)

    def _recompute(
        self, pairs: list[tuple[int, int]], round_: Round, checked: Checked
    ) -> list[Claim]:
        """Recompute the step of `peer` as `other`, for each pair (other, peer)."""
        cases = [(other, checked.before[peer], checked.work[peer]) for other, peer in pairs]
        results = self.peers.recompute(cases, round_.step)
        return [
            Claim(exchange.commit(message, peer, round_).hex(), state)
            for (_, peer), (message, state) in zip(pairs, results, strict=True)
        ]


class FinishedRound(NamedTuple):
    """A finished round of the swarm: its record, and the messages that a transcript keeps."""

    entry: Entry
    payloads: dict[int, bytes]  # the messages, unless they are too large to keep
    others: dict[int, bytes]  # an equivocator's other message, if messages are kept
    own: Mapping[int, Hash] = {}  # hashes of what peers elsewhere own, as they report


class RoundWork(NamedTuple):
    """The work of a swarm's round and its results."""

    assigned: dict[int, Work]
    results: dict[int, StepResult[Sent]]  # by each peer that was not lost
    loss: float | None  # mean of what they were assigned; None where nobody trained
    silent: tuple[int, ...]  # members that took no part


class RoundStart(NamedTuple):
    """A round of the swarm that begins."""

    round: Round
    applicants: tuple[int, ...]  # peers that asked to join before it
    joined_params: str | None  # hash of the params that joining peers receive


class Exchanged(NamedTuple):
    """What came of a swarm's exchange of messages, before anything is decided."""

    evidence: Evidence
    received: Mapping[int, Tree]  # the messages that receivers accept, by sender
    loss: float | None  # mean of the peers' losses; None where nobody trained
    left: tuple[int, ...] = ()  # peers that left, after what they sent
    payloads: Mapping[int, bytes] = {}  # what is kept, as in `FinishedRound`
    others: Mapping[int, bytes] = {}
    own: Mapping[int, Hash] = {}


class NotFiniteError(Exception):
    """No loss, or no message, of the swarm is finite: training diverged."""


class Swarm:
    """A run's peers, and everything that a round needs.

    data_of(peer) has the rows that the peer is assigned some of. timed(phase) is a block whose time
    counts for a phase of the round. Large messages lie in the folder `spool` until the round is
    over, by default the system's of temporary files. `recorded` is what a record reads of messages.
    """

    def __init__(  # noqa: PLR0913
        self,
        settings: RoundSettings,
        peers: RunningPeers,
        data_of: Callable[[int], Rows],
        faults: FaultSchedule,
        *,
        spool: Path | None = None,
        recorded: Asked = Asked.BYTES,
        must_pause: Callable[[], bool] = bool,
        timed: Callable[[str], AbstractContextManager[None]] = nullcontext,
    ):
        self.settings, self.peers, self.data_of, self.faults = settings, peers, data_of, faults
        self.must_pause, self.timed = must_pause, timed
        self.travelling = TravellingMessages()
        drawn = Asked.COMMITMENT if settings.coordinator.verification_percent else Asked.FACTS
        asked, large = max(recorded, faults.asked, drawn), peers.programs.large(peers.count)
        self.outbox = Outbox(peers.programs, asked, large, spool)
        self.delivery = SimulatedDelivery(settings, peers.programs, faults, timed)
        self.agreement = Agreement(settings, peers, faults, timed)

    def take_round(self, progress: RunProgress) -> tuple[RunProgress, FinishedRound | None]:
        """Take the swarm's next round, or return None if the run has finished.

        A run that was paused is resumed.

        Raises:
          NotFiniteError: No peer's loss is finite, or no peer's message.
          LockstepError: Too few peers are left.
        """
        with self.timed("assign"):
            progress, applicants, round_ = self._begin(progress)
            if round_ is None:
                return progress, None
            round_start = RoundStart(round_, applicants, self.join(round_))
        work = self.work(round_, progress.unready)
        return self.settle(progress, round_start, self._exchange(work, round_, progress.now))

    def _exchange(self, work: RoundWork, round_: Round, now: float) -> Exchanged:
        """Bring messages to all peers, and have these agree on what arrived."""
        present = [peer for peer in round_.peers if peer not in work.silent]
        delivered = self.delivery.deliver(work.results, round_, present, now)
        evidence = evidence_of(work, delivered)
        evidence = self.agreement.reach(evidence, round_, work.assigned)
        left = self.peers.part(set(present))
        payloads = self.kept_payloads(delivered)
        return Exchanged(evidence, delivered.received, work.loss, left, *payloads)

    def settle(
        self, progress: RunProgress, round_start: RoundStart, exchanged: Exchanged
    ) -> tuple[RunProgress, FinishedRound]:
        """Decide a swarm's round, apply its messages; return the run after it, and the round."""
        round_, evidence = round_start.round, exchanged.evidence
        progress = driver.leave(progress, exchanged.left)
        paused = round_.step < self.settings.coordinator.total_steps and self.must_pause()
        if paused:
            progress = driver.pause(progress)
        with self.timed("decide"):
            progress, decision = driver.finish_round(progress, round_, evidence)
        with self.timed("apply"):
            messages = self.travelling.take(exchanged.received, round_, decision)
            self.apply(messages, round_)
        progress, checkpointed = self._end_epoch(progress)
        entry = Entry(
            asked=round_start.applicants,
            left=exchanged.left,
            paused=paused,
            round=round_,
            joined_params=round_start.joined_params,
            evidence=evidence,
            decision=decision,
            loss=exchanged.loss,
            held_out_loss=None,
            checkpointed=checkpointed,
        )
        payloads = dict(exchanged.payloads), dict(exchanged.others)
        return progress, FinishedRound(entry, *payloads, exchanged.own)

    def weights(self, round_: Round) -> Mapping[int, int]:
        """Return how much the messages of a round count in the swarm's means, by slot."""
        return round_.sequences

    def apply(self, messages: Mapping[int, Tree], round_: Round) -> None:
        """Have peers apply the messages that a round decided on, by slot."""
        self.peers.receive(self.merge(messages, round_))

    def merge(self, messages: Mapping[int, Tree], round_: Round) -> RoundMerge:
        """Return the merge of messages of a round, by slot."""
        return RoundMerge(messages, round_.sequences, round_.step, self.weights(round_))

    # ---- Before a round: who takes part ----

    def _begin(self, progress: RunProgress) -> tuple[RunProgress, tuple[int, ...], Round | None]:
        """Return the swarm's next round, after peers that asked to take part have joined."""
        if progress.pausing:
            progress = driver.resume(progress)
        step = progress.state.step
        if progress.started:
            returning = (*self.faults.asks(step), *self._sent_off(progress), *self.peers.returned())
            applicants = driver.may_ask(progress, returning)
        else:
            away = self.faults.away(step) | self.peers.absent
            applicants = tuple(peer for peer in range(self.settings.peers) if peer not in away)
        progress, round_ = driver.next_round(driver.ask(progress, applicants))
        if progress.waiting:  # call back members that are away
            early = self.faults.return_early(step) or self.peers.await_return()
            returning = driver.may_ask(progress, early)
            applicants = (*applicants, *returning)
            progress, round_ = driver.next_round(driver.ask(progress, returning))
        if progress.waiting:
            least = self.settings.coordinator.init_min_clients
            raise LockstepError(
                f"[config] init_min_clients = {least}: fewer peers are left at round {step}, and "
                "the run cannot go on"
            )
        return progress, applicants, round_

    def _sent_off(self, progress: RunProgress) -> tuple[int, ...]:
        """Return the swarm's peers that left since no witness spoke; they ask again."""
        away = self.faults.away(progress.state.step) | self.peers.absent | {*progress.left}
        exited = progress.state.exited
        gone = (record.peer for record in exited if record.state == ClientState.Withdrawn)
        return tuple(peer for peer in gone if peer not in away)

    def join(self, round_: Round) -> str | None:
        """Give peers that join the swarm a new own state and the params; return their hash."""
        for peer in self.peers.living.intersection(round_.joined):
            self.peers.join(peer)
        joined_params = self.peers.params_hash() if round_.joined else None
        self.peers.take_back(set(round_.peers).difference(round_.joined))
        return joined_params

    # ---- Work: what was assigned, and what is really done ----

    def work(self, round_: Round, unready: tuple[int, ...]) -> RoundWork:
        """Take the steps of the swarm's peers that live here."""
        living = self.peers.living
        silent = {*self.faults.silence(round_), *unready}
        silent |= self.peers.absent.intersection(round_.peers)
        spans = {p: s for p, s in round_.assignment.items() if p in living and p not in silent}
        with self.timed("read"):
            assigned = {peer: self._read(peer, span, round_) for peer, span in spans.items()}
        with self.timed("train"):
            done, loss = self._step(assigned, round_)
            self.peers.sit_out(living & round_.idle.difference(silent), round_.step)

        # A peer that was lost meanwhile did not take part, as far as the others can tell
        silent |= (assigned.keys() - done.keys()) | self.peers.absent.intersection(round_.peers)
        for peer in sorted(living & silent):  # its state is lost, or nobody knows it
            self.peers.restart(peer)
        return RoundWork(assigned, done, loss, tuple(sorted(silent)))

    def _read(self, peer: int, span: Span, round_: Round) -> Work:
        programs, data = self.peers.programs, self.data_of(peer)
        return work_of(self.settings, programs, data, span, round_.trainers)

    def _step(
        self, assigned: Mapping[int, Work], round_: Round
    ) -> tuple[dict[int, StepResult[Sent]], float | None]:
        """Return the results of all the swarm's peers with work, and their mean loss.

        A peer is lost if its loss is not finite or its message is invalid, unless all are.
        """
        if not assigned:
            return {}, None
        work = self.faults.work(assigned, round_, partial(self._read, round_=round_))
        broken = self.faults.broken(assigned, round_.step)
        pack = partial(self.outbox.put, round_=round_)
        steps = RoundSteps(work, round_.step, broken, bool(round_.verifiers), pack)
        packed = self.peers.step(steps)
        if not packed:
            return {}, None
        facts = self._facts(packed, round_)
        results = {p: d._replace(loss=float(facts.get(p, d).loss)) for p, d in packed.items()}
        done, bad = self._sent(results, facts, step := round_.step)
        if not done:
            loss = sum(d.loss for d in results.values())
            if not np.isfinite(loss):
                raise NotFiniteError(f"loss or gradients are {loss} at round {step}")
            if not any(isinstance(why, wire.NotFiniteValueError) for why in bad.values()):
                peer, why = next(iter(bad.items()))
                raise LockstepError(f"peer {peer}: {why}, expected a valid message of some peer")
            raise NotFiniteError(
                f"no peer's message is finite at round {step}: gradients are infinite or NaN "
                "though the loss is not"
            )
        for peer, why in bad.items():
            self.peers.distrust(peer, str(why))
        losses = {peer: d.loss for peer, d in done.items()}
        return done, mean_loss(losses, self.weights(round_))

    def _facts(
        self, results: Mapping[int, StepResult[Packed]], round_: Round
    ) -> dict[int, MessageFacts]:
        """Return the facts of the messages that stay where they were made."""
        here = {p: d.message.message for p, d in results.items() if d.message.message is not None}
        complete = here.keys() == round_.assignment.keys() and not round_.travelling
        ahead = self.merge(here, round_) if complete else None
        of_each = {peer: results[peer]._replace(message=here[peer]) for peer in here}
        return self.peers.facts(of_each, ahead)

    def _sent(
        self,
        results: Mapping[int, StepResult[Packed]],
        facts: Mapping[int, MessageFacts],
        step: int,
    ) -> tuple[dict[int, StepResult[Sent]], dict[int, wire.WireError]]:
        """Return the results of peers with a message, packed; and why the others have none."""
        done: dict[int, StepResult[Sent]] = {}
        bad: dict[int, wire.WireError] = {}
        for peer, d in results.items():
            try:
                sent = d.message.sent(facts.get(peer), self.peers.programs.form)
                if not np.isfinite(d.loss):
                    raise wire.NotFiniteValueError
                done[peer] = StepResult(sent, d.loss, d.state, d.seconds)
            except wire.NotFiniteValueError:
                is_loss = not np.isfinite(d.loss)
                what = (
                    f"its loss or gradient is {d.loss}" if is_loss else "its message is not finite"
                )
                bad[peer] = wire.NotFiniteValueError(f"{what} at round {step}, others' are finite")
            except wire.WireError as error:
                bad[peer] = wire.WireError(f"its message is invalid at round {step}: {error}")
        over = bound.beyond({peer: d.message.largest for peer, d in done.items()})
        bad |= {
            p: wire.WireError(f"its message is invalid at round {step}: {w}")
            for p, w in over.items()
        }
        return {peer: d for peer, d in done.items() if peer not in over}, bad

    # ---- After a round ----

    def kept_payloads(self, delivered: Delivered) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Return the swarm's messages that are kept, and equivocators' other messages."""
        if not self.peers.programs.form.kept:
            return {}, {}
        return _payloads(delivered.sent), _payloads(delivered.others)

    def _end_epoch(self, progress: RunProgress) -> tuple[RunProgress, EpochParams | None]:
        """Record the params that end an epoch, if a peer stores them."""
        peer = driver.checkpointer(progress)
        if peer is None:
            return progress, None
        ended = EpochParams(peer=peer, params=self.peers.params_hash())
        return driver.checkpointed(progress, peer, ended.params), ended


def mean_loss(losses: Mapping[int, float], weights: Mapping[int, int]) -> float | None:
    """Return the mean of the swarm's losses, by the peers' weights; None without any."""
    weight = [weights[peer] for peer in losses]
    if len(set(weight)) <= 1:
        return float(np.mean([*losses.values()])) if losses else None
    return float(np.average([*losses.values()], weights=weight))


def evidence_of(work: RoundWork, delivered: Delivered) -> Evidence:
    """Return the swarm's evidence of what was sent and when it arrived; no attestations yet."""
    sent, others, receivers = delivered.sent, delivered.others, delivered.receivers
    return Evidence(
        messages={p: _message(packet, state=work.results[p].state) for p, packet in sent.items()},
        others={p: _message(packet, to=receivers[p]) for p, packet in others.items()},
        arrivals=delivered.arrivals,
        silent=work.silent,
        broken=tuple(peer for peer in sent if peer not in delivered.received),
        attestations=(),
        checks=(),
        rulings=(),
        settle_seconds=0.0,
    )


def _message(sent: Sent, *, state: str | None = None, to: tuple[int, ...] = ()) -> Message:
    return Message(sent.commitment.hex(), sent.size, state=state, to=to)


def _payloads(sent: Mapping[int, Sent]) -> dict[int, bytes]:
    return {p: packet.payload for p, packet in sent.items() if packet.payload is not None}
