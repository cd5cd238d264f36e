"""What peers agree on in a round: whose messages are applied, and who was proven to lie."""

from collections.abc import Iterable, Mapping, Sequence

from pipeline.protocol.attestation import Attestation, attest, proven
from pipeline.protocol.dispute import Check, Claim, settle
from pipeline.protocol.round import Evidence, Round


def judge(
    round_: Round, evidence: Evidence, limit: float, quorum: int
) -> tuple[tuple[int, ...], dict[int, str]]:
    """Return whose messages everybody applies, and who was proven to lie, and how.

    Who lied is out of the run, by what anyone can see:

    - a witness that says it holds a message which never arrived anywhere, or is none: asked for it,
      it has nothing to give;
    - a sender whose bytes a quorum of witnesses refused;
    - a sender of whom two witnesses prove to hold different messages of the same round;
    - a trainer or a verifier against whom a dispute was settled.

    A message that a verifier disputes and nobody can settle is not applied.

    Args:
      round_: The round.
      evidence: What was sent and said in it.
      limit: max_round_train_time, seconds.
      quorum: Witnesses needed.
    """
    supported, lied = _witnessing(round_, evidence, in_time(evidence.arrivals, limit), quorum)
    disputed = set()
    for check, claimed in disputes(evidence, [c for c in evidence.checks if c.seconds <= limit]):
        loser = settle(check, claimed, evidence.rulings)
        if loser is None:
            disputed.add(check.peer)
        else:
            lied.setdefault(loser, "false message" if loser == check.peer else "false check")
    applied = tuple(peer for peer in sorted(supported) if peer not in {*lied, *disputed})
    return applied, dict(sorted(lied.items()))


def disputes(evidence: Evidence, checks: Iterable[Check]) -> list[tuple[Check, Claim]]:
    """Return the checks that found something else than the peer claimed, and what it claimed."""
    found = []
    for check in checks:
        if check.peer in evidence.messages:  # else it sent nothing, and claims nothing
            claimed = evidence.messages[check.peer].claim
            if claimed != check.found:
                found.append((check, claimed))
    return found


def in_time(arrivals: Mapping[int, float], limit: float) -> tuple[int, ...]:
    """Return the peers, ascending, whose message arrived by `limit` seconds."""
    return tuple(peer for peer in sorted(arrivals) if arrivals[peer] <= limit)


def witnessed(round_: Round, evidence: Evidence, limit: float) -> tuple[Attestation, ...]:
    """Return what the round's witnesses say where all of them are honest.

    Args:
      round_: The round.
      evidence: Of it; its attestations are not looked at.
      limit: max_round_train_time, seconds.
    """
    arrived = in_time(evidence.arrivals, limit)
    refused = tuple(peer for peer in evidence.broken if peer in arrived)
    heard = [peer for peer in round_.peers if peer not in evidence.silent]
    words = []
    for witness in round_.witnesses:
        if witness in evidence.silent:
            continue
        others = [p for p in arrived if p in evidence.others and witness in evidence.others[p].to]
        holds = {
            peer: (evidence.others if peer in others else evidence.messages)[peer].commitment
            for peer in arrived
            if peer not in refused
        }
        words.append(attest(witness, round_.seed, heard, holds, others, refused))
    return tuple(words)


def _witnessing(
    round_: Round, evidence: Evidence, arrived: Sequence[int], quorum: int
) -> tuple[set[int], dict[int, str]]:
    """The peers whose message a quorum holds, and those that were seen to lie."""
    lied: dict[int, str] = {}
    commitments = {peer: message.commitment for peer, message in evidence.messages.items()}
    others = {peer: message.commitment for peer, message in evidence.others.items()}
    votes: dict[int, list[str]] = {}
    refusals: dict[int, int] = {}
    for word in evidence.attestations:
        if not set(word.received) <= set(arrived) - set(evidence.broken):
            lied[word.witness] = "false witness"
            continue
        found = proven(word, round_.seed, commitments, others)
        for peer, commitment in found.items():
            votes.setdefault(peer, []).append(commitment)
        for peer in word.refused:
            refusals[peer] = refusals.get(peer, 0) + 1
    supported = set()
    for peer, held in votes.items():
        if len(set(held)) > 1:
            lied[peer] = "two messages"
        elif len(held) >= quorum and held[0] == commitments[peer]:
            supported.add(peer)
    for peer, count in refusals.items():
        if count >= quorum:
            lied[peer] = "no message"
    return supported, lied
