"""One round of all peers, from their batches to the params they agree on next."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.optim.optimizer import Tree
from pipeline.programs.replica import Work
from pipeline.programs.train_step import Programs
from pipeline.protocol import committee, consensus, links
from pipeline.protocol import driver as rounds
from pipeline.protocol.coordinator import ClientState, CoordinatorError
from pipeline.protocol.dispute import Check, Claim, Ruling
from pipeline.protocol.driver import Progress
from pipeline.protocol.round import Decision, Evidence, Round, Span
from pipeline.swarm.faults import Faults
from pipeline.swarm.peers import SimulatedPeers, assigned
from pipeline.tokens.sequences import Sequences
from pipeline.transcript.entry import Entry, Message
from pipeline.wire import exchange
from pipeline.wire import message as wire
from pipeline.wire.commitment import tree_hash
from pipeline.wire.exchange import Sent


class Taken(NamedTuple):
    """What a round came to; `sent` and `others` by peer, `others` an equivocator's other message,
    and `to` whom that went."""

    asked: tuple[int, ...]
    round: Round
    joined_params: str | None
    loss: float | None
    tokens: int
    sent: dict[int, Sent]
    others: dict[int, Sent]
    to: dict[int, tuple[int, ...]]
    evidence: Evidence
    decision: Decision

    @property
    def bytes_sent(self) -> dict[int, int]:
        """Size of each peer's message on the wire."""
        return {peer: len(sent.payload) for peer, sent in self.sent.items()}

    def entry(self, held_out_loss: float | None) -> Entry:
        """The round as the transcript tells it; the writer adds where the payloads lie."""
        evidence = self.evidence
        return Entry(
            asked=self.asked,
            round=self.round,
            joined_params=self.joined_params,
            messages={
                peer: Message(
                    commitment=sent.commitment.hex(),
                    bytes=len(sent.payload),
                    state=evidence.states.get(peer),
                )
                for peer, sent in self.sent.items()
            },
            others={
                peer: Message(
                    commitment=sent.commitment.hex(), bytes=len(sent.payload), to=self.to[peer]
                )
                for peer, sent in self.others.items()
            },
            arrivals=dict(evidence.arrivals),
            silent=evidence.silent,
            broken=evidence.broken,
            attestations=evidence.attestations,
            checks=evidence.checks,
            rulings=evidence.rulings,
            settle_seconds=evidence.settle_seconds,
            decision=self.decision,
            loss=self.loss,
            held_out_loss=held_out_loss,
        )


class NotFinite(Exception):
    """The peers' mean loss is no number; nothing of the round was sent."""


@dataclass(frozen=True)
class Swarm:
    """The peers of a run and all that a round of them needs.

    run, data, form, faults: the run's; peers: who trains; imprecise: the run's programs in another
    precision, for the peer that is to compute by them.
    """

    run: runfile.Run
    peers: SimulatedPeers
    data: Sequences
    form: wire.Form
    faults: Faults
    imprecise: Callable[[], Programs]

    def take_round(self, progress: Progress) -> tuple[Progress, Taken | None]:
        """Takes the next round, or returns None where the run has finished.

        Raises:
          NotFinite: the loss is no number.
          LockstepError: too few peers are left.
        """
        progress, asked, round = self._begin(progress)
        if round is None:
            return progress, None
        joined_params = self._join(round)
        silent = tuple(sorted({*self.faults.silence(round), *progress.unready}))
        present = [peer for peer in round.peers if peer not in silent]

        # Work: what was assigned, and what is really done
        given = {
            peer: self._read(span, round)
            for peer, span in round.assignment.items()
            if peer not in silent
        }
        checked = {
            verifier: peer
            for verifier, peer in round.verifiers.items()
            if verifier not in silent and peer in given
        }
        before = {peer: self.peers.own(peer) for peer in sorted(set(checked.values()))}
        done = self._step(given, round)
        loss = float(np.mean([d.loss for d in done.values()])) if done else None
        if done and not np.isfinite(loss):
            raise NotFinite(f"loss is {loss} at round {round.step}")

        # Exchange
        messages = self.faults.messages({p: d.message for p, d in done.items()}, round.step)
        sent = {p: exchange.send(m, p, round, self.form) for p, m in messages.items()}
        sent, others, to = self.faults.tamper(sent, messages, round)
        tokens = {peer: work.count * self._length for peer, work in given.items()}
        sizes = {peer: len(s.payload) for peer, s in sent.items()}
        arrivals = links.arrivals(self.run.links, present, tokens, sizes)
        received = {p: m for p, s in sent.items() if (m := self._received(s, p, round)) is not None}
        evidence = Evidence(
            arrivals=self.faults.delay(arrivals, round.step),
            commitments={peer: s.commitment for peer, s in sent.items()},
            others={peer: s.commitment for peer, s in others.items()},
            broken=tuple(peer for peer in sent if peer not in received),
            states=self._states(round, sent),
            silent=silent,
        )

        # What the others make of it
        words = consensus.witnessed(round, evidence, self._limit, to)
        evidence = replace(evidence, attestations=self.faults.attest(words, round, evidence))
        evidence = self._verify(round, evidence, checked, before, given)
        progress, decision = rounds.finish_round(progress, round, evidence)

        # the sender too applies what decoding the bytes gives, nothing better
        applied = {peer: received[peer] for peer in decision.applied}
        self.peers.receive(applied, self.form.like, round.step)
        return progress, Taken(
            asked,
            round,
            joined_params,
            loss,
            sum(tokens.values()),
            sent,
            others,
            to,
            evidence,
            decision,
        )

    @property
    def _length(self) -> int:
        return self.run.llm.max_seq_len

    @property
    def _limit(self) -> float:
        return self.run.config.max_round_train_time

    def _begin(self, progress: Progress) -> tuple[Progress, tuple[int, ...], Round | None]:
        """The next round, and who asked to take part before it."""
        step = progress.state.step
        if progress.begun:
            asked = self._allowed(progress, (*self.faults.asks(step), *self._sent_off(progress)))
        else:
            away = self.faults.away(step)
            asked = tuple(peer for peer in range(self.run.peers.count) if peer not in away)
        progress = rounds.ask(progress, asked)
        try:
            progress, round = rounds.next_round(progress)
        except CoordinatorError:  # it waits: members that are away hear of it
            back = self._allowed(progress, self.faults.return_early(step))
            asked = (*asked, *back)
            try:
                progress, round = rounds.next_round(rounds.ask(progress, back))
            except CoordinatorError as error:
                raise LockstepError(
                    f"[config] init_min_clients = {self.run.config.init_min_clients}: fewer peers "
                    f"are left at round {step}, and the run cannot go on: {error}"
                ) from error
        return progress, asked, round

    def _allowed(self, progress: Progress, peers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(p for p in dict.fromkeys(peers) if rounds.may_ask(progress, p))

    def _sent_off(self, progress: Progress) -> tuple[int, ...]:
        """Those that are there, and out of the epoch because no witness spoke; they ask again."""
        away, exited = self.faults.away(progress.state.step), progress.state.exited
        gone = (record.peer for record in exited if record.state == ClientState.Withdrawn)
        return tuple(peer for peer in gone if peer not in away)

    def _join(self, round: Round) -> str | None:
        """Peers that join have the others' params, and a state of their own that is new."""
        for peer in round.joined:
            self.peers.restart(peer)
        if not round.joined:
            return None
        return tree_hash(jax.device_get(next(iter(self.peers.params_on.values()))))

    def _read(self, span: Span, round: Round) -> Work:
        return assigned(self.data, span, self.run, round.trainers)

    def _step(self, given: dict[int, Work], round: Round) -> Mapping[int, object]:
        if not given:
            return {}
        work = self.faults.work(given, round, lambda span: self._read(span, round))
        imprecise = self.faults.imprecise(given, round.step)
        programs = {peer: self.imprecise() for peer in imprecise}
        return self.peers.step(work, round.step, programs)

    def _states(self, round: Round, sent: Mapping[int, Sent]) -> dict[int, str]:
        """What senders commit to besides, so that a verifier can begin with it a round later."""
        return {p: tree_hash(self.peers.own(p)) for p in sent} if round.verifiers else {}

    def _received(self, sent: Sent, peer: int, round: Round) -> Tree | None:
        try:
            return exchange.receive(sent, peer, round, self.form)
        except wire.WireError:
            return None

    def _verify(
        self,
        round: Round,
        evidence: Evidence,
        checked: Mapping[int, int],
        before: Mapping[int, Tree],
        given: Mapping[int, Work],
    ) -> Evidence:
        """Verifiers take steps again, and tie-breakers those that are disputed."""
        if not checked:
            return evidence
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(next(iter(before.values()))))

        def again(who: list[tuple[int, int]]) -> list[Claim]:
            """What the steps of peers give others, each pair (other, peer)."""
            cases = [(other, before[peer], given[peer]) for other, peer in who]
            return [
                Claim(exchange.commit(message, peer, round).hex(), tree_hash(own))
                for (_, peer), (message, own) in zip(
                    who, self.peers.recompute(cases, round.step), strict=True
                )
            ]

        def seconds(other: int, peer: int) -> float:
            tokens = given[peer].count * self._length
            return links.check_seconds(self.run.links, other, peer, tokens=tokens, size=size)

        def claimed(peer: int) -> Claim:
            return Claim(evidence.commitments[peer].hex(), evidence.states[peer])

        pairs = sorted(checked.items())
        checks = []
        for (verifier, peer), found in zip(pairs, again(pairs), strict=True):
            check = Check(verifier, peer, found, seconds(verifier, peer), size)
            said = self.faults.found(check, claimed(peer), round.step)
            checks.append(replace(check, found=said))
        evidence = replace(evidence, checks=tuple(checks))

        rulings, took = [], [0.0]
        for check, said in consensus.disputes(evidence, checks):
            there = [peer for peer in round.peers if peer not in evidence.silent]
            judges = committee.tie_breakers(round.seed, there, (check.verifier, check.peer))
            found = again([(judge, check.peer) for judge in judges])
            rulings.append(
                Ruling(
                    check.verifier,
                    check.peer,
                    {
                        judge: self.faults.ruled(judge, check, said, honest, round.step)
                        for judge, honest in zip(judges, found, strict=True)
                    },
                )
            )
            took += [seconds(judge, check.peer) for judge in judges]
        return replace(evidence, rulings=tuple(rulings), settle_seconds=max(took))
