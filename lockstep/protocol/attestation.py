"""A witness's attestation: which messages of a round it holds, and which of its claims count.

As in Psyche it attests twice: with a Bloom filter over the commitments it holds, which is small and
has false positives, and with the Merkle root over them, which is exact. A claim counts if the root
matches the claimed commitments and the filter contains the commitment.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from lockstep.protocol import bloom, merkle
from lockstep.protocol.bloom import Bloom, participant

BLOOM = r"^[A-Za-z0-9+/]{427}=$"  # a filter's 320 bytes


@dataclass(frozen=True)
class Attestation:
    """One witness's attestation to a round.

    Attributes:
      witness: The witness.
      received: Peers whose messages it holds, ascending.
      others: Those of them whose second message it holds: an equivocator sent two.
      refused: Peers whose bytes do not decode, or do not match their commitment.
      participants: Bloom filter of all peers it heard from, base64.
      broadcasts: Bloom filter of the commitments of `received`, base64.
      root: Merkle root over those commitments in the order of `received`, hex.
    """

    witness: int
    received: tuple[int, ...]
    others: tuple[int, ...]
    refused: tuple[int, ...]
    participants: Annotated[str, Field(pattern=BLOOM)]
    broadcasts: Annotated[str, Field(pattern=BLOOM)]
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

    def heard(self, seed: int) -> Bloom:
        """Return the filter of the peers it heard from, in the round with this seed."""
        return _read(self.participants, _seed(seed, self.witness, "participants"))

    def held(self, seed: int) -> Bloom:
        """Return the filter of the commitments it holds, in the round with this seed."""
        return _read(self.broadcasts, _seed(seed, self.witness, "broadcasts"))


def attest(
    witness: int,
    seed: int,
    heard: Iterable[int],
    holds: Mapping[int, str],
    others: Iterable[int] = (),
    refused: Iterable[int] = (),
) -> Attestation:
    """Return a witness's attestation.

    Args:
      witness: The witness.
      seed: The round's seed, from which the filters' keys derive.
      heard: Peers it heard from, itself included.
      holds: Commitment of each message it holds, by peer, hex.
      others: Peers whose other message it holds.
      refused: Peers whose bytes it refused.
    """
    received = tuple(sorted(holds))
    commitments = [bytes.fromhex(holds[peer]) for peer in received]
    participants = Bloom.of(map(participant, heard), _seed(seed, witness, "participants"))
    broadcasts = Bloom.of(commitments, _seed(seed, witness, "broadcasts"))
    return Attestation(
        witness=witness,
        received=received,
        others=tuple(sorted(others)),
        refused=tuple(sorted(refused)),
        participants=base64.b64encode(participants.bits).decode(),
        broadcasts=base64.b64encode(broadcasts.bits).decode(),
        root=merkle.root(commitments).hex(),
    )


def proven(
    attestation: Attestation, seed: int, commitments: Mapping[int, str], others: Mapping[int, str]
) -> dict[int, str]:
    """Return, by peer, the commitment of each message that the witness proves to hold.

    `seed` is the round's. `commitments` are those of the senders, hex, and `others` the other ones
    of equivocators.
    """
    claimed, has_other = {}, set(attestation.others)
    for peer in attestation.received:
        held = (others if peer in has_other else commitments).get(peer)
        if held is None:  # nobody committed to such a message
            return {}
        claimed[peer] = held
    digests = list(map(bytes.fromhex, claimed.values()))
    if merkle.root(digests).hex() != attestation.root:
        return {}
    broadcasts = attestation.held(seed)
    if broadcasts == Bloom.of(digests, _seed(seed, attestation.witness, "broadcasts")):
        return claimed  # an honest witness's filter is this one: no need to look up each item
    in_filter = broadcasts.holds(digests)
    return {p: held for (p, held), is_in in zip(claimed.items(), in_filter, strict=True) if is_in}


def _seed(seed: int, witness: int, name: str) -> bytes:
    return f"lockstep/bloom:{seed}:{witness}:{name}".encode()


def _read(text: str, seed: bytes) -> Bloom:
    return Bloom(bloom.keys(seed), base64.b64decode(text))
