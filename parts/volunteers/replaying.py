"""A volunteer's window is replayed, from what it owned before it."""

import re
from contextlib import suppress
from typing import Literal, NamedTuple

import jax

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import tree_hash
from lockstep.transcript.windows import Window
from parts.volunteers import layout
from parts.volunteers.chain.chain import Chain
from parts.volunteers.chain.draws import AuditDraw
from parts.volunteers.store import chunks
from parts.volunteers.tables import volunteers_of
from pipeline.audit.audit import audit_ends
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from pipeline.start.set_up import Setup

MOST_HEADER = 2**20  # bytes of a state's file before its arrays


class StateError(RequestError):
    """A window cannot be replayed: what its peer owned is not there, or not what it said.

    is_its_fault: Whether only the peer can have done it.
    """

    def __init__(self, text: str, *, is_its_fault: bool = True):
        super().__init__(text)
        self.is_its_fault = is_its_fault


class ReplayRequest(NamedTuple):
    """A peer and its window that is to be replayed, both counted from 0."""

    peer: int
    number: int

    @classmethod
    def parse(cls, text: str) -> "ReplayRequest":
        """Return the peer and window to replay that PEER:WINDOW means."""
        if not (match := re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)):
            raise RequestError(f"--replay {brief(text)}, expected PEER:WINDOW, as 3:7")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.peer}:{self.number}"


class AuditState(NamedTuple):
    """How it stands with a drawn window to replay: with what its peer owned before it.

    known: Everybody knows it. shown: The peer says that it put it. awaited: It still may.
    missing: It did not in time. unsigned: Bytes stand in the peer's place that it did not sign, so
    nobody knows whose fault it is.
    """

    drawn: AuditDraw
    state: Literal["known", "shown", "awaited", "missing", "unsigned"]

    @property
    def name(self) -> str:
        """Where the peer was to say that it put its state to be replayed."""
        return layout.of_peer(self.drawn.first - 1, self.drawn.peer, "shown")

    @property
    def request(self) -> ReplayRequest:
        """The drawn window as one to be replayed."""
        return ReplayRequest(self.drawn.peer, self.drawn.number)


def audit_states(setup: Setup, transcript: Transcript, chain: Chain) -> list[AuditState]:
    """Return how it stands with the replay of each window that was drawn so far."""
    audits, seconds = [], volunteers_of(setup.run).audit_seconds
    for draw in chain.draws.drawn:
        window, until = Window(draw.first, draw.last), draw.seconds + seconds
        audit = AuditState(draw, "known")
        if window.opening != setup.start.step and not transcript.begins_anew(window, draw.peer):
            content = chain.content(audit.name)
            if content is not None and content.stored.seconds <= until:
                state = "shown" if content.body else "unsigned"
            else:
                state = "missing" if chain.head.seconds > until else "awaited"
            audit = AuditState(draw, state)
        audits.append(audit)
    return audits


class RepeatedWindow(NamedTuple):
    """What came of a window's replay."""

    request: ReplayRequest
    window: Window
    messages: int
    why: str | None  #: Why it cannot be compared here; None where bits were.
    findings: list[Finding]


def replay(
    setup: Setup, transcript: Transcript, chain: Chain, request: ReplayRequest
) -> RepeatedWindow:
    """Replay a peer's window of a run that was followed this far.

    Raises:
      RequestError: The window is not over yet, or what the peer owned before it is nowhere.
    """
    peer, window = request.peer, _window(setup, transcript, request)
    if not (transcript.begins_anew(window, peer) or transcript.has_own(window.opening, peer)):
        _bring_own(setup, transcript, chain, window.opening, peer)
    findings, why = audit_ends(setup, transcript, window, (peer,)), None
    if not findings:
        outcome = Replay(setup, transcript).window(window, (peer,), lambda: None)
        findings, why = outcome.findings, outcome.why
    messages = sum(peer in entry.evidence.messages for entry in transcript.window(window))
    return RepeatedWindow(request, window, messages, why, findings)


def _window(setup: Setup, transcript: Transcript, request: ReplayRequest) -> Window:
    windows = setup.run.snapshots(setup.start.step).windows
    done = [w for w in windows if w.last <= setup.start.step + len(transcript.rounds)]
    if request.peer >= setup.run.peers.count or request.number >= len(done):
        raise RequestError(
            f"--replay {request}: expected a peer below {setup.run.peers.count} and a window below "
            f"{len(done)}, the number of finished windows"
        )
    return done[request.number]


def _bring_own(setup: Setup, transcript: Transcript, chain: Chain, step: int, peer: int) -> None:
    """Fetch for a replay what a peer owned after a round, which is what it committed to."""
    folder, path = layout.own_folder(step, peer), transcript.own_file(step, peer)
    expected, owned = (
        transcript.hashes(step).own[peer],
        f"what peer {peer} owned after round {step}",
    )
    if expected is None:
        raise StateError(f"peer {peer} published no hash of its own state after round {step}")
    content = chain.content(name := layout.of_peer(step, peer, "shown"))
    if content is None or content.body is None:
        is_there = content is not None
        raise StateError(
            f"{owned}: {name} is not there, or not signed by it", is_its_fault=not is_there
        )
    template = setup.start.state.own[peer]
    most = sum(leaf.nbytes for leaf in jax.tree.leaves(template)) + MOST_HEADER
    try:
        chunks.fetch(chain.store.store, folder, content.body.index, path, most)
    except LockstepError as error:  # others may have put other bytes there
        lacks = isinstance(error, chunks.LackingError)
        raise StateError(f"{owned}: {error}", is_its_fault=lacks) from error
    found = None
    with suppress(LockstepError):
        found = tree_hash(transcript.own(step, peer, template))
    if found != expected:
        path.unlink(missing_ok=True)
        raise StateError(
            f"{owned}: {folder} has hash {str(found)[:12]}, expected {expected[:12]} as its record "
            "says"
        )
