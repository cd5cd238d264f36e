"""What peers agree on in a round: the messages that are applied, and the proven liars."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from lockstep.protocol import committee
from lockstep.protocol.attestation import Attestation, Check, Claim, attest, proven, settle
from lockstep.protocol.pace import Pace, sender
from lockstep.protocol.round import Evidence, Round
from lockstep.protocol.run_state import Settings


def judge(
    round_: Round, evidence: Evidence, limit: float, quorum: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return the slots of messages that everybody applies, and the proven liars with the reason.

    These liars are ejected, on evidence that everybody can see:

    - a witness that claims to hold a message that never arrived anywhere, or does not decode: it
      could not show it;
    - a sender whose bytes a quorum of witnesses refused, unless anyone can show bytes that match
      its commitment: they prove themselves, however many peers deny them;
    - a sender if two witnesses prove to hold different messages of it in the same round;
    - the trainer or the verifier that lost a dispute;
    - over a store, a sender whose bytes everybody refuses, and the author of a false link.

    A message is not applied if a dispute about it is open, or if its sender withheld the state that
    a check needs. `limit` is max_round_train_time in seconds, or when the round closed; `quorum` is
    the number of witnesses needed.
    """
    slots = arrived(round_, evidence, limit)
    if round_.witnesses:
        supported, liars = _witnessing(round_, evidence, slots, quorum)
    else:
        supported, liars = _stored(evidence, slots)
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
    """Return the checks that differ from what the peer claimed, each with its claim."""
    claims = {peer: message.claim for peer, message in evidence.messages.items()}
    pairs = [(check, claims[check.peer]) for check in checks if check.peer in claims]
    return [(check, claim) for check, claim in pairs if claim != check.found]


def in_time(arrivals: Mapping[int, float], limit: float) -> tuple[int, ...]:
    """Return the slots, ascending, of messages that arrived within `limit` seconds."""
    return tuple(peer for peer in sorted(arrivals) if arrivals[peer] <= limit)


def arrived(round_: Round, evidence: Evidence, limit: float) -> tuple[int, ...]:
    """Return the slots of messages, of this or earlier rounds, that arrived within the limit."""
    earlier = {peer: message.seconds for peer, message in round_.travelling.items()}
    return in_time(earlier | evidence.arrivals, limit)


def closes(pace: Pace | None, round_: Round, evidence: Evidence, settings: Settings) -> float:
    """Return the seconds after its start at which a round closes."""
    limit = settings.max_round_train_time
    if pace is None:
        return limit
    return pace.closes(round_.step, evidence.arrivals.values(), len(round_.assignment), limit)


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


def commitments_of(round_: Round, evidence: Evidence) -> dict[int, str]:
    """Return the commitment of each message that a peer may hold in the round, by its slot."""
    earlier = {peer: late.commitment for peer, late in round_.travelling.items()}
    return earlier | {peer: message.commitment for peer, message in evidence.messages.items()}


def _stored(evidence: Evidence, slots: Sequence[int]) -> tuple[set[int], dict[int, str]]:
    """Return the peers whose message a store shows in time, and the liars that it proves."""
    broken = set(evidence.broken).intersection(slots)
    liars = dict.fromkeys(broken, "no message") | dict.fromkeys(evidence.false_links, "false link")
    return set(slots) - broken, liars


def _witnessing(
    round_: Round, evidence: Evidence, slots: Sequence[int], quorum: int
) -> tuple[set[int], dict[int, str]]:
    """Return the peers whose message a quorum holds, and the liars that attestations prove."""
    liars: dict[int, str] = {}
    commitments = commitments_of(round_, evidence)
    others = {peer: message.commitment for peer, message in evidence.others.items()}
    votes: dict[int, list[str]] = {}
    refusals: Counter[int] = Counter()
    could_arrive = set(slots) - set(evidence.broken)
    for attestation in evidence.attestations:
        if not could_arrive.issuperset(attestation.received):
            liars[attestation.witness] = "false witness"
            continue  # a liar's other claims count for nothing
        for peer, commitment in proven(attestation, round_.seed, commitments, others).items():
            votes.setdefault(peer, []).append(commitment)
        refusals.update(set(attestation.refused))  # a witness that repeats a peer has one vote
    supported = set()
    for peer, held in votes.items():
        if len(set(held)) > 1:
            liars[peer] = "two messages"  # of this round: older ones have no other
        elif len(held) >= quorum and held[0] == commitments[peer]:
            supported.add(peer)
    refused = {peer for peer, count in refusals.items() if count >= quorum}
    liars |= dict.fromkeys(refused.intersection(evidence.broken), "no message")
    return supported, liars
