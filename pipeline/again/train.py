"""Stage train again, from messages alone and without training.

    params, shared = receive(the decoded messages that everybody applied, params, shared)

round by round, from the run's start to its end. Every hash that a transcript has of what all peers
agree on is compared on the way, bit for bit and with no tolerance: `receive` is one program, and
what it is given are the messages' own bytes. So whoever changes the start, a message, a decision or
the end is found, whoever trained and wherever. The audit of the rounds themselves came before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.swarm.delivery import TravellingMessages
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import save_tree
from lockstep.wire import message as wire
from lockstep.wire.commitment import tree_hash
from pipeline.again.claim import PublicClaim
from pipeline.again.outputs import TRANSCRIPT
from pipeline.again.published import PublishedRun
from pipeline.audit.verdict import Finding
from pipeline.start.begin import Setup

Arrived = Callable[[int, Tree, Tree], None]
NEVER_PROVEN = (
    PublicClaim("losses", "stated", "losses while training"),
    PublicClaim("keys", "stated", "with what code and packages"),
)


def again(published: PublishedRun) -> list[PublicClaim]:
    """Follow the params from the run's start, where messages are kept.

    Those at the snapshots of the repeated windows are put into the transcript, whose folder is the
    reader's own.

    Raises:
      LockstepError: They do not lead to the weights.
    """
    counted = _count(published.transcript)
    claims = [_left_out(counted, len(published.transcript.rounds)), *NEVER_PROVEN]
    if not published.kept:
        return claims
    transcript, start = published.transcript, published.start
    steps = {step for window, _ in published.chosen for step in (window.opening, window.last)}
    steps.add(transcript.snapshots[-1])

    def keep(step: int, params: Tree, shared: Tree) -> None:
        for name, tree in (("params", params), ("shared", shared)):
            path = transcript.folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
            if step in steps and not path.exists():  # a given start is there
                save_tree(path, tree)

    try:
        follow_params(published.setup, transcript, start.params, start.shared, keep)
    except BrokenChainError as error:
        names = ", ".join(sorted(published.setup.programs.unruled))
        perhaps = f"; {names} may have other bits on another machine" if names else ""
        raise LockstepError(
            f"{TRANSCRIPT}: round {error.finding.round}, params: {error}{perhaps}"
        ) from error
    published.transcript = replace(transcript, followed=True)
    what = f"all messages that were applied in {len(transcript.rounds)} rounds, {counted.applied} "
    return [chain_claim(published, f"{what}of {counted.sent} sent,"), *claims]


def chain_claim(published: PublishedRun, what: str) -> PublicClaim:
    """Return the claim that something leads from the run's start to the weights."""
    values = {"round": published.transcript.snapshots[-1], "chain": True}
    text = f"{what} lead from there to the weights, bit for bit"
    return PublicClaim("weights", "proven", text, values)


# ---- From the first round to the last ----


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

    Messages are kept (`Form.kept`), and the rounds have passed the audit. `arrived` is called with
    the step, the params and the shared state after each snapshot, the first among them.

    Raises:
      BrokenChainError: A hash is another than that of what the messages give.
    """
    group = device_groups(jax.devices(), setup.programs.parts)[0]
    replica = Replica.put(setup.programs, group, params, shared)
    travelling, count = TravellingMessages(), setup.run.peers.count
    _compare_snapshot(transcript, transcript.snapshots[0], replica, arrived)
    for entry in transcript.rounds:
        plan = entry.round
        if entry.joined_params is not None:
            _compare(plan.step, "were given to peers", replica, entry.joined_params)
        own = _received(transcript, entry, setup.programs.form)
        messages = travelling.take(own, plan, entry.decision)
        replica = replica.receive(messages, plan.sequences, count, plan.step, plan.ages)
        if entry.checkpointed is not None:
            _compare(plan.step, "ended the epoch", replica, entry.checkpointed.params)
        if plan.step in transcript.snapshots:
            _compare_snapshot(transcript, plan.step, replica, arrived)


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


def _compare(step: int, what: str, replica: Replica, recorded: str) -> None:
    found = tree_hash(jax.device_get(replica.params))
    if found != recorded:
        raise BrokenChainError(step, f"the params that {what} {_are(recorded, found)}")


def _are(recorded: str, found: str) -> str:
    return f"are {recorded[:12]}, expected {found[:12]}"


# ---- Who was late or silent ----


class Counted(NamedTuple):
    """How many messages a run has, and what became of them.

    Attributes:
      sent: Messages that were sent.
      applied: Those that were merged.
      late: Those that came too late, or never.
      silent: How often a peer was silent in a round.
      withheld: How often a peer withheld the state that its check needs.
      ejected: Peers that were ejected.
      empty_rounds: Rounds in which nothing was applied.
    """

    sent: int
    applied: int
    late: int
    silent: int
    withheld: int
    ejected: list[int]
    empty_rounds: int


def _count(transcript: Transcript) -> Counted:
    rounds = transcript.rounds
    return Counted(
        sum(len(entry.evidence.messages) for entry in rounds),
        sum(len(entry.decision.applied) for entry in rounds),
        sum(len(entry.decision.late) for entry in rounds),
        sum(len(entry.evidence.silent) for entry in rounds),
        sum(len(entry.evidence.withheld) for entry in rounds),
        sorted({peer for entry in rounds for peer in entry.decision.ejected}),
        sum(not entry.decision.applied for entry in rounds),
    )


def _left_out(counted: Counted, rounds: int) -> PublicClaim:
    """Return the claim on peers recorded as late or silent; everything else is recomputed."""
    parts = [
        f"{counted.sent} messages sent",
        f"{counted.applied} applied",
        f"{counted.late} late or lost",
        f"peers silent {counted.silent} times",
        f"states withheld {counted.withheld} times",
        f"{len(counted.ejected)} peers ejected",
        f"nothing applied in {counted.empty_rounds} of {rounds} rounds",
    ]
    text = f"who was late or silent: {', '.join(parts)}"
    return PublicClaim("left_out", "stated", text, counted._asdict())
