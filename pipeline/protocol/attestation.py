"""What a witness says of a round, and which of it counts.

A witness holds messages. It says so twice, as in Psyche: by a Bloom filter over their commitments,
which is small and may err, and by the Merkle root over them, which is exact. Its word on a message
counts where the filter has the commitment and a proof leads from it to the root: a filter's false
positive has no proof, and a proof without the filter is not asked for.
"""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pipeline.protocol import merkle
from pipeline.protocol.bloom import Bloom
from pipeline.protocol.coordinator import participant

BLOOM = r"^[A-Za-z0-9+/]{427}=$"  # a filter's 320 bytes


@dataclass(frozen=True)
class Attestation:
    """One witness's word on a round.

    Attributes:
      witness: The witness.
      received: The peers whose messages it holds, ascending.
      others: Those of them of whom it holds the other message: an equivocator sent two.
      refused: Peers whose bytes are no message, or not what was committed to.
      participants: Bloom filter of all peers that it heard from, base64.
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
    """Return a witness's word.

    Args:
      witness: The witness.
      seed: The round's seed, which the filters' keys come from.
      heard: The peers it heard from, itself among them.
      holds: The commitment of each message that it holds, by peer, hex.
      others: Those peers of whom it holds the other message.
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
        participants=_write(participants),
        broadcasts=_write(broadcasts),
        root=merkle.root(commitments).hex(),
    )


def proven(
    attestation: Attestation,
    seed: int,
    commitments: Mapping[int, str],
    others: Mapping[int, str],
) -> dict[int, str]:
    """Return, by peer, the commitment of each message whose holding the witness can prove.

    Args:
      attestation: The witness's word.
      seed: The round's seed.
      commitments: Each sender's commitment, hex.
      others: An equivocator's other commitment.
    """
    claimed = {
        peer: (others if peer in attestation.others else commitments).get(peer)
        for peer in attestation.received
    }
    if None in claimed.values():  # nobody committed to such a message: no tree can hold it
        return {}
    if merkle.root(list(map(bytes.fromhex, claimed.values()))).hex() != attestation.root:
        return {}
    broadcasts = attestation.held(seed)
    return {peer: held for peer, held in claimed.items() if bytes.fromhex(held) in broadcasts}


def _seed(seed: int, witness: int, what: str) -> bytes:
    return f"lockstep/bloom:{seed}:{witness}:{what}".encode()


def _write(bloom: Bloom) -> str:
    return base64.b64encode(bloom.bits).decode()


def _read(text: str, seed: bytes) -> Bloom:
    return Bloom(Bloom.of((), seed).keys, base64.b64decode(text))
