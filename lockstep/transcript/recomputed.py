"""A run's coordinator, recomputed from the rounds of its transcript.

An auditor compares each round with what comes out, and a killed training goes on with it: where a
coordinator was is recorded nowhere else.
"""

from collections.abc import Iterable

from lockstep.errors import LockstepError
from lockstep.protocol import driver
from lockstep.protocol.coordinator import CoordinatorError
from lockstep.protocol.driver import RunProgress
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import RoundsFile


class ContradictionError(Exception):
    """An entry contradicts what is recomputed from the run file and the entries before it.

    Attributes:
      step: The round.
      kind: What differs: rounds, assignment, messages or decision.
    """

    def __init__(self, step: int, kind: str, detail: str):
        super().__init__(detail)
        self.step, self.kind = step, kind


def follow(progress: RunProgress, entries: Iterable[Entry], source: RoundsFile) -> RunProgress:
    """Return a run's recomputed progress after its recorded rounds, from that before the first.

    Raises:
      LockstepError: A round does not follow from those before it.
    """
    for number, entry in enumerate(entries, start=1):
        try:
            progress = finish_round(begin_round(progress, entry), entry)
        except ContradictionError as error:
            raise LockstepError(
                f"{source.path}:{number}: round {error.step}: {error}, expected a round that "
                f"follows from the rounds before it; {source.remedy}"
            ) from error
    return progress


def begin_round(progress: RunProgress, entry: Entry) -> RunProgress:
    """Return the run in its next recomputed round, which must be the recorded one.

    Raises:
      ContradictionError: It is another one, or no round could have gone as recorded.
    """
    step = entry.round.step
    try:
        if progress.pausing:
            progress = driver.resume(progress)
        progress, planned = driver.next_round(driver.ask(progress, entry.asked))
        progress = driver.leave(progress, entry.left)
        if entry.paused:
            progress = driver.pause(progress)
    except CoordinatorError as error:
        raise ContradictionError(step, "rounds", str(error)) from error
    if planned is None:
        what = "waits for peers" if progress.waiting else "ends"
        raise ContradictionError(step, "rounds", f"the run {what} before this round")
    if entry.round != planned:
        text = f"does not follow from the run file: {differing(planned, entry.round)}"
        raise ContradictionError(planned.step, "assignment", text)
    if text := _malformed(entry, progress.unready):
        raise ContradictionError(step, "messages", text)
    return progress


def finish_round(progress: RunProgress, entry: Entry) -> RunProgress:
    """Return the run after the recomputed round, which must be the recorded one.

    Raises:
      ContradictionError: The decision, or who stored the params, is not as recorded.
    """
    step = entry.round.step
    try:
        progress, decision = driver.finish_round(progress, entry.round, entry.evidence)
    except ValueError as error:
        raise ContradictionError(step, "decision", str(error)) from error
    if decision != entry.decision:
        text = f"does not follow from the evidence: {differing(decision, entry.decision)}"
        raise ContradictionError(step, "decision", text)
    expected, ended = driver.checkpointer(progress), entry.checkpointed
    if expected != (ended and ended.peer):
        text = f"params stored by {ended and f'peer {ended.peer}'}, expected by {expected}"
        raise ContradictionError(step, "decision", text)
    return driver.checkpointed(progress, ended.peer, ended.params) if ended else progress


def differing(expected: object, actual: object) -> str:
    """Return the attributes in which a recomputed object differs from the recorded one."""
    attributes = vars(expected)
    return ", ".join(sorted(name for name in attributes if attributes[name] != vars(actual)[name]))


def _malformed(entry: Entry, unready: tuple[int, ...]) -> str | None:
    """Return why no recomputed round could have produced this entry, or None."""
    plan, evidence = entry.round, entry.evidence
    senders = evidence.messages.keys()
    heard = plan.assignment.keys() - set(evidence.silent)
    speakers = evidence.present(plan.witnesses)
    attesting = [attestation.witness for attestation in evidence.attestations]
    problems = [
        (senders != heard, f"messages of peers {sorted(senders)}, expected of {sorted(heard)}"),
        (
            not evidence.others.keys() <= senders,
            f"second messages of peers {sorted(evidence.others)}, expected of {sorted(senders)}",
        ),
        (
            not {*unready} <= {*evidence.silent} <= {*plan.peers},
            f"silent peers {list(evidence.silent)}, expected members, {list(unready)} among them",
        ),
        (
            plan.verifiers and not all(message.state for message in evidence.messages.values()),
            "messages without the sender's state, which the verifiers need",
        ),
        (attesting != speakers, f"attestations of peers {attesting}, expected of {speakers}"),
        (evidence.checks and not plan.verifiers, "checks in a round without verifiers"),
        (
            evidence.others and not plan.witnesses,
            f"second messages of peers {sorted(evidence.others)} in a store, which takes one",
        ),
        (
            evidence.false_links and plan.witnesses,
            f"false links of peers {list(evidence.false_links)} in a round without a store",
        ),
        (
            bool(entry.joined_params) != bool(plan.joined),
            f"joined_params is {entry.joined_params}, and peers {list(plan.joined)} joined",
        ),
    ]
    return next((text for wrong, text in problems if wrong), None)
