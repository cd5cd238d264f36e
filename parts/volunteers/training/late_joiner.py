"""How one begins later: links up to the newest state, that state, and merges of the rounds since.

Links are followed on their signers' word here: a decision is computed from what they say of the
messages, which are not read. They count up to the last one after which enough peers have signed
messages that follow from it. The rounds after the state are merged, as everybody does.
"""

import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.protocol import driver
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.protocol.round import Evidence, Message, Round
from lockstep.swarm.peers import SimulatedPeers
from lockstep.swarm.training_loop import StartingPoint
from lockstep.transcript.entry import Entry, EpochParams
from lockstep.transcript.transcript import Writer
from parts.volunteers import layout
from parts.volunteers.chain.chain import Chain
from parts.volunteers.chain.links import FalseLinkError, Head, RoundLink, SlotContent
from parts.volunteers.training.states import States

log = logging.getLogger(__name__)


class Passed(NamedTuple):
    """A round that was closed before a late joiner came, by its link's word."""

    entry: Entry
    progress: RunProgress  #: The run after it.
    link: RoundLink
    head: Head
    began: int  #: When it began, by the store's clock.
    signers: set[int]  #: Of all links of the round.


class LateJoiner:
    """A late joiner: who begins later than a run."""

    def __init__(self, chain: Chain, states: States, settings: RoundSettings):
        self.chain, self.states, self.settings = chain, states, settings
        self.signers = set[int]()  # of links of the round that was read last
        self.builders: defaultdict[str, int] | None = None

    def begin(self, start: StartingPoint, peers: SimulatedPeers, writer: Writer) -> StartingPoint:
        """Return where a late joiner begins, after the newest state that is there; or `start`."""
        passed = [*self._passed(start.progress, peers.params_hash())]
        while passed and not self._is_trained_on(passed[-1]):
            passed.pop()
        # another link names all but the last
        for last in reversed([n for n, base in enumerate(passed[:-1]) if base.link.state]):
            base = passed[last]
            try:
                agreed = self.states.fetch(base.link, start.state.params, start.state.shared)
            except LockstepError as error:
                log.warning(f"train: no state after round {base.link.round}: {error}")
                continue
            for round_ in passed[: last + 1]:
                writer.round(round_.entry, {})
                self.chain.follow(round_.link, round_.head, round_.began)
            # links of its round that everybody refused, and only the next link names
            owed = {*passed[last + 1].link.false_links}.intersection(base.signers)
            self.chain.head = replace(base.head, owed=tuple(sorted(owed)))
            entries = [round_.entry for round_ in passed[: last + 1]]
            state = start.state._replace(params=agreed[0], shared=agreed[1])
            writer.snapshot(base.link.round, state)
            peers.agree(*agreed)
            log.info(f"train: begins after round {base.link.round}, with the state in the store")
            return start._replace(
                step=base.link.round, state=state, progress=base.progress, entries=entries
            )
        return start

    def _is_trained_on(self, passed: Passed) -> bool:
        """Return whether `min_clients` peers signed messages that follow a late joiner's link.

        Fewer keys than these cannot pass off a chain of their own: an honest peer's message names
        the params before it, and its share of the data, which follows from who takes part.
        """
        chain, head = self.chain, passed.head
        _, round_ = driver.next_round(driver.ask(passed.progress, passed.link.asked))
        if round_ is None:
            return False
        signed = 0
        for peer, span in round_.assignment.items():
            content = chain.content(layout.of_peer(round_.step, peer, "record"), head.seconds)
            record = content and content.body
            signed += bool(record and (record.span, record.base) == (span, passed.link.params))
        return signed >= chain.min_clients

    def _passed(self, progress: RunProgress, params: str) -> Iterator[Passed]:
        """Yield the rounds closed before a late joiner came, up to a link that no run allows."""
        head = self.chain.head
        self.chain.read_admissions()
        try:
            while True:
                askers = head.asked
                progress, _ = driver.next_round(driver.ask(progress, askers))
                step = progress.state.step
                if progress.waiting:
                    began = self._following("asked", step, head, progress.state.ejected)
                    if began is None:
                        return
                    head = Head(began.sha256, began.stored.seconds)
                    progress = driver.ask(progress, began.body.asked)
                    askers = (*askers, *began.body.asked)
                progress, round_ = driver.next_round(progress)
                if round_ is None:
                    return
                closed = self._following("closed", step, head, progress.state.ejected)
                if closed is None:
                    return
                link: RoundLink = closed.body
                entry, progress = self._finish_round(progress, round_, link, askers, params)
                began, head = head.seconds, Head(closed.sha256, closed.stored.seconds, link.asked)
                params = link.params
                yield Passed(entry, progress, link, head, began, self.signers)
        except ValueError as error:
            log.warning(f"train: a link in the store does not follow: {error}")

    def _following(
        self, what: str, step: int, head: Head, ejected: Collection[int]
    ) -> SlotContent | None:
        """Return the link that a late joiner follows after another, by a peer that is not ejected.

        If several do, it is the one on which most peers have built; None if that is unclear.
        """
        at = head.seconds if what == "closed" else None
        signed = self.chain.signed_links(step, what, at, ejected)
        self.signers = {*signed}
        candidates = [c for c in signed.values() if c.body.previous == head.sha256]
        if len(candidates) > 1:
            builders = self._builders(step)
            counts = {c.sha256: builders[c.sha256].bit_count() for c in candidates}
            most = max(counts.values())
            candidates = [c for c in candidates if counts[c.sha256] == most]
        return candidates[0] if len(candidates) == 1 else None

    def _builders(self, step: int) -> Mapping[str, int]:
        """Return, for a late joiner, who signed a link of a round or one that follows it, by hash.

        Peers are bits of a number. Links are read once, from the first round that is asked for.
        """
        if self.builders is None:
            read = list[tuple[str, str, int]]()  # a link, the one before it, its signer
            for number in itertools.count(step):
                before = len(read)
                for what in ("asked", "closed"):
                    signed = self.chain.signed_links(number, what, None).items()
                    read += [(link.sha256, link.body.previous, 1 << peer) for peer, link in signed]
                if len(read) == before:
                    break
            self.builders = defaultdict(int)
            for sha256, previous, signer in reversed(read):
                self.builders[sha256] |= signer
                self.builders[previous] |= self.builders[sha256]
        return self.builders

    def _finish_round(
        self,
        progress: RunProgress,
        round_: Round,
        link: RoundLink,
        askers: tuple[int, ...],
        params: str,
    ) -> tuple[Entry, RunProgress]:
        """Return a late joiner's record of a round, and the run after it."""
        named = {*link.applied, *link.false_links}
        evidence = Evidence(
            messages={p: Message(m.commitment, m.bytes) for p, m in link.messages.items()},
            others={},
            arrivals={peer: float(message.seconds) for peer, message in link.messages.items()},
            silent=tuple(sorted(round_.assignment.keys() - link.messages.keys())),
            broken=tuple(peer for peer in link.messages if peer not in named),
            attestations=(),
            checks=(),
            rulings=(),
            settle_seconds=0.0,
            false_links=link.false_links,
        )
        progress = driver.leave(progress, link.left)
        progress, decision = driver.finish_round(progress, round_, evidence)
        if decision.applied != link.applied:
            applied, expected = [*link.applied], [*decision.applied]
            raise FalseLinkError(f"round {link.round} applies {applied}, expected {expected}")
        driver.ask(progress, link.asked)  # raises where the run does not accept one of them
        stored, peer = None, driver.checkpointer(progress)
        if peer is not None:
            stored = EpochParams(peer=peer, params=link.params)
            progress = driver.checkpointed(progress, peer, link.params)
        entry = Entry(
            asked=askers,
            left=link.left,
            round=round_,
            joined_params=params if round_.joined else None,
            evidence=evidence,
            decision=decision,
            loss=None,
            held_out_loss=None,
            checkpointed=stored,
        )
        return entry, progress
