"""What goes wrong in a run, on purpose, when and for whom: wrappers around each part of a round.

Neither the optimizer nor an honest peer knows of it, nor does the auditor: faults are seeded and
leave their traces in the transcript alone. `pipeline/runfile/fault_kinds.py` lists the kinds, and
`pipeline/swarm/lies.py` has what they make of a message.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeline import runfile
from pipeline.optim.optimizer import Tree
from pipeline.programs.replica import Work
from pipeline.protocol import attestation
from pipeline.protocol.attestation import Attestation
from pipeline.protocol.dispute import Check, Claim
from pipeline.protocol.round import Evidence, Round, Span
from pipeline.runfile.fault_kinds import KINDS
from pipeline.swarm.lies import lie, tamper
from pipeline.wire import exchange
from pipeline.wire import message as wire
from pipeline.wire.exchange import Sent

FALSE = Claim("f" * 64, "f" * 64)  # what a false verifier says that it found


class Faults:
    """A run's schedule of faults, and how often each kind has changed something.

    Args:
      schedule: `[faults] schedule`.
      seed: `[peers] seed`.
      form: of the run's messages.
    """

    def __init__(self, schedule: Sequence[runfile.Fault], seed: int, form: wire.Form):
        self.schedule, self.seed, self.form = schedule, seed, form
        self.fired: Counter[str] = Counter()
        self._returned: set[int] = set()  # faults whose peer came back before its time
        self._older: dict[int, bytes] = {}  # by fault, the message that a stale peer sends again

    def to_json(self) -> dict:
        """What a training that goes on must know, as `json.dumps` takes it."""
        older = {str(n): base64.b64encode(data).decode() for n, data in self._older.items()}
        return {"fired": self.fired, "returned": sorted(self._returned), "older": older}

    def restore(self, data: dict) -> None:
        """Takes back what `to_json` gave."""
        self.fired = Counter(data["fired"])
        self._returned = set(data["returned"])
        self._older = {int(n): base64.b64decode(text) for n, text in data["older"].items()}

    # ---- Around the clock ----

    def asks(self, step: int) -> tuple[int, ...]:
        """The peers that ask to take part again, or at last, before a round."""
        back = [peer for _, f, peer in self._of("crash", "join") if f.rounds[1] + 1 == step]
        return tuple(dict.fromkeys(back))

    def away(self, step: int) -> frozenset[int]:
        """The peers that are not there in a round."""
        return frozenset(peer for _, _, peer in self._now(step, "crash", "join"))

    def return_early(self, step: int) -> tuple[int, ...]:
        """The peers that are away come back now, since the run waits for them."""
        back = list(self._now(step, "crash", "join"))
        self._returned |= {number for number, _, _ in back}
        return tuple(dict.fromkeys(peer for _, _, peer in back))

    def silence(self, round_: Round) -> tuple[int, ...]:
        """The members of a round that are away."""
        silent = tuple(peer for peer in round_.peers if peer in self.away(round_.step))
        for _, fault, peer in self._now(round_.step, "crash"):
            self.fired[fault.kind] += peer in silent
        for fault in self.schedule:
            if fault.kind == "join":  # it has happened once the peer takes part
                self.fired[fault.kind] += len(set(fault.peers) & set(round_.joined))
        return silent

    def delay(self, arrivals: Mapping[int, float], step: int) -> dict[int, float]:
        """When messages arrive, in seconds; those that never do are absent."""
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
        self, work: Mapping[int, Work], round_: Round, read: Callable[[Span], Work]
    ) -> dict[int, Work]:
        """What peers really train on.

        Args:
          work: what they were assigned.
          round: the round.
          read: the work of other sequences.
        """
        done = dict(work)
        for _, fault, peer in self._now(round_.step, "lazy", "wrong_data"):
            if peer not in done:
                continue
            rows_MBW, count = done[peer]
            if fault.kind == "lazy":
                less = max(1, int(count * fault.strength))
                done[peer] = Work(rows_MBW, less)
                self.fired[fault.kind] += less < count
            else:  # the sequences before its own, or after them at the start of the data
                first, last = round_.assignment[peer]
                shift = -count if first >= count else count
                done[peer] = read((first + shift, last + shift))
                self.fired[fault.kind] += 1
        return done

    def imprecise(self, work: Mapping[int, Work], step: int) -> frozenset[int]:
        """Those with work who compute in another precision than the run's."""
        peers = {peer for _, _, peer in self._now(step, "wrong_precision") if peer in work}
        if peers:
            self.fired["wrong_precision"] += len(peers)
        return frozenset(peers)

    # ---- Around the exchange ----

    def messages(self, true: Mapping[int, Tree], step: int) -> dict[int, Tree]:
        """The message that each peer commits to and sends."""
        sent = dict(true)
        for number, fault, peer in self._of(*_kinds("message")):
            active = fault.rounds[0] <= step <= fault.rounds[1]
            if peer in true and fault.kind == "stale":
                if active and number in self._older:
                    self._lie(sent, fault, peer, wire.decode(self._older[number], self.form))
                elif number not in self._older or step < fault.rounds[0]:
                    self._older[number] = wire.encode(true[peer], self.form)
            elif peer in true and active:
                others = [true[p] for p in _after(sorted(true), peer)]
                if fault.kind == "copycat":
                    said = others[0] if others else true[peer]
                elif fault.kind == "collude":
                    leader = next(p for p in fault.peers if p in true)
                    said = lie("sign_flip", None, true[leader], (), self.form.areas, self._rng(0))
                else:
                    rng = self._rng(step, peer, fault.kind)
                    said = lie(fault.kind, fault.strength, true[peer], others, self.form.areas, rng)
                self._lie(sent, fault, peer, said)
        return sent

    def _lie(self, sent: dict[int, Tree], fault: runfile.Fault, peer: int, said: Tree) -> None:
        before, after = (b"".join(wire.fields(message)) for message in (sent[peer], said))
        sent[peer] = said
        self.fired[fault.kind] += before != after

    def tamper(
        self, sent: Mapping[int, Sent], messages: Mapping[int, Tree], round_: Round
    ) -> tuple[dict[int, Sent], dict[int, Sent], dict[int, tuple[int, ...]]]:
        """The bytes that go out: to everyone; an equivocator's others; and to whom those go."""
        sent, others, to = dict(sent), {}, {}
        for _, fault, peer in self._now(round_.step, *_kinds("bytes")):
            if peer not in sent:
                continue
            rng = self._rng(round_.step, peer, fault.kind)
            if fault.kind == "equivocation":
                said = lie("forged", None, messages[peer], (), self.form.areas, rng)
                others[peer] = exchange.send(said, peer, round_, self.form)
                to[peer] = round_.peers[1::2]
            else:
                payload = tamper(fault.kind, sent[peer].payload, messages[peer], self.form, rng)
                sent[peer] = Sent(payload, sent[peer].commitment)
            self.fired[fault.kind] += 1
        return sent, others, to

    # ---- Around what witnesses and verifiers say ----

    def attest(
        self, words: Sequence[Attestation], round_: Round, evidence: Evidence
    ) -> tuple[Attestation, ...]:
        """What the witnesses say, honest or not."""
        said = []
        for word in words:
            holds = {
                peer: (evidence.others if peer in word.others else evidence.messages)[
                    peer
                ].commitment
                for peer in word.received
            }
            for _, fault, peer in self._now(round_.step, "false_witness", "denying_witness"):
                if peer != word.witness:
                    continue
                claims = dict(holds)
                if fault.kind == "false_witness":
                    never = evidence.messages.keys() - holds.keys()
                    claims |= {p: evidence.messages[p].commitment for p in never}
                else:
                    denied = next((p for p in holds if p != peer), None)
                    claims.pop(denied, None)
                self.fired[fault.kind] += claims != holds
                holds = claims
            heard = [peer for peer in round_.peers if peer not in evidence.silent]
            others = [peer for peer in word.others if peer in holds]
            refused = [peer for peer in word.refused if peer not in holds]
            said.append(
                attestation.attest(word.witness, round_.seed, heard, holds, others, refused)
            )
        return tuple(said)

    def found(self, check: Check, claimed: Claim | None, step: int) -> Claim:
        """What a verifier says that it found."""
        if any(peer == check.verifier for _, _, peer in self._now(step, "false_verifier")):
            self.fired["false_verifier"] += 1
            return FALSE
        if claimed is not None and self._together(check.verifier, check.peer, step):
            return claimed
        return check.found

    def ruled(self, judge: int, check: Check, claimed: Claim, honest: Claim, step: int) -> Claim:
        """What a tie-breaker says that it found: its group is right."""
        if self._together(judge, check.peer, step):
            return claimed
        if self._together(judge, check.verifier, step):
            return check.found
        return honest

    # ---- The schedule ----

    def _of(self, *kinds: str) -> Iterator[tuple[int, runfile.Fault, int]]:
        """Each fault of some kinds, with its number and each of its peers."""
        for number, fault in enumerate(self.schedule):
            if fault.kind in kinds and number not in self._returned:
                yield from ((number, fault, peer) for peer in fault.peers)

    def _now(self, step: int, *kinds: str) -> Iterator[tuple[int, runfile.Fault, int]]:
        for number, fault, peer in self._of(*kinds):
            if fault.rounds[0] <= step <= fault.rounds[1]:
                yield number, fault, peer

    def _together(self, one: int, other: int, step: int) -> bool:
        return any(
            one in fault.peers and other in fault.peers
            for _, fault, _ in self._now(step, "collude")
        )

    def _rng(self, step: int, peer: int = 0, kind: str = "") -> np.random.Generator:
        return np.random.default_rng((self.seed, step, peer, zlib.crc32(kind.encode())))


def _kinds(wraps: str) -> tuple[str, ...]:
    return tuple(name for name, kind in KINDS.items() if kind.wraps == wraps)


def _after(peers: Sequence[int], peer: int) -> list[int]:
    """The other peers, in a circle from the one after `peer`."""
    place = peers.index(peer)
    return [*peers[place + 1 :], *peers[:place]]
