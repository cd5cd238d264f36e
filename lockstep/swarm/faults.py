"""Injected faults, as wrappers around the parts of a round.

Neither the optimizer nor honest peers nor the auditor know of them: faults are seeded, and their
traces are in the transcript alone. `lockstep/tables/faults.py` lists the kinds, and
`lockstep/swarm/lies.py` has the messages that liars send.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from lockstep.optim.optimizer import Tree
from lockstep.programs.local_training import Work
from lockstep.protocol import attestation
from lockstep.protocol.attestation import Attestation, Check, Claim
from lockstep.protocol.round import Evidence, Round, Span, commitments_of
from lockstep.swarm.lies import lie, tamper
from lockstep.tables.faults import KINDS, Fault
from lockstep.wire import exchange
from lockstep.wire import message as wire
from lockstep.wire.exchange import Asked, Sent

FALSE_CLAIM = Claim("f" * 64, "f" * 64)  # a false verifier's report


class FaultSchedule:
    """A run's schedule of faults, and how often each kind changed something."""

    def __init__(self, schedule: Sequence[Fault], seed: int, form: wire.Form):
        self.schedule, self.seed, self.form = schedule, seed, form
        self.fired: Counter[str] = Counter()
        self._returned: set[int] = set()  # faults whose peer came back early
        # True messages of stale peers, by fault and peer: their rounds, ascending, and bytes.
        self._older: dict[tuple[int, int], dict[int, bytes]] = {}

    @property
    def asked(self) -> Asked:
        """What faults read of honest messages: a lie has a commitment, and so have all then."""
        if any(self._of(*_kinds("bytes"))):
            return Asked.BYTES
        return Asked.COMMITMENT if any(self._of(*_kinds("message"))) else Asked.FACTS

    def to_json(self) -> dict:
        """Return what a resumed training needs of its faults, as JSON."""
        older = [
            (*key, step, base64.b64encode(sent).decode())
            for key, messages in self._older.items()
            for step, sent in messages.items()
        ]
        return {"fired": self.fired, "returned": sorted(self._returned), "older": older}

    def restore(self, data: dict) -> None:
        """Restore the faults' counts that `to_json` returned."""
        self.fired = Counter(data["fired"])
        self._returned = set(data["returned"])
        self._older = {}
        for number, peer, step, sent in data["older"]:
            self._older.setdefault((number, peer), {})[step] = base64.b64decode(sent)

    # ---- Around the clock ----

    def asks(self, step: int) -> tuple[int, ...]:
        """Return the peers that by faults ask to join before a round, again or at last."""
        returning = [peer for _, f, peer in self._of("crash", "join") if f.rounds[1] + 1 == step]
        return tuple(dict.fromkeys(returning))

    def away(self, step: int) -> frozenset[int]:
        """Return the peers that a fault keeps away in a round."""
        return frozenset(peer for _, _, peer in self._now(step, "crash", "join"))

    def return_early(self, step: int) -> tuple[int, ...]:
        """End the fault of the peers that are away, since the run waits for them; return these."""
        returning = list(self._now(step, "crash", "join"))
        self._returned |= {number for number, _, _ in returning}
        return tuple(dict.fromkeys(peer for _, _, peer in returning))

    def silence(self, round_: Round) -> tuple[int, ...]:
        """Return the members of a round that a fault keeps away."""
        silent = self.away(round_.step).intersection(round_.peers)
        for _, fault, peer in self._now(round_.step, "crash"):
            self.fired[fault.kind] += peer in silent
        for fault in self.schedule:
            if fault.kind == "join":  # it fires when the peer takes part
                self.fired[fault.kind] += len(set(fault.peers) & set(round_.joined))
        return tuple(peer for peer in round_.peers if peer in silent)

    def delay(self, arrivals: Mapping[int, float], step: int) -> dict[int, float]:
        """Return when messages arrive, faults' delays added, in seconds; lost ones are absent."""
        late = dict(arrivals)
        for _, fault, peer in self._now(step, "dropped", "late"):
            if peer in late:
                if fault.kind == "dropped":
                    del late[peer]
                else:
                    late[peer] += fault.strength
                self.fired[fault.kind] += 1
        return late

    # ---- Around data and programs ----

    def work(
        self, work: Mapping[int, Work], round_: Round, read: Callable[[int, Span], Work]
    ) -> dict[int, Work]:
        """Return the work that peers do, faulty ones too; they are assigned `work`.

        `read` returns the work of a peer on other sequences.
        """
        done = dict(work)
        for _, fault, peer in self._now(round_.step, "lazy", "wrong_data"):
            if peer not in done:
                continue
            rows_MB, count = done[peer]
            if fault.kind == "lazy":
                fewer = max(1, int(count * fault.strength))
                done[peer] = Work(rows_MB, fewer)
                self.fired[fault.kind] += fewer < count
            else:  # the sequences before its own, or after them at the start of the data
                first, last = round_.assignment[peer]
                shift = -count if first >= count else count
                done[peer] = read(peer, (first + shift, last + shift))
                self.fired[fault.kind] += 1
        return done

    def broken(self, peers: Collection[int], step: int) -> dict[int, int]:
        """Return whose programs are faulty, and which they are: `Programs.broken`."""
        broken = {}
        for _, fault, peer in self._now(step, *_kinds("program")):
            if peer in peers:
                broken[peer] = int(fault.strength or 0)
                self.fired[fault.kind] += 1
        return broken

    # ---- Around the exchange ----

    def messages(self, true: Mapping[int, Tree], step: int) -> dict[int, Tree]:
        """Return the message that each peer commits to and sends, a liar's too."""
        sent = dict(true)
        for number, fault, peer in self._of(*_kinds("message")):
            active = fault.rounds[0] <= step <= fault.rounds[1]
            if peer in true and fault.kind == "stale":
                older = self._older.setdefault((number, peer), {})
                old_enough = [earlier for earlier in older if earlier <= step - fault.strength]
                for earlier in old_enough[:-1]:
                    del older[earlier]
                if active and older:
                    oldest = next(iter(older.values()))
                    self._lie(sent, fault, peer, wire.decode(oldest, self.form))
                if step < fault.rounds[1]:
                    older[step] = wire.encode(true[peer], self.form)
            elif peer in true and active:
                order, areas = sorted(true), self.form.areas
                at = order.index(peer)  # the others, in a circle from the one after it
                others = [true[p] for p in (*order[at + 1 :], *order[:at])]
                if fault.kind == "copycat":
                    false = others[0] if others else true[peer]
                elif fault.kind == "collude":
                    leader = next(p for p in fault.peers if p in true)
                    false = lie("sign_flip", None, true[leader], (), areas, self._rng(0))
                else:
                    rng = self._rng(step, peer, fault.kind)
                    false = lie(fault.kind, fault.strength, true[peer], others, areas, rng)
                self._lie(sent, fault, peer, false)
        return sent

    def _lie(self, sent: dict[int, Tree], fault: Fault, peer: int, false: Tree) -> None:
        before, after = (b"".join(wire.fields(message)) for message in (sent[peer], false))
        sent[peer] = false
        self.fired[fault.kind] += before != after

    def tamper(
        self, sent: Mapping[int, Sent], messages: Mapping[int, Tree], round_: Round
    ) -> tuple[dict[int, Sent], dict[int, Sent], dict[int, tuple[int, ...]]]:
        """Return the bytes that a faulty peer sends; an equivocator's others; their receivers."""
        sent, others, receivers = dict(sent), {}, {}
        for _, fault, peer in self._now(round_.step, *_kinds("bytes")):
            if peer not in sent:
                continue
            rng = self._rng(round_.step, peer, fault.kind)
            if fault.kind == "equivocation":
                false = lie("forged", None, messages[peer], (), self.form.areas, rng)
                others[peer] = exchange.send(false, peer, round_, self.form)
                receivers[peer] = round_.peers[1::2]
            else:
                payload = tamper(fault.kind, sent[peer].payload, messages[peer], self.form, rng)
                sent[peer] = sent[peer]._replace(payload=payload)
            self.fired[fault.kind] += 1
        return sent, others, receivers

    # ---- Around attestations and checks ----

    def attest(
        self, honest: Sequence[Attestation], round_: Round, evidence: Evidence
    ) -> tuple[Attestation, ...]:
        """Return the witnesses' attestations, of faulty ones too."""
        attestations = []
        present = evidence.present(round_.peers)
        lies = [*self._now(round_.step, "false_witness", "denying_witness")]
        for original in honest:
            if all(peer != original.witness for _, _, peer in lies):
                attestations.append(original)
                continue
            others = {peer: evidence.others[peer].commitment for peer in original.others}
            sent = commitments_of(round_, evidence) | others
            holds = {peer: sent[peer] for peer in original.received}
            for _, fault, peer in lies:
                if peer != original.witness:
                    continue
                claims = dict(holds)
                if fault.kind == "false_witness":
                    missing = evidence.messages.keys() - holds.keys()
                    claims |= {p: evidence.messages[p].commitment for p in missing}
                else:
                    denied = next((p for p in holds if p != peer), None)
                    claims.pop(denied, None)
                self.fired[fault.kind] += claims != holds
                holds = claims
            others = [peer for peer in original.others if peer in holds]
            refused = [peer for peer in original.refused if peer not in holds]
            attestations.append(
                attestation.attest(original.witness, round_.seed, present, holds, others, refused)
            )
        return tuple(attestations)

    def verify(self, check: Check, claimed: Claim | None, step: int) -> Claim:
        """Return the result that a verifier reports, a faulty one too."""
        if any(peer == check.verifier for _, _, peer in self._now(step, "false_verifier")):
            self.fired["false_verifier"] += 1
            return FALSE_CLAIM
        if claimed is not None and self._together(check.verifier, check.peer, step):
            return claimed
        return check.found

    def rule(self, judge: int, check: Check, claimed: Claim, honest: Claim, step: int) -> Claim:
        """Return what another peer reports in a dispute: its group's members are right."""
        if self._together(judge, check.peer, step):
            return claimed
        if self._together(judge, check.verifier, step):
            return check.found
        return honest

    # ---- The schedule ----

    def _of(self, *kinds: str) -> Iterator[tuple[int, Fault, int]]:
        """Yield each scheduled fault of these kinds, with its index and each of its peers."""
        for number, fault in enumerate(self.schedule):
            if fault.kind in kinds and number not in self._returned:
                yield from ((number, fault, peer) for peer in fault.peers)

    def _now(self, step: int, *kinds: str) -> Iterator[tuple[int, Fault, int]]:
        for number, fault, peer in self._of(*kinds):
            if fault.rounds[0] <= step <= fault.rounds[1]:
                yield number, fault, peer

    def _together(self, peer: int, other: int, step: int) -> bool:
        return any(
            peer in fault.peers and other in fault.peers
            for _, fault, _ in self._now(step, "collude")
        )

    def _rng(self, step: int, peer: int = 0, kind: str = "") -> np.random.Generator:
        return np.random.default_rng((self.seed, step, peer, zlib.crc32(kind.encode())))


def _kinds(wraps: str) -> tuple[str, ...]:
    return tuple(name for name, kind in KINDS.items() if kind.wraps == wraps)
