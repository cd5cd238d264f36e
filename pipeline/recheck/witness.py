"""Stage witness again: the drawn windows are replayed, and the verdict follows from what is found.

A window is compared bit for bit, or not at all: on another kind of machine than the author's it may
show nothing. An accepted verdict accuses peers alone, of lies that got nowhere: any other refuses
the run.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lockstep.errors import LockstepError, brief
from lockstep.tables.validation import validate_json
from lockstep.transcript.windows import Window
from pipeline.audit import bundle, sample
from pipeline.audit.audit import audit_ends
from pipeline.audit.replay import Replay, WindowOutcome
from pipeline.audit.verdict import SHOWN_BY, Finding, Verdict, judge, merged
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.convert import can_make_start, make_start, start_claim
from pipeline.recheck.outputs import VERDICT
from pipeline.recheck.published import PublishedRun, peers_by_window, refuse
from pipeline.recheck.train import chain_claim

OF_REPLAYS = tuple(kind for kind, by in SHOWN_BY.items() if by == "replay")
CHECKED = re.compile(r"recomputed the step of peer (\d+) as ")  # how a finding on a check begins
MOST_NAMED = 5  # findings in a line
LONGEST_REASON = 200  # characters of a reason that a stranger gave


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Replay the chosen windows, and compare the verdict with what is found."""
    verdict = _read_verdict(published)
    outcomes = _replay(published)
    published.why = next((outcome.why for outcome in outcomes.values() if outcome.why), None)
    published.repeated = [(w, p) for w, p in published.chosen if {*p} <= {*outcomes[w].peers}]
    accusations = check_findings(published, verdict, outcomes)
    claims = [*_repeated(published, outcomes), *_accused(accusations)]
    if left := published.draw.total - len(published.chosen):
        which = "windows" if published.kept else "windows of all peers"
        text = f"the work in {left} of {published.draw.total} {which}"
        values = {"count": left, "rounds": published.stated_rounds}
        claims.append(PublicClaim("other_windows", "stated", text, values))
    if published.draw.beacon is not None:
        text = "that the beacon was named before the run, that the transcript was public before "
        claims.append(PublicClaim("beacon", "stated", text + "the beacon"))
    if published.kept:
        return claims
    last = published.transcript.snapshots[-1]
    first = _first_connected(published, last)
    if first == published.transcript.snapshots[0] and can_make_start(published):
        published.start = make_start(published)
        chain = chain_claim(published, "replays of all windows")
        return [*claims, chain, start_claim(published.start)]
    values = {"round": last, "chain": False}
    text = f"the params before round {first + 1}, since messages as large as these are not kept"
    return [
        *claims,
        PublicClaim("weights", "proven", f"the weights are the params after round {last}", values),
        PublicClaim("start", "stated", text),
    ]


def _first_connected(published: PublishedRun, last: int) -> int:
    """Return the round from whose params the reader's windows lead without a gap to the last."""
    first = last
    for window in sorted((window for window, _ in published.repeated), reverse=True):
        if window.last == first:
            first = window.opening
    return first


# ---- The windows ----


def _replay(published: PublishedRun) -> dict[Window, WindowOutcome]:
    """Replay the windows that a reader chose."""
    setup, transcript, outcomes = published.setup, published.transcript, {}
    replay = Replay(setup, transcript)
    for window, peers in peers_by_window(published.chosen):
        refuse(audit_ends(setup, transcript, window, peers))
        outcomes[window] = replay.window(window, peers, lambda: None)
    return outcomes


def _repeated(
    published: PublishedRun, outcomes: Mapping[Window, WindowOutcome]
) -> Iterator[PublicClaim]:
    """Yield the claims on the chosen windows: those that repeat here, and the others."""
    draw, count = published.draw, len(published.chosen)

    def drawn(some: int) -> str:
        if some == count:
            return f"({count} of {draw.total}, {draw.text(count)})"
        which = f"{count} of {draw.total} were chosen, {draw.text(count)}"
        return f"({some} of the {count} chosen; {which})"

    done = len(published.repeated)
    here, elsewhere = list[tuple[Window, int]](), list[tuple[Window, int]]()
    for window, peers in published.chosen:
        for peer in peers:
            (here if peer in outcomes[window].peers else elsewhere).append((window, peer))
    if here:
        sent = [_messages(published, window, peer) for window, peer in here]
        s = "" if len(here) > 1 else "s"
        text = f"{_named(here, sent)} {drawn(done)} repeat{s} bit for bit"
        values = {
            "repeated": [(*window, peer) for window, peer in here],
            "messages": sent,
            "published": draw.published,
            "total": draw.total,
            "drawn": count - draw.fixed,
            "drawn_by": draw.seed_of,
        }
        yield PublicClaim("windows", "sampled", text, values)
    if elsewhere:
        sent = [_messages(published, window, peer) for window, peer in elsewhere]
        text = f"{_named(elsewhere, sent)} {drawn(count - done)}, not comparable here: "
        text += brief(str(published.why), LONGEST_REASON)
        values = {"windows": [(*window, peer) for window, peer in elsewhere], "why": published.why}
        yield PublicClaim("not_comparable", "stated", text, values)


def _messages(published: PublishedRun, window: Window, peer: int) -> int:
    return sum(peer in entry.evidence.messages for entry in published.transcript.window(window))


def _named(windows: Sequence[tuple[Window, int]], sent: Sequence[int]) -> str:
    names = ", ".join(
        f"{first}-{last} of peer {peer} with {count} message{'' if count == 1 else 's'}"
        for ((first, last), peer), count in zip(windows, sent, strict=True)
    )
    return f"window{'s' if len(windows) > 1 else ''} {names}"


# ---- The verdict ----


def _read_verdict(published: PublishedRun) -> Verdict:
    """Return the published verdict, which follows from its own findings and the transcript.

    Raises:
      LockstepError: It is no verdict, refuses the run, or does not follow from them.
    """
    verdict = validate_json(Verdict, (published.folder / VERDICT).read_bytes(), VERDICT)
    if not verdict.accepted:
        raise LockstepError(f"{VERDICT}: accepted is false, expected an accepted run")
    run, transcript, programs = published.run, published.transcript, published.setup.programs
    kept, windows = programs.form.kept, published.windows
    replayed = sample.draw(run, transcript, windows, sample.seed_of(run, transcript), kept)
    if not published.setup.settings.reports.show_own:  # so its author lacked it at later windows
        claimed = {(window.first, window.peer) for window in verdict.replayed_windows}
        replayed = [(w, p) for w, p in replayed if w == windows[0] or (w.first, p) in claimed]
    expected = judge(run, transcript, verdict.findings, None, windows, replayed, kept=kept)
    for name in Verdict.model_fields:
        found, due = getattr(verdict, name), getattr(expected, name)
        if found != due:
            raise LockstepError(
                f"{VERDICT}: {name} is {brief(str(found))}, expected {brief(str(due))}, "
                "which follows from its findings, the run file and the transcript"
            )
    return verdict


class Accusations(NamedTuple):
    """A verdict's findings: those that were found again here, and those that are its author's word.

    The latter are of replays that were not repeated here, and of records that nothing else shows.
    `windows` is how many windows the author says were replayed.
    """

    shown: list[Finding]
    stated: list[Finding]
    windows: int


def check_findings(
    published: PublishedRun, verdict: Verdict, outcomes: Mapping[Window, WindowOutcome]
) -> Accusations:
    """Compare a verdict's findings with those of the repeated windows, both ways."""
    of_replays = [f for f in verdict.findings if f.kind in OF_REPLAYS]
    others = [f for f in verdict.findings if f.kind not in OF_REPLAYS]
    _compare_rounds(published, others, of_replays)
    stated = [f for f in of_replays if not _is_shown(published, verdict, f, outcomes)]
    stated += [f for f in others if SHOWN_BY[f.kind] == "record"]
    _refuse_unknown(published, verdict, [f for o in outcomes.values() for f in o.findings])
    confirmed = [finding for finding in verdict.findings if finding not in stated]
    return Accusations(confirmed, stated, len(verdict.replayed_windows))


def _accused(accusations: Accusations) -> Iterator[PublicClaim]:
    """Return the claims on the peers that the author's verdict accuses: confirmed or not."""
    if shown := accusations.shown:
        text = f"what the author's audit found of {_summary(shown)}, as the rounds record it"
        yield PublicClaim("findings", "proven", text, {"count": len(shown)})
    if stated := accusations.stated:
        text = f"what the author's audit found of {_summary(stated)}"
        yield PublicClaim("accusations", "stated", text, {"count": len(stated)})
    text = f"that the author's audit replayed {accusations.windows} windows"
    yield PublicClaim("verdict", "stated", text)


def _summary(findings: list[Finding]) -> str:
    few = ", ".join(map(_text, findings[:MOST_NAMED]))
    more = len(findings) - MOST_NAMED
    return f"{few} and {more} more" if more > 0 else few


def _text(finding: Finding) -> str:
    """Return whom a published finding accuses, and of what."""
    return f"peer {finding.peer} in round {finding.round} ({brief(finding.kind)})"


def _differs(verb: str, finding: Finding, expected: str) -> LockstepError:
    return LockstepError(
        f"{VERDICT}: findings {verb} {_text(finding)}, {brief(finding.detail)}; expected {expected}"
    )


def _compare_rounds(
    published: PublishedRun, findings: list[Finding], of_replays: list[Finding]
) -> None:
    """Compare the findings that need no replay with those of the reader's own audit."""
    all_findings = merged([*published.findings, *of_replays])
    due = [_with_bundle(published, f) for f in all_findings if f.kind not in OF_REPLAYS]
    if invented := [*(Counter(findings) - Counter(due)).elements()]:
        raise _differs("has", invented[0], "no such finding, since the rounds do not show it")
    if missing := [*(Counter(due) - Counter(findings)).elements()]:
        raise _differs("lacks", missing[0], "it, since the rounds show it")


def _is_shown(
    published: PublishedRun,
    verdict: Verdict,
    claim: Finding,
    outcomes: Mapping[Window, WindowOutcome],
) -> bool:
    """Return whether a witness's finding was found again here; False if it could not be."""
    window, peer = _window(published, claim.round), _replayed_peer(claim)
    replayed = {(w.first, w.peer) for w in verdict.replayed_windows}
    if (
        window is None
        or peer is None
        or ((window.first, peer) not in replayed and peer in published.transcript.senders(window))
    ):
        raise _differs("has", claim, "no such one, since no window was replayed that could show it")
    if window not in outcomes or peer not in outcomes[window].peers:
        return False
    if claim not in [_with_bundle(published, f) for f in outcomes[window].findings]:
        span = f"window {window.first}-{window.last} of peer {peer}"
        raise _differs("has", claim, f"no such one, since {span} does not show it")
    return True


def _refuse_unknown(published: PublishedRun, verdict: Verdict, findings: Iterable[Finding]) -> None:
    """Refuse a lie that got into the params, or that the witness's verdict should have.

    A replay has a peer's first finding in a window. Which one that is depends on whose steps are
    repeated too: a peer's own false message, or its false check of another's step.
    """

    def is_known(finding: Finding) -> bool:
        window = _window(published, finding.round)
        return any(
            other.peer == finding.peer
            and (other.round == finding.round or other.kind in OF_REPLAYS)
            and window is not None
            and other.round in window.rounds
            for other in verdict.findings
        )

    refuse(f for f in findings if f.applied or not is_known(f))


def _with_bundle(published: PublishedRun, finding: Finding) -> Finding:
    """Return the finding as a verdict has it: with the bundle that repeats it, if one can."""
    window = _window(published, finding.round)
    if window is None or finding.peer is None or finding.kind not in bundle.KINDS:
        return replace(finding, bundle=None)
    return replace(finding, bundle=bundle.name(window, finding.peer))


def _replayed_peer(finding: Finding) -> int | None:
    """Return the peer whose replay shows a finding: the accused, or whom it checked falsely."""
    if finding.kind != "check":
        return finding.peer
    checked = CHECKED.match(finding.detail)
    return int(checked[1]) if checked else None


def _window(published: PublishedRun, step: int) -> Window | None:
    return next((window for window in published.windows if step in window.rounds), None)
