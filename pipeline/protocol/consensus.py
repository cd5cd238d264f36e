"""What peers agree on in a round: the messages that are applied, and the proven liars."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from pipeline.protocol.attestation import Attestation, attest, proven
from pipeline.protocol.dispute import Check, Claim, settle
from pipeline.protocol.round import Evidence, Round


def judge(
    round_: Round, evidence: Evidence, limit: float, quorum: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the peers whose messages everybody applies, and by peer how it was proven to lie.

    These liars are out of the run, by what everybody can see:

    - a witness that claims to hold a message that never arrived anywhere, or does not decode: it
      could not produce it;
    - a sender whose bytes a quorum of witnesses refused;
    - a sender of which two witnesses prove to hold different messages of the same round;
    - the trainer or the verifier that lost a dispute.

    A disputed message is not applied if the dispute is not settled. `limit` is max_round_train_time
    in seconds, and `quorum` the number of witnesses needed.
    """
    supported, lied = _witnessing(round_, evidence, in_time(evidence.arrivals, limit), quorum)
    disputed, rulings = set(), defaultdict(list)
    for ruling in evidence.rulings:
        rulings[ruling.verifier, ruling.peer].append(ruling)
    for check, claimed in disputes(evidence, [c for c in evidence.checks if c.seconds <= limit]):
        loser = settle(check, claimed, rulings[check.verifier, check.peer])
        if loser is None:
            disputed.add(check.peer)
        else:
            lied.setdefault(loser, "false message" if loser == check.peer else "false check")
    applied = tuple(sorted(supported - lied.keys() - disputed))
    return applied, dict(sorted(lied.items()))


def disputes(evidence: Evidence, checks: Iterable[Check]) -> list[tuple[Check, Claim]]:
    """Return the checks that differ from what the peer claimed, each with its claim."""
    claims = {peer: message.claim for peer, message in evidence.messages.items()}
    pairs = [(check, claims[check.peer]) for check in checks if check.peer in claims]
    return [(check, claimed) for check, claimed in pairs if claimed != check.found]


def in_time(arrivals: Mapping[int, float], limit: float) -> tuple[int, ...]:
    """Return the peers, ascending, whose messages arrived within `limit` seconds."""
    return tuple(peer for peer in sorted(arrivals) if arrivals[peer] <= limit)


def witnessed(round_: Round, evidence: Evidence, limit: float) -> tuple[Attestation, ...]:
    """Return the attestations of the round's witnesses if all of them are honest.

    Attestations in the evidence are ignored; `limit` is max_round_train_time in seconds.
    """
    arrived = dict.fromkeys(in_time(evidence.arrivals, limit))
    refused = tuple(peer for peer in evidence.broken if peer in arrived)
    heard = evidence.present(round_.peers)
    held = {peer: evidence.messages[peer].commitment for peer in arrived.keys() - set(refused)}
    to = {peer: set(message.to) for peer, message in evidence.others.items() if peer in arrived}
    attestations = []
    for witness in evidence.present(round_.witnesses):
        others = [peer for peer in to if witness in to[peer]]
        holds = held | {p: evidence.others[p].commitment for p in others if p in held}
        attestations.append(attest(witness, round_.seed, heard, holds, others, refused))
    return tuple(attestations)


def _witnessing(
    round_: Round, evidence: Evidence, arrived: Sequence[int], quorum: int
) -> tuple[set[int], dict[int, str]]:
    """The peers whose message a quorum holds, and the liars that attestations prove."""
    lied: dict[int, str] = {}
    commitments = {peer: message.commitment for peer, message in evidence.messages.items()}
    others = {peer: message.commitment for peer, message in evidence.others.items()}
    votes: dict[int, list[str]] = {}
    refusals: Counter[int] = Counter()
    could_arrive = set(arrived) - set(evidence.broken)
    for attestation in evidence.attestations:
        if not could_arrive.issuperset(attestation.received):
            lied[attestation.witness] = "false witness"
            continue
        for peer, commitment in proven(attestation, round_.seed, commitments, others).items():
            votes.setdefault(peer, []).append(commitment)
        refusals.update(attestation.refused)
    supported = set()
    for peer, held in votes.items():
        if len(set(held)) > 1:
            lied[peer] = "two messages"
        elif len(held) >= quorum and held[0] == commitments[peer]:
            supported.add(peer)
    lied |= {peer: "no message" for peer, count in refusals.items() if count >= quorum}
    return supported, lied
