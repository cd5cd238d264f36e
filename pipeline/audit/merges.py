"""A run's params, followed from its start to its end: from messages alone, without training.

    params, shared = receive(the decoded messages that everybody applied, params, shared)

round by round. Every hash that a transcript has of what all peers agree on is compared on the way,
bit for bit and with no tolerance: `receive` is one program, and what it is given are the messages'
own bytes. So whoever changes the start, a message, a decision or the end is found, whoever trained
and wherever.
"""

from collections.abc import Callable

import jax

from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.swarm.delivery import TravellingMessages
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.wire import message as wire
from lockstep.wire.commitment import tree_hash
from pipeline.audit.verdict import Finding
from pipeline.start.begin import Setup

Arrived = Callable[[int, Tree, Tree], None]


class BrokenChainError(Exception):
    """The params in a transcript do not follow from its messages.

    Attributes:
      finding: The first such place.
    """

    def __init__(self, step: int, detail: str):
        super().__init__(detail)
        self.finding = Finding(step, None, "params", detail, True)


def follow_params(
    setup: Setup, transcript: Transcript, params: Tree, shared: Tree, arrived: Arrived
) -> None:
    """Recompute the params after every round, and compare each hash that the transcript has.

    Args:
      setup: The auditor's own set-up of the run; its messages are kept (`Form.kept`).
      transcript: All rounds, which have passed the audit, and all payloads.
      params: The params before the first round.
      shared: The optimizer's shared state then.
      arrived: Called with the step, the params and the shared state after each snapshot, the first
        among them.

    Raises:
      BrokenChainError: A hash is another than that of what the messages give.
    """
    group = device_groups(jax.devices(), setup.programs.parts)[0]
    replica = Replica.put(setup.programs, group, params, shared)
    travelling = TravellingMessages()
    _compare_snapshot(transcript, transcript.snapshots[0], replica, arrived)
    for entry in transcript.rounds:
        step = entry.round.step
        if entry.joined_params is not None:
            _compare(step, "were given to peers", _params(replica), entry.joined_params)
        own, plan = _received(transcript, entry, setup.programs.form), entry.round
        messages = travelling.take(own, plan, entry.decision)
        count = setup.run.peers.count
        replica = replica.receive(messages, plan.sequences, count, step, plan.ages)
        if entry.checkpointed is not None:
            _compare(step, "ended the epoch", _params(replica), entry.checkpointed.params)
        if step in transcript.snapshots:
            _compare_snapshot(transcript, step, replica, arrived)


def _received(transcript: Transcript, entry: Entry, form: wire.Form) -> dict[int, Tree]:
    """The messages of a round that everybody merges, in it or in a later one."""
    sent, decision = entry.evidence.messages, entry.decision
    try:
        return {
            peer: transcript.message(sent[peer], form)
            for peer in sent.keys() & {*decision.applied, *decision.travelling}
        }
    except wire.WireError as error:
        raise BrokenChainError(entry.round.step, f"applied an invalid message: {error}") from error


def _compare_snapshot(
    transcript: Transcript, step: int, replica: Replica, arrived: Arrived
) -> None:
    params, shared = jax.device_get((replica.params, replica.shared))
    recorded = transcript.hashes(step)
    for what, tree, expected in (
        ("params", params, recorded.params),
        ("shared state", shared, recorded.shared),
    ):
        if (found := tree_hash(tree)) != expected:
            raise BrokenChainError(
                step,
                f"the {what} at the snapshot {_are(expected, found)} of all messages from the "
                "run's start",
            )
    arrived(step, params, shared)


def _params(replica: Replica) -> str:
    return tree_hash(jax.device_get(replica.params))


def _compare(step: int, what: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise BrokenChainError(step, f"the params that {what} {_are(recorded, found)}")


def _are(recorded: str, found: str) -> str:
    return f"are {recorded[:12]}, expected {found[:12]}"
