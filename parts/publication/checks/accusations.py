"""Checks that a verdict accuses exactly the peers that the rounds and repeats show to lie.

An accepted verdict accuses peers alone, of lies that got nowhere: any other refuses the run.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lockstep.errors import LockstepError, brief
from lockstep.transcript.windows import Window
from parts.publication.checks.repeat import Audited, refuse
from parts.publication.layout import VERDICT
from pipeline.audit import bundle
from pipeline.audit.verdict import Finding, Verdict, merged

OF_REPLAYS = ("message", "state", "check")  # kinds of findings that only a replay shows
CHECKED = re.compile(r"recomputed the step of peer (\d+) as ")  # how a finding on a check begins


class Accusations(NamedTuple):
    """A verdict's findings: those that were found again here, and those that are its author's word.

    The latter are of replays that were not repeated, or within a tolerance. `windows` is how many
    windows the author says were replayed.
    """

    shown: list[Finding]
    stated: list[Finding]
    windows: int


def check(
    audited: Audited, verdict: Verdict, found: Sequence[Finding], *, bitwise: bool
) -> Accusations:
    """Compare a verdict's findings with what was `found` in the repeated windows, both ways.

    Raises:
      LockstepError: The verdict has a finding that is not there, or lacks one; or a lie was found
        that got into the params.
    """
    shown, of_replays = [], []
    for finding in verdict.findings:
        (of_replays if finding.kind in OF_REPLAYS else shown).append(finding)
    _compare_rounds(audited, shown, of_replays)
    stated = [f for f in of_replays if not _is_shown(audited, verdict, f, found, bitwise=bitwise)]
    _refuse_unknown(audited, verdict, found)
    confirmed = [finding for finding in verdict.findings if finding not in stated]
    return Accusations(confirmed, stated, len(verdict.replayed_windows))


def text(finding: Finding) -> str:
    """Return whom a finding accuses, of what."""
    return f"peer {finding.peer} in round {finding.round} ({brief(finding.kind)})"


def _compare_rounds(audited: Audited, said: list[Finding], of_replays: list[Finding]) -> None:
    """Compare the findings that need no replay with those of the reader's own audit."""
    every = merged([*audited.findings, *of_replays])
    due = [_with_bundle(audited, f) for f in every if f.kind not in OF_REPLAYS]
    for finding in (Counter(said) - Counter(due)).elements():
        raise LockstepError(
            f"{VERDICT}: findings has {text(finding)}, {brief(finding.detail)}; expected no such "
            "finding, since the rounds do not show it"
        )
    for finding in (Counter(due) - Counter(said)).elements():
        raise LockstepError(
            f"{VERDICT}: findings lacks {text(finding)}, {brief(finding.detail)}; expected it, "
            "since the rounds show it"
        )


def _is_shown(
    audited: Audited, verdict: Verdict, said: Finding, found: Sequence[Finding], *, bitwise: bool
) -> bool:
    """Return whether a replay's finding was found again; False if it could not be."""
    window, peer = _window(audited, said.round), _replayed_peer(said)
    replayed = {(one.first, one.peer) for one in verdict.replayed_windows}
    if window is None or (window.first, peer) not in replayed:
        raise LockstepError(
            f"{VERDICT}: findings has {text(said)}, {brief(said.detail)}; expected no such one, "
            "since no window was replayed that could show it"
        )
    repeated = {(one.window.first, peer) for one in audited.chosen for peer in one.peers}
    if not bitwise or (window.first, peer) not in repeated:
        return False
    alike = [_with_bundle(audited, f) for f in found if f.kind in OF_REPLAYS]
    if verdict.method == "bitwise":
        known = said in alike
    else:  # another distance, or another round, where it is first beyond a limit
        known = any(f.peer == said.peer and f.round in window.rounds for f in alike)
    if not known:
        raise LockstepError(
            f"{VERDICT}: findings has {text(said)}, {brief(said.detail)}; expected no such one, "
            f"since window {window.first}-{window.last} of peer {peer} does not show it"
        )
    return True


def _refuse_unknown(audited: Audited, verdict: Verdict, found: Iterable[Finding]) -> None:
    """Refuse a lie that got into the params, or that the verdict should have and has not.

    Of a peer a replay has the first finding in a window. Which that is depends on whose steps are
    repeated besides: a peer's own false message, or its false check of another's step.
    """

    def is_known(finding: Finding) -> bool:
        window = _window(audited, finding.round)
        return any(
            said.peer == finding.peer
            and (said.round == finding.round or said.kind in OF_REPLAYS)
            and window is not None
            and said.round in window.rounds
            for said in verdict.findings
        )

    refuse(f for f in found if f.applied or not is_known(f))


def _with_bundle(audited: Audited, finding: Finding) -> Finding:
    """The finding as a verdict has it: with the bundle that repeats it, if one can."""
    window = _window(audited, finding.round)
    if window is None or finding.peer is None or finding.kind not in bundle.KINDS:
        return replace(finding, bundle=None)
    return replace(finding, bundle=bundle.name(window, finding.peer))


def _replayed_peer(finding: Finding) -> int | None:
    """The peer whose replay shows a finding: the accused or, of a false check, whom it checked."""
    if finding.kind != "check":
        return finding.peer
    checked = CHECKED.match(finding.detail)
    return int(checked[1]) if checked else None


def _window(audited: Audited, step: int) -> Window | None:
    return next((window for window in audited.windows if step in window.rounds), None)
