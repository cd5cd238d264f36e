"""What peers agree on in a round: by whose reports, the messages that are applied, the liars."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lockstep.protocol import committee
from lockstep.protocol.attestation import Attestation, Check, Claim, attest, proven, settle
from lockstep.protocol.closing import sender
from lockstep.protocol.round import Evidence, Round, commitments_of
from lockstep.protocol.sets import Bloom, ExactSet, participant

STORE = -1  # the witness of a run over a store


# ---- Who says that a round ended, and with which messages ----


@dataclass(frozen=True)
class ElectedWitnesses:
    """Witnesses are elected in each round, and attest to the messages that they hold."""

    #: Whether somebody who is no member may report on a round, and so lie.
    from_anybody: ClassVar[bool] = False
    #: Whether who records a run has what each peer owns, as a snapshot of the whole state needs.
    show_own: ClassVar[bool] = True

    def witnesses(self, members: Sequence[int], seed: int, nodes: int) -> tuple[int, ...]:
        """Return who reports on a round: elected witnesses; `nodes` is witness_nodes."""
        return tuple([members[i] for i in committee.witnesses(seed, len(members), nodes)])

    def participants(self, round_: Round, evidence: Evidence) -> Iterable[tuple[int, Bloom]]:
        """Yield each witness that attested to a round, and whom it heard from, as a filter."""
        for attestation in evidence.attestations:
            yield attestation.witness, attestation.participants_filter(round_.seed)

    def supported(
        self, round_: Round, evidence: Evidence, slots: Sequence[int], quorum: int
    ) -> tuple[set[int], dict[int, str]]:
        """Return the messages that a quorum holds, and the liars that attestations prove.

        `slots` are those of the messages that arrived in time, and a liar's text says what it did.
        """
        liars: dict[int, str] = {}
        commitments = commitments_of(round_, evidence)
        others = {peer: message.commitment for peer, message in evidence.others.items()}
        votes: Counter[tuple[int, str]] = Counter()  # by peer and commitment
        refusals: Counter[int] = Counter()
        could_arrive = set(slots) - set(evidence.broken)
        for attestation in evidence.attestations:
            if not could_arrive.issuperset(attestation.received):
                liars[attestation.witness] = "false witness"
                continue  # a liar's other claims count for nothing
            votes.update(proven(attestation, round_.seed, commitments, others).items())
            refusals.update(set(attestation.refused))  # a witness that repeats a peer has one vote
        versions = Counter(peer for peer, _ in votes)
        two = {peer for peer, count in versions.items() if count > 1}
        liars |= dict.fromkeys(two, "two messages")  # of this round: older ones have no other
        supported = {
            peer
            for (peer, commitment), count in votes.items()
            if count >= quorum and peer not in two and commitment == commitments[peer]
        }
        refused = {peer for peer, count in refusals.items() if count >= quorum}
        liars |= dict.fromkeys(refused.intersection(evidence.broken), "no message")
        return supported, liars


@dataclass(frozen=True)
class SharedStore:
    """Messages lie in a store, which shows all peers the same, so nobody need attest to them."""

    from_anybody: ClassVar[bool] = True
    show_own: ClassVar[bool] = False

    def witnesses(self, members: Sequence[int], seed: int, nodes: int) -> tuple[int, ...]:
        """Return who reports on a round: the shared store alone."""
        return (STORE,)

    def participants(self, round_: Round, evidence: Evidence) -> Iterable[tuple[int, ExactSet]]:
        """Yield the peers whose messages the shared store shows: exactly these."""
        yield STORE, ExactSet(frozenset(map(participant, evidence.present(round_.peers))))

    def supported(
        self, round_: Round, evidence: Evidence, slots: Sequence[int], quorum: int
    ) -> tuple[set[int], dict[int, str]]:
        """Return the messages to agree on, shown by the store in time; and proven liars."""
        broken = set(evidence.broken).intersection(slots)
        liars = dict.fromkeys(broken, "no message")
        return set(slots) - broken, liars | dict.fromkeys(evidence.false_links, "false link")


Reports = ElectedWitnesses | SharedStore
"""Who says that a run's rounds ended, and with which messages; chosen once, when it starts."""


# ---- What follows from it ----


def judge(
    round_: Round, evidence: Evidence, limit: float, reports: Reports, quorum: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return what a round agrees on: slots of messages that all apply, proven liars and why.

    These liars are ejected, on evidence that everybody can see:

    - a witness that claims to hold a message that never arrived anywhere, or does not decode: it
      could not show it;
    - a sender whose bytes a quorum of witnesses refused, unless anyone can show bytes that match
      its commitment: they prove themselves, however many peers deny them;
    - a sender if two witnesses prove to hold different messages of it in the same round;
    - the trainer or the verifier that lost a dispute;
    - over a store, a sender whose bytes everybody refuses, and the author of a false link.

    A message is not applied if a dispute about it is open, or if its sender withheld the state that
    a check needs. `limit` is when the round closed, in seconds after its start; `quorum` is the
    number of witnesses needed.
    """
    slots = arrived(round_, evidence, limit)
    supported, liars = reports.supported(round_, evidence, slots, quorum)
    disputed, rulings = set(evidence.withheld), defaultdict(list)
    for ruling in evidence.rulings:
        rulings[ruling.verifier, ruling.peer].append(ruling)
    for check, claimed in disputes(evidence, [c for c in evidence.checks if c.seconds <= limit]):
        loser = settle(check, claimed, rulings[check.verifier, check.peer], len(round_.peers))
        if loser is None:
            disputed.add(check.peer)
        else:
            liars.setdefault(loser, "false message" if loser == check.peer else "false check")
    applied = tuple(sorted(s for s in supported - disputed if sender(s) not in liars))
    return applied, dict(sorted(liars.items()))


def checked(round_: Round, evidence: Evidence) -> dict[int, int]:
    """Return the sender whose step each present verifier recomputes, by verifier, ascending.

    They are drawn from the round's seed and all its commitments:

        SHA-256("lockstep/verify:<seed of the round>:" + as `committee.drawn_after` adds them),

    whose first 8 bytes, little-endian, seed `committee.verified`. Seeds alone would not do: they
    follow from the run file, so a liar would know in which rounds nobody checks it.
    """
    present = evidence.present(round_.verifiers)
    draw = committee.drawn_after(evidence.commitments, f"lockstep/verify:{round_.seed}:")
    seed = int.from_bytes(draw[:8], "little")
    return committee.verified(seed, present, sorted(evidence.messages))


def disputes(evidence: Evidence, checks: Iterable[Check]) -> list[tuple[Check, Claim]]:
    """Return the checks that dispute what the peer claimed, each with its claim."""
    claims = {peer: message.claim for peer, message in evidence.messages.items()}
    pairs = [(check, claims[check.peer]) for check in checks if check.peer in claims]
    return [(check, claim) for check, claim in pairs if claim != check.found]


def in_time(arrivals: Mapping[int, float], limit: float) -> tuple[int, ...]:
    """Return the slots, ascending, of messages to agree on: arrived within `limit` seconds."""
    return tuple(peer for peer in sorted(arrivals) if arrivals[peer] <= limit)


def arrived(round_: Round, evidence: Evidence, limit: float) -> tuple[int, ...]:
    """Return the slots of messages to agree on, of earlier rounds too, that arrived in time."""
    earlier = {peer: message.seconds for peer, message in round_.travelling.items()}
    return in_time(earlier | evidence.arrivals, limit)


def witnessed(round_: Round, evidence: Evidence, limit: float) -> tuple[Attestation, ...]:
    """Return the attestations that honest witnesses would give.

    An auditor compares them with those in the evidence, which are ignored here; `limit` is as in
    `judge`.
    """
    slots = dict.fromkeys(arrived(round_, evidence, limit))
    refused = tuple(peer for peer in evidence.broken if peer in slots)
    present = evidence.present(round_.peers)
    sent = commitments_of(round_, evidence)
    held = {peer: sent[peer] for peer in slots.keys() - set(refused)}
    targets = {peer: set(message.to) for peer, message in evidence.others.items() if peer in slots}
    attestations = []
    for witness in evidence.present(round_.witnesses):
        others = [peer for peer in targets if witness in targets[peer]]
        holds = held | {p: evidence.others[p].commitment for p in others if p in held}
        attestations.append(attest(witness, round_.seed, present, holds, others, refused))
    return tuple(attestations)
