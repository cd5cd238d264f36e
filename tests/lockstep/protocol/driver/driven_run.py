"""A run that is driven without training: honest peers, or what a test says became of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lockstep.protocol import consensus, driver
from lockstep.protocol.closing import Closing
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.protocol.round import Decision, Evidence, Message, Round
from lockstep.tables.links import Links
from tests.lockstep.protocol import records, three_peers


@dataclass(frozen=True)
class Settings(three_peers.Settings):
    """Seconds 3 waiting, 20 warm-up, 30 train, 2 witness, 5 cooldown; 4 rounds an epoch."""

    init_min_clients: int = 4
    min_clients: int = 4
    witness_nodes: int = 3
    total_steps: int = 10
    waiting_for_members_extra_time: int = 3
    batch: int = 8

    def batch_size(self, tokens: int) -> int:
        return self.batch if tokens < 10 * 40 else self.batch + 3


LONG = Settings(init_min_clients=5, min_clients=3, batch=10, rounds_per_epoch=100)
VERIFIED = replace(LONG, verification_percent=34)  # of 5 peers, 1 verifies and 4 train


def started(
    settings: three_peers.Settings,
    count: int,
    seed: int = 1,
    *,
    step: int = 0,
    data_index: int = 0,
    loads: Sequence[float] = (),
    **more: object,
) -> RunProgress:
    """A run without members, whose sequences have 10 tokens."""
    given = {"closing": three_peers.CLOSING, "micro_batch": 1, "row_tokens": 10} | more
    given |= {"coordinator": settings, "links": Links(), "peers": count, "seed": seed}
    return driver.start(RoundSettings(**given), step, data_index, loads or (0.0,) * count)


def begun(settings: Settings = Settings(), count: int = 4, seed: int = 1, **more) -> RunProgress:  # noqa: B008
    """A run that all its peers joined at its start."""
    return driver.ask(started(settings, count, seed, **more), range(count))


def commitment(round: Round, peer: int) -> str:
    return f"{round.step:02x}{peer:02x}" * 16


def evidence(
    round: Round,
    arrivals: Mapping[int, float | None] | float = 1.0,
    *,
    others: Mapping[int, Message] = {},  # noqa: B006
    refused: tuple[int, ...] = (),
    silent: tuple[int, ...] = (),
    closing: Closing = three_peers.CLOSING,
    **said: object,
) -> Evidence:
    """What was sent, and what honest witnesses say of it: every peer that is not silent sent its
    message, which arrived after a second, or after its `arrivals`; None is never."""
    if isinstance(arrivals, float):
        arrivals = dict.fromkeys(round.assignment, arrivals)
    senders = [peer for peer in round.assignment if peer not in silent]
    times = {peer: arrivals.get(peer, 1.0) for peer in senders}
    state = "ab" * 32 if round.verifiers else None
    found = records.evidence(
        {peer: Message(commitment(round, peer), 1, state) for peer in senders},
        arrivals={peer: at for peer, at in times.items() if at is not None},
        others=others,
        broken=refused,
        silent=silent,
        **said,
    )
    attestations = consensus.witnessed(round, found, closing.closes(round, found))
    return replace(found, attestations=attestations)


def train(
    progress: RunProgress, seconds: float = 1.0
) -> tuple[list[Round], list[Decision], RunProgress]:
    """Everybody's messages arrive after `seconds`, until the run has finished."""
    trained, decided = [], []
    while True:
        progress, round = driver.next_round(progress)
        if round is None:
            return trained, decided, progress
        progress, decision = driver.finish_round(progress, round, evidence(round, seconds))
        trained.append(round)
        decided.append(decision)


def spans(round: Round) -> set[tuple[int, int]]:
    return set(round.assignment.values())


def other(to: tuple[int, ...]) -> Message:
    """An equivocator's other message, and who gets it."""
    return Message("0f" * 32, 1, to=to)
