"""`lockstep verify` asks here what is known of a run of volunteers without a key."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.transcript.transcript import Transcript
from parts.volunteers import joining, slots
from parts.volunteers.audits.replaying import (
    AuditState,
    RepeatedWindow,
    ReplayRequest,
    StateError,
    replay,
    shown,
)
from parts.volunteers.chain.place import Onlooker
from parts.volunteers.signed import MOST_BYTES
from parts.volunteers.store.schemes import open_store
from pipeline.recheck.claim import PublicClaim
from pipeline.start.begin import Setup

DRAWN = "drawn"


def is_run(source: str) -> bool:
    """Return whether an address is that of a run of volunteers; a web server is asked."""
    scheme, _, rest = source.partition("://")
    if not rest or scheme not in ("file", "gs", "http", "https", "s3"):
        return False
    if not scheme.startswith("http"):
        return True
    try:
        return open_store(source).look(slots.RUN, MOST_BYTES) is not None
    except LockstepError:
        return False  # whatever else is there says why


def verify(
    source: str,
    root: Path,
    replays: Sequence[str],
    say: Callable[[str], object],
    *,
    follows: bool,
) -> tuple[bool, list[PublicClaim], list[str]]:
    """Follow a run to its newest link, or to its end, and replay some windows.

    Args:
      source: Its address.
      root: Where it is followed to.
      replays: PEER:WINDOW, both counted from 0, or DRAWN for all that were drawn and can be.
      say: Gets a line a round.
      follows: Whether to wait for the links that come.

    Returns:
      Whether what was replayed was compared bit for bit; what is known; and why it is not verified.

    Raises:
      LockstepError: A peer's message is not the result of its work.
    """
    requested = [ReplayRequest.parse(text) for text in replays if text != DRAWN]
    setup, transcript, place = joining.follow(source, root, Onlooker(follows, say))
    audits, replayed, wrong = shown(setup, transcript, place), [], []
    with closing(setup.programs.steps):
        for w in dict.fromkeys(requested):
            replayed.append(replay(setup, transcript, place.store, w))
        for audit in audits if DRAWN in replays else ():
            w = ReplayRequest(audit.drawn.peer, audit.drawn.number)
            if w in requested or audit.state not in ("known", "shown"):
                continue
            try:
                replayed.append(replay(setup, transcript, place.store, w))
            except StateError as error:
                wrong.append((audit, str(error)))
    for w in replayed:
        if w.findings:
            raise LockstepError("; ".join(_accusation(w)))
    why_not = [] if replayed else ["no window was repeated: --replay PEER:WINDOW"]
    why_not += [w.why for w in replayed if w.why]
    wrong += [(w, "not shown in time") for w in audits if w.state == "missing"]
    why_not += [
        f"peer {w.drawn.peer}, window {w.drawn.number}: {text}: `lockstep volunteer admit "
        f"{source} {w.drawn.peer} --because {w.name}` ends its slot"
        for w, text in wrong
    ]
    bitwise = not any(w.why for w in replayed)
    claims = [*_claims(setup, transcript, place.document.lab, replayed), _drawn_claim(audits)]
    return bitwise, claims, why_not


def _drawn_claim(audits: Sequence[AuditState]) -> PublicClaim:
    states = Counter(audit.state for audit in audits)
    counts = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    text = (
        f"{len(audits)} windows are drawn for audits, and what their peers owned is: {counts}; "
        "what is shown was put, and is looked at by --replay"
    )
    values = {"drawn": [[audit.drawn.peer, audit.drawn.number, audit.state] for audit in audits]}
    return PublicClaim("audits", "proven", text if audits else "no window is drawn yet", values)


def _accusation(replayed: RepeatedWindow) -> list[str]:
    """Say what a replay found, and what in the store shows it."""
    texts = []
    for finding in replayed.findings:
        text = f"round {finding.round}, {finding.kind}: {finding.detail}"
        if finding.peer is not None:
            name = slots.of_peer(finding.round, finding.peer, "record")
            text = f"peer {finding.peer}, {text}; it signed {name}"
        texts.append(text)
    return texts


def _claims(
    setup: Setup, transcript: Transcript, lab: str, replayed: Sequence[RepeatedWindow]
) -> list[PublicClaim]:
    entries, run = transcript.rounds, setup.run
    count, total = len(entries), run.config.total_steps - setup.start.step
    merged = sum(len(entry.decision.applied) for entry in entries)
    ejected = {p: why for entry in entries for p, why in entry.decision.ejected.items()}
    out = "".join(f"; peer {peer} was ejected ({why})" for peer, why in sorted(ejected.items()))
    over = [
        w for w in run.snapshots(setup.start.step).windows if w.last <= setup.start.step + count
    ]
    total_windows = len(over) * run.peers.count
    values = {"rounds": count, "of": total, "messages": merged, "ejected": sorted(ejected)}
    if entries and transcript.snapshots[-1] == entries[-1].round.step:
        values["params"] = transcript.hashes(transcript.snapshots[-1]).params
    claims = [
        PublicClaim("start", "proven", "the state before the first round, made again here"),
        PublicClaim(
            "links",
            "proven",
            f"{count} of {total} rounds: each link and its signature, each decision, each merge of "
            f"{merged} signed messages, and the params after it{out}",
            values,
        ),
    ]
    if replayed:
        texts = [
            f"window {rerun.request.number} of peer {rerun.request.peer} (rounds "
            f"{rerun.window.first}-{rerun.window.last}, {rerun.messages} messages) "
            f"{'repeats bit for bit' if rerun.why is None else 'repeats within a tolerance'}"
            for rerun in replayed
        ]
        repeated = [[rerun.request.peer, rerun.request.number] for rerun in replayed]
        values = {"repeated": repeated, "total": total_windows}
        claims.append(PublicClaim("windows", "sampled", "; ".join(texts), values))
    if left := total_windows - len(replayed):
        text = f"the work in {left} of {total_windows} windows"
        claims.append(PublicClaim("other_windows", "stated", text, {"count": left}))
    stated = "losses and machines by those who signed them, times by the store"
    claims.append(PublicClaim("losses", "stated", stated))
    text = (
        f"that {lab} is the lab's key, that the store shows all the same, and that keys are of "
        "different people"
    )
    claims.append(PublicClaim("keys", "stated", text, {"lab": lab}))
    return claims
