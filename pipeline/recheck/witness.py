"""Stage witness again: the drawn windows are replayed, and the verdict follows from what is found.

Bits are compared, unless the reader's own machine shows that this cannot be. An accepted verdict
accuses peers alone, of lies that got nowhere: any other refuses the run.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax

from lockstep.errors import LockstepError, brief
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.tables.explain import validate_json
from lockstep.transcript.entry import Header
from lockstep.transcript.trees import tree_hash
from lockstep.transcript.windows import Window
from pipeline.audit import bundle, rounding, sample
from pipeline.audit.audit import audit_ends
from pipeline.audit.replay import Replay
from pipeline.audit.tolerance import how, why_not_bitwise
from pipeline.audit.verdict import SHOWN_BY, Finding, Verdict, judge, merged
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.convert import can_make_start, make_start, start_claim
from pipeline.recheck.outputs import HEADER, VERDICT
from pipeline.recheck.published import PublishedRun, joined, refuse
from pipeline.recheck.train import chain_claim
from pipeline.stage import devices
from pipeline.start.begin import Setup

OF_REPLAYS = tuple(kind for kind, by in SHOWN_BY.items() if by == "replay")
CHECKED = re.compile(r"recomputed the step of peer (\d+) as ")  # how a finding on a check begins
MOST_NAMED = 5  # findings in a line
LONGEST = 200  # characters of a reason that a stranger gave


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Replay the chosen windows, and compare the verdict with what is found."""
    verdict = _read_verdict(published)
    why = published.why = why_not(published)
    replay, findings = _replay(published)
    accusations = check_findings(published, verdict, findings)
    claims = [_sampled(published, replay), *_accused(accusations)]
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
    first = _first_connected(published)
    is_whole = first.opening == published.transcript.snapshots[0]
    if is_whole and why is None and can_make_start(published):
        published.start = make_start(published)
        chain = chain_claim(published, "replays of all windows")
        return [*claims, chain, start_claim(published.start)]
    last = published.transcript.snapshots[-1]
    values = {"round": last, "chain": False}
    text = f"the params before round {first.first}, since messages as large as these are not kept"
    return [
        *claims,
        PublicClaim("weights", "proven", f"the weights are the params after round {last}", values),
        PublicClaim("start", "stated", text),
    ]


def _first_connected(published: PublishedRun) -> Window:
    """Return the first of the repeated windows that lead without a gap to the last of them."""
    first, *earlier = sorted((window for window, _ in published.chosen), reverse=True)
    for window in earlier:
        if window.last == first.opening:
            first = window
    return first


# ---- Whether bits can be compared ----


def why_not(published: PublishedRun) -> str | None:
    """Return why bits cannot be compared here, or None.

    The header says which machine trained the run, and whether it repeated a step bit for bit. If
    the reader's machine is alike, it shows whether that can be so.
    """
    setup, header = published.setup, published.transcript.header
    _check_environment(setup, header)
    why = why_not_bitwise(setup, header, published.transcript.rounds)
    alike = devices.difference(setup.environment(), header.environment) is None
    if why and not header.bitwise and alike and _repeats(published):
        raise LockstepError(
            f"{HEADER}: bitwise is false, expected true: this machine is like the "
            "one that the header names, and repeats a step bit for bit"
        )
    return why


def _check_environment(setup: Setup, header: Header) -> None:
    """Check that stage train could have recorded this environment with this run file.

    An author who names another machine is compared by tolerance; no machine changes what the run
    file says.
    """
    if setup.run.peers.bits == "everywhere":
        return
    environment, threads = header.environment, str(setup.run.peers.threads)
    flags = environment.get("xla_flags", "")
    if environment.get("threads") != threads:
        raise LockstepError(
            f"{HEADER}: environment.threads is {brief(repr(environment.get('threads')))}, expected "
            f"{threads!r}, which stage train takes from [peers] threads"
        )
    if not flags.startswith(devices.FLAGS):
        raise LockstepError(
            f"{HEADER}: environment.xla_flags is {brief(repr(flags))}, expected to begin with "
            f"{devices.FLAGS}, as stage train sets them"
        )


def _repeats(published: PublishedRun) -> bool:
    """Return whether a step of the first chosen window has the same bits twice here."""
    setup, transcript = published.setup, published.transcript
    window, peers = published.chosen[0]
    plan, peer = next(
        (entry.round, peer)
        for entry in transcript.window(window)
        for peer in peers
        if peer in entry.round.assignment
    )
    like, programs = setup.start.state, setup.programs
    group = device_groups(jax.devices(), programs.parts)[0]
    replica = Replica.put(programs, group, *transcript.agreed(window.opening, like))
    own = transcript.own(window.opening, peer, like.own[peer])
    work = setup.work(plan.assignment[peer], plan.trainers)

    def once() -> str:  # `own` is donated, so each time a copy
        return tree_hash(jax.device_get(replica.step(group.put(own), work, plan.step)))

    return once() == once()


# ---- The windows ----


def _replay(published: PublishedRun) -> tuple[Replay, list[Finding]]:
    """Replay the chosen windows; return what they were replayed with, and what was found."""
    setup, transcript, why = published.setup, published.transcript, published.why
    windows = joined(published.chosen)
    varied = why and rounding.measure(setup, transcript, windows)
    replay = Replay(setup, transcript, why, windows, varied)
    findings: list[Finding] = []
    for window, peers in windows:
        refuse(audit_ends(setup, transcript, window, peers))
        if replay.how.tells:
            findings += replay.window(window, peers, lambda: None)
    return replay, findings


def _sampled(published: PublishedRun, replay: Replay) -> PublicClaim:
    """Return the claim about the sample."""
    draw, limits, count = published.draw, replay.how, len(published.chosen)
    repeated = [(*window, peer) for window, peers in published.chosen for peer in peers]
    messages = [
        sum(peer in entry.evidence.messages for entry in published.transcript.window(window))
        for window, peers in published.chosen
        for peer in peers
    ]
    several = len(repeated) > 1
    named = ", ".join(
        f"{first}-{last} of peer {peer} with {sent} message{'' if sent == 1 else 's'}"
        for (first, last, peer), sent in zip(repeated, messages, strict=True)
    )
    text = f"window{'s' if several else ''} {named} ({count} of {draw.total}, {draw.text(count)}) "
    text += _compared(replay, several)
    values = {
        "repeated": repeated,
        "messages": messages,
        "published": draw.published,
        "total": draw.total,
        "drawn": count - draw.fixed,
        "drawn_by": draw.seed_of,
        "bitwise": replay.bitwise,
        "why_not_bitwise": replay.why,
        "tolerance": limits.limit if limits.tells else None,
        "params_tolerance": limits.params_limit if limits.tells else None,
    }
    return PublicClaim("windows", "sampled" if limits.tells else "stated", text, values)


def _compared(replay: Replay, several: bool) -> str:
    """Return how the sample was compared with what was sent."""
    limits = replay.how
    if replay.why is None:
        return f"repeat{'' if several else 's'} bit for bit"
    reason = f"because the publisher says: {brief(replay.why, LONGEST)}"
    if not limits.tells:
        return f"not compared with any message, {reason}"
    caveat = "what peers own is not compared"
    if limits.own_limits is not None:
        caveat = "what peers own is compared only where the next window is published too"
    if limits.params_limit is not None:
        caveat += "; the params after a window, and what peers share then, may be off by "
        caveat += f"{limits.params_limit:.3g} of what it changed, and only drawn pieces of "
        caveat += "messages are compared"
    return (
        f"compared by tolerance (distance of a message at most {limits.limit:.3g}, within "
        f"which it may be anything; {caveat}), {reason}"
    )


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
    kept, why = programs.form.kept, verdict.why_not_bitwise
    exact = not why or (kept and not programs.unruled)
    compared = how(run, why, exact, verdict.repeats, verdict.varied)
    windows = published.windows
    replayed = sample.draw(run, transcript, windows, sample.seed_of(run, transcript), kept)
    if not published.setup.settings.reports.show_own:  # so its author lacked it at later windows
        claimed = {(window.first, window.peer) for window in verdict.replayed_windows}
        replayed = [(w, p) for w, p in replayed if w == windows[0] or (w.first, p) in claimed]
    expected = judge(run, transcript, verdict.findings, compared, windows, replayed)
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

    The latter are of replays that were not repeated, or within a tolerance, and of records that
    nothing else shows. `windows` is how many windows the author says were replayed.
    """

    shown: list[Finding]
    stated: list[Finding]
    windows: int


def check_findings(
    published: PublishedRun, verdict: Verdict, findings: Sequence[Finding]
) -> Accusations:
    """Compare a verdict's findings with `findings`, of the repeated windows, both ways."""
    of_replays = [f for f in verdict.findings if f.kind in OF_REPLAYS]
    others = [f for f in verdict.findings if f.kind not in OF_REPLAYS]
    _compare_rounds(published, others, of_replays)
    stated = [f for f in of_replays if not _is_shown(published, verdict, f, findings)]
    stated += [f for f in others if SHOWN_BY[f.kind] == "record"]
    _refuse_unknown(published, verdict, findings)
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
    """Return whom a finding accuses, and of what."""
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
    published: PublishedRun, verdict: Verdict, claim: Finding, findings: Sequence[Finding]
) -> bool:
    """Return whether a replay's finding was found again; False if it could not be."""
    window, peer = _window(published, claim.round), _replayed_peer(claim)
    replayed = {(w.first, w.peer) for w in verdict.replayed_windows}
    if (
        window is None
        or peer is None
        or ((window.first, peer) not in replayed and peer in published.transcript.senders(window))
    ):
        raise _differs("has", claim, "no such one, since no window was replayed that could show it")
    repeated = {(window.first, peer) for window, peers in published.chosen for peer in peers}
    if published.why is not None or (window.first, peer) not in repeated:
        return False
    candidates = [_with_bundle(published, f) for f in findings if f.kind in OF_REPLAYS]
    if verdict.method == "bitwise":
        confirmed = claim in candidates
    else:  # another distance, or another round, where it is first beyond a limit
        confirmed = any(f.peer == claim.peer and f.round in window.rounds for f in candidates)
    if not confirmed:
        span = f"window {window.first}-{window.last} of peer {peer}"
        raise _differs("has", claim, f"no such one, since {span} does not show it")
    return True


def _refuse_unknown(published: PublishedRun, verdict: Verdict, findings: Iterable[Finding]) -> None:
    """Refuse a lie that got into the params, or that the verdict lacks and should have.

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
