"""A round: what it is before anybody has trained, what is sent and said in it, what it came to."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.protocol.attestation import Attestation
from pipeline.protocol.dispute import Check, Ruling

Span = tuple[int, int]  # first and last sequence, both included


@dataclass(frozen=True)
class Round:
    """One round, before anybody has trained.

    Attributes:
      step: The round, counted from 1.
      epoch: Its epoch, from 0.
      seed: The round's seed, u64.
      data_index: First sequence of the batch that is new.
      batch_size: Sequences in the batch, those of earlier rounds that are taken again included.
      peers: The epoch's members.
      assignment: Each trainer's first and last sequence, both included; a peer without is absent.
      verifiers: Whose work each verifier recomputes; it trains on nothing itself.
      witnesses: The elected witnesses.
      joined: Peers for which this is the first round since they joined a run that was going on:
        they have the others' params, and begin with a state of their own that is new.
    """

    step: int
    epoch: int
    seed: int
    data_index: int
    batch_size: int
    peers: tuple[int, ...]
    assignment: dict[int, Span]
    verifiers: dict[int, int]
    witnesses: tuple[int, ...]
    joined: tuple[int, ...]

    @property
    def trainers(self) -> int:
        """How many of the peers train."""
        return len(self.peers) - len(self.verifiers)


@dataclass(frozen=True)
class Evidence:
    """What was sent and said in a round.

    Attributes:
      arrivals: By peer, seconds after the round's start at which its message is at every peer; a
        message that never arrives is absent.
      commitments: The commitment of each message that was sent.
      others: The commitment of an equivocator's other message.
      broken: Senders whose bytes are no message, or not what they committed to, as whoever has them
        sees.
      states: Where peers verify, the hash of each sender's state after its step, hex.
      silent: Peers that nobody heard from.
      attestations: The witnesses' words; a silent witness is absent.
      checks: What the verifiers found.
      rulings: How their disputes were settled.
      settle_seconds: What settling took.
    """

    arrivals: Mapping[int, float]
    commitments: Mapping[int, bytes]
    others: Mapping[int, bytes] = field(default_factory=dict)
    broken: tuple[int, ...] = ()
    states: Mapping[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()
    attestations: tuple[Attestation, ...] = ()
    checks: tuple[Check, ...] = ()
    rulings: tuple[Ruling, ...] = ()
    settle_seconds: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What a round came to.

    Attributes:
      applied: Peers whose messages everybody applies: `quorum` witnesses hold the same one, and
        nobody has shown it to be false.
      late: Peers whose message came after max_round_train_time, or never.
      dropped: Peers that nobody heard from: they are out of the epoch.
      ejected: Peers that were proven to lie, and how: they are out of the run.
      quorum: Witnesses needed.
      train_seconds: Simulated seconds from the round's start until all witnesses could speak.
      now: The simulated clock when the round was over, seconds from the start of the run.
    """

    applied: tuple[int, ...]
    late: tuple[int, ...]
    dropped: tuple[int, ...]
    ejected: dict[int, str]
    quorum: int
    train_seconds: float
    now: float
