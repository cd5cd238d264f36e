"""What members state of each other: attestations, recomputed steps, and rulings in a dispute.

A witness attests to the messages of a round that it holds. As in Psyche it does so twice: with a
Bloom filter over their commitments, which is small and has false positives, and with the Merkle
root over them, which is exact. A claim counts if the root matches the claimed commitments and the
filter contains the commitment.

A verifier gets the trainer's own state before the round, to which the trainer committed a round
ago, and recomputes the step on the assigned batch with the trainer's program. The result is right
or wrong bit for bit, so an honest majority settles the dispute. All peers rule, because among a few
drawn tie-breakers liars would be the majority in some round, however few liars there are. The
loser is ejected, so a liar can cost the others this work only once.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import Field

from lockstep.protocol import sets
from lockstep.protocol.sets import Bloom, participant
from lockstep.tables.table import NumberKey

BLOOM = r"^[A-Za-z0-9+/]{427}=$"  # a filter's 320 bytes
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Attestation:
    """One witness's attestation to a round."""

    witness: int
    received: tuple[int, ...]  #: Peers whose messages it holds, ascending.
    #: Those of them whose second message it holds: an equivocator sent two.
    others: tuple[int, ...]
    refused: tuple[int, ...]  #: Peers whose bytes do not decode, or do not match their commitment.
    #: Bloom filter of all peers it heard from, base64.
    participants: Annotated[str, Field(pattern=BLOOM)]
    #: Bloom filter of the commitments of `received`, base64.
    broadcasts: Annotated[str, Field(pattern=BLOOM)]
    root: Hash  #: Merkle root over those commitments in the order of `received`, hex.

    def participants_filter(self, seed: int) -> Bloom:
        """Return the attestation's filter of peers heard from, in the round with this seed."""
        return _read(self.participants, _seed(seed, self.witness, "participants"))

    def broadcasts_filter(self, seed: int) -> Bloom:
        """Return the attestation's filter of commitments held, in the round with this seed."""
        return _read(self.broadcasts, _seed(seed, self.witness, "broadcasts"))


def attest(
    witness: int,
    seed: int,
    present: Iterable[int],
    holds: Mapping[int, str],
    others: Iterable[int] = (),
    refused: Iterable[int] = (),
) -> Attestation:
    """Return a witness's attestation to the round of a seed, from which the filters' keys derive.

    It heard from the `present` peers, itself included, and `holds` messages with these commitments,
    hex, by peer; of the peers `others`, their other message. It `refused` others' bytes.
    """
    received = tuple(sorted(holds))
    commitments = _digests(tuple([holds[peer] for peer in received]))
    participants = Bloom.of(map(participant, present), _seed(seed, witness, "participants"))
    broadcasts = Bloom.of(commitments, _seed(seed, witness, "broadcasts"))
    return Attestation(
        witness=witness,
        received=received,
        others=tuple(sorted(others)),
        refused=tuple(sorted(refused)),
        participants=base64.b64encode(participants.bits).decode(),
        broadcasts=base64.b64encode(broadcasts.bits).decode(),
        root=sets.root(commitments).hex(),
    )


def proven(
    attestation: Attestation, seed: int, commitments: Mapping[int, str], others: Mapping[int, str]
) -> dict[int, str]:
    """Return the commitment of each message that an attestation proves to be held, by peer.

    `seed` is the round's. `commitments` are those of the senders, hex, and `others` the other ones
    of equivocators.
    """
    has_other = set(attestation.others)
    known = {p: held for p, held in commitments.items() if p not in has_other}
    known |= {peer: held for peer, held in others.items() if peer in has_other}
    if not known.keys() >= set(attestation.received):  # nobody committed to such a message
        return {}
    claimed = {peer: known[peer] for peer in attestation.received}
    digests = _digests(tuple(claimed.values()))
    if sets.root(digests).hex() != attestation.root:
        return {}
    broadcasts = attestation.broadcasts_filter(seed)
    if broadcasts == Bloom.of(digests, _seed(seed, attestation.witness, "broadcasts")):
        return claimed  # an honest witness's filter is this one: no need to look up each item
    in_filter = broadcasts.holds(digests)
    return {p: held for (p, held), is_in in zip(claimed.items(), in_filter, strict=True) if is_in}


@lru_cache(maxsize=8)  # witnesses hold much the same messages
def _digests(commitments: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(map(bytes.fromhex, commitments))


def _seed(seed: int, witness: int, name: str) -> bytes:
    return f"lockstep/bloom:{seed}:{witness}:{name}".encode()


def _read(text: str, seed: bytes) -> Bloom:
    return Bloom(sets.keys(seed), base64.b64decode(text))


class Claim(NamedTuple):
    """A peer's claim of its step: the commitment to the message, and the next state's hash, hex."""

    message: Hash
    state: Hash


@dataclass(frozen=True)
class Check:
    """A verifier's statement on a trainer's step, which it recomputed."""

    verifier: int
    peer: int  #: The trainer.
    found: Claim  #: Result that the verifier reports.
    #: Seconds from the draw to the report, fetching the trainer's state included.
    seconds: Annotated[float, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]  #: Size of that state.


@dataclass(frozen=True)
class Ruling:
    """The result that each other peer reports on the step of `peer` that `verifier` disputes."""

    verifier: int
    peer: int
    found: dict[NumberKey, Claim]


def settle(check: Check, claimed: Claim, rulings: Iterable[Ruling], peers: int) -> int | None:
    """Return who loses a dispute by rulings, peer or verifier; None if it stays open.

    More than half of the round's `peers`, the two parties among them, must report the same result.
    A peer that reports nothing agrees with nobody, so silence never ejects an honest peer.
    """
    for ruling in rulings:
        if (ruling.verifier, ruling.peer) == (check.verifier, check.peer):
            results = list(ruling.found.values())
            if 2 * (1 + results.count(check.found)) > peers:
                return check.peer
            if 2 * (1 + results.count(claimed)) > peers:
                return check.verifier
    return None
