"""Stage train again, from messages alone and without training.

    params, shared = receive(the decoded messages that everybody applied, params, shared)

round by round, from the run's start to its end. Every hash that a transcript has of what all peers
agree on is compared on the way, bit for bit: `receive` is one program, and what it is given are the
messages' own bytes. So whoever changes the start, a message, a decision or the end is found,
whoever trained and wherever. The audit of the rounds themselves came before.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import jax

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.transcript.params import FollowedParams
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import save_tree
from lockstep.wire import message as wire
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.outputs import TRANSCRIPT
from pipeline.recheck.published import PublishedRun
from pipeline.start.set_up import Setup

Arrived = Callable[[int, Tree, Tree], None]
ROUND_EVENTS = {  # in the rounds, by a reader's words
    "asked": "peers asked to join after the first round",
    "left": "peers left",
    "paused": "the run was paused",
    "false_links": "peers signed false links",
}


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Follow the params from the run's start, where messages are kept.

    The params at the snapshots of repeated windows are put into the transcript, whose folder is the
    reader's own.
    """
    left_out = _left_out(published.transcript)
    code, commit = "with what code and packages", published.commit
    said = code if commit is None else f"{code}; the card says, of commit {commit}"
    claims = [
        left_out,
        PublicClaim("losses", "stated", "losses while training"),
        PublicClaim("keys", "stated", said, {"commit": commit}),
    ]
    if not published.kept:
        return claims
    transcript, start = published.transcript, published.start
    steps = {step for window, _ in published.chosen for step in (window.opening, window.last)}
    steps.add(transcript.snapshots[-1])

    def keep(step: int, params: Tree, shared: Tree) -> None:
        for name, tree in (("params", params), ("shared", shared)):
            path = transcript.folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
            if step in steps and not path.exists():  # a published start is there already
                save_tree(path, tree)

    follow_params(published.setup, transcript, start.params, start.shared, keep)
    published.transcript = replace(transcript, followed=True)
    what = f"all messages that were applied in {len(transcript.rounds)} rounds, "
    what += "{applied} of {sent} sent,".format(**left_out.values)
    return [chain_claim(published, what), *claims]


def chain_claim(published: PublishedRun, what: str) -> PublicClaim:
    """Return the claim that something leads from the run's start to the weights."""
    values = {"round": published.transcript.snapshots[-1], "chain": True}
    text = f"{what} lead from there to the weights, bit for bit"
    return PublicClaim("weights", "proven", text, values)


# ---- From the first round to the last ----


def follow_params(
    setup: Setup, transcript: Transcript, params: Tree, shared: Tree, arrived: Arrived
) -> None:
    """Recompute the params after every round, and compare each hash that the transcript has.

    Messages are kept (`Form.kept`), and the rounds have passed the audit. `arrived` is called with
    the step, the params and the shared state after each snapshot, the first among them.

    Raises:
      LockstepError: A hash is another, or a merged message does not decode.
    """
    unruled = ", ".join(sorted(setup.programs.unruled))
    hint = f"; {unruled} may have other bits on another machine" if unruled else ""

    def differs(step: int, text: str) -> NoReturn:
        raise LockstepError(f"{TRANSCRIPT}: round {step}, params: {text}{hint}")

    group, peers = device_groups(jax.devices(), setup.programs.parts)[0], setup.run.peers.count
    replica = Replica.put(setup.programs, group, params, shared)
    followed = FollowedParams(transcript, peers, replica, differs)
    first = transcript.snapshots[0]
    arrived(first, *followed.compare(transcript.hashes(first, peers)))
    for entry in transcript.rounds:
        step = entry.round.step
        followed.begin(entry)
        try:
            followed.follow(entry)
        except wire.WireError as error:
            differs(step, f"applied an invalid message: {error}")
        if step in transcript.snapshots:
            arrived(step, *followed.compare(transcript.hashes(step, peers)))


# ---- Late and silent peers ----


def _left_out(transcript: Transcript) -> PublicClaim:
    """Return the claim on who is recorded as late, silent or away; all else is recomputed.

    The line has what is no part of an uneventful run only where it happened.
    """
    first, *later = rounds = transcript.rounds
    counts: dict[str, Any] = {
        "sent": sum(len(entry.evidence.messages) for entry in rounds),
        "applied": sum(len(entry.decision.applied) for entry in rounds),
        "late": sum(len(entry.decision.late) for entry in rounds),
        "silent": sum(len(entry.evidence.silent) for entry in rounds),
        "withheld": sum(len(entry.evidence.withheld) for entry in rounds),
        "false_links": sum(len(entry.evidence.false_links) for entry in rounds),
        "began": len(first.asked),
        "asked": sum(len(entry.asked) for entry in later),
        "left": sum(len(entry.left) for entry in rounds),
        "paused": sum(entry.paused for entry in rounds),
        "ejected": sorted({peer for entry in rounds for peer in entry.decision.ejected}),
        "empty_rounds": sum(not entry.decision.applied for entry in rounds),
    }
    text = "who was late or silent: {sent} messages sent, {applied} applied, {late} late or lost, "
    text += "peers silent {silent} times, states withheld {withheld} times, "
    text = text.format(**counts) + f"{len(counts['ejected'])} peers ejected, "
    text += f"nothing applied in {counts['empty_rounds']} of {len(rounds)} rounds"
    for name, words in ROUND_EVENTS.items():
        text += f", {words} {counts[name]} times" if counts[name] else ""
    return PublicClaim("left_out", "stated", text, counts)
