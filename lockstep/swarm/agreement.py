"""How peers agree on a round's messages: by attestations, checks of steps, and rulings."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.local_steps import Work
from lockstep.protocol import consensus, links
from lockstep.protocol.attestation import Check, Claim, Ruling
from lockstep.protocol.round import Evidence, Round
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import RunningPeers
from lockstep.swarm.round_settings import RoundSettings
from lockstep.wire import exchange


class Checked(NamedTuple):
    """The steps that verifiers recompute: each trainer's state before the step, and its work."""

    before: Mapping[int, Tree]
    work: Mapping[int, Work]

    def own_bytes(self, peer: int) -> int:
        """Return the bytes of what a peer owned."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.before[peer]))


@dataclass(frozen=True)
class Agreement:
    """How a run's peers agree on a round: honest ones by the rules, faulty ones as scheduled."""

    settings: RoundSettings
    peers: RunningPeers
    faults: FaultSchedule
    timed: Callable[[str], AbstractContextManager[None]]

    def reach(self, evidence: Evidence, round_: Round, work: Mapping[int, Work]) -> Evidence:
        """Return the evidence with what witnesses attest, verifiers find and others rule.

        `work` is each peer's. Only now that all have committed to their messages is it drawn whose
        step is checked, and only now that peer is asked for the state before its step.
        """
        with self.timed("witness"):
            limit = self.settings.closes(round_, evidence)
            honest = consensus.witnessed(round_, evidence, limit)
            evidence = replace(evidence, attestations=self.faults.attest(honest, round_, evidence))
        pairs = consensus.checked(round_, evidence)
        if not pairs:
            return evidence
        with self.timed("verify"):
            drawn = sorted(set(pairs.values()))
            shown = {peer: self.peers.before(peer) for peer in drawn}
            withheld = tuple(peer for peer in drawn if shown[peer] is None)
            checked = Checked({p: own for p, own in shown.items() if own is not None}, work)
            there = [pair for pair in pairs.items() if pair[1] not in withheld]
            checks = self._checks(evidence, round_, there, checked)
            evidence = replace(evidence, withheld=withheld, checks=checks)
            return self._settle(evidence, round_, checked)

    def _checks(
        self, evidence: Evidence, round_: Round, pairs: list[tuple[int, int]], checked: Checked
    ) -> tuple[Check, ...]:
        checks = []
        for pair, result in zip(pairs, self._recompute(pairs, round_, checked), strict=True):
            size = checked.own_bytes(pair[1])
            check = Check(*pair, result, self._seconds(*pair, checked), size)
            claimed = evidence.messages[check.peer].claim
            checks.append(replace(check, found=self.faults.found(check, claimed, round_.step)))
        return tuple(checks)

    def _settle(self, evidence: Evidence, round_: Round, checked: Checked) -> Evidence:
        """Settle the disputes between verifiers and trainers, by all other peers."""
        rulings, took = [], [0.0]
        present = evidence.present(round_.peers)
        for check, claimed in consensus.disputes(evidence, evidence.checks):
            parties = check.verifier, check.peer
            judges = [peer for peer in present if peer not in parties]
            pairs = [(judge, check.peer) for judge in judges]
            honest = self._recompute(pairs, round_, checked)
            found = {
                judge: self.faults.ruled(judge, check, claimed, claim, round_.step)
                for judge, claim in zip(judges, honest, strict=True)
            }
            rulings.append(Ruling(*parties, found))
            took += [self._seconds(*pair, checked) for pair in pairs]
        return replace(evidence, rulings=tuple(rulings), settle_seconds=max(took))

    def _seconds(self, other: int, peer: int, checked: Checked) -> float:
        if self.settings.on_wall_clock:  # checks are made while the round waits
            return 0.0
        tokens = checked.work[peer].count * self.settings.row_tokens
        size = checked.own_bytes(peer)
        return links.check_seconds(self.settings.links, other, peer, tokens=tokens, size=size)

    def _recompute(
        self, pairs: Iterable[tuple[int, int]], round_: Round, checked: Checked
    ) -> list[Claim]:
        """Recompute the step of `peer` as `other`, for each pair (other, peer)."""
        pairs = list(pairs)
        cases = [(other, checked.before[peer], checked.work[peer]) for other, peer in pairs]
        results = self.peers.recompute(cases, round_.step)
        form = self.peers.programs.form
        return [
            Claim(exchange.commit(message, peer, round_, form).hex(), state)
            for (_, peer), (message, state) in zip(pairs, results, strict=True)
        ]
