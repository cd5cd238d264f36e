"""Stage witness: audits the whole transcript, replays a sample of its windows -> data/verdict.

A verdict is data: whatever the audit finds, the stage ends well, and `export` is what refuses.
Windows are replayed side by side, and the findings of each are kept in data/runs/<key>, so that a
killed audit goes on where it stopped.
"""

import itertools
import logging
import shutil
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

from lockstep.files import read_json, write_json
from lockstep.machine import allocator
from lockstep.machine.progress import Progress
from lockstep.programs.placement import DeviceGroup, side_by_side
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit import bundle, sample
from pipeline.audit.audit import audit, whose_own_is_here
from pipeline.audit.replay import Replay, WindowOutcome
from pipeline.audit.verdict import Finding, contradictions, judge, merged
from pipeline.stage import devices
from pipeline.stage.artifacts import Paths
from pipeline.start import set_up
from pipeline.start.set_up import Setup

log = logging.getLogger(__name__)


def run(run: runfile.Run, paths: Paths) -> None:
    """Write data/verdict: verdict.json, verdict.txt, bundles, and metrics/witness.json."""
    init, shards, trained = paths.need("convert"), paths.need("download"), paths.need("train")
    devices.keep_compiled(paths.store / "compiled")
    allocator.trim_after_compiling()
    sample.read_beacon(run.witness.beacon)  # before hours of work
    setup = set_up.read(run, init, shards)
    paths.match_scratch()
    with closing(setup.programs.steps.by):
        _audit(setup, Transcript(trained / "transcript"), paths)


def _audit(setup: Setup, transcript: Transcript, paths: Paths) -> None:
    run = setup.run
    setup.subject.check_model(run, transcript.header.model, transcript.folder / "header.json")
    windows = run.snapshots(setup.start.step).windows
    since = _messages_since(setup, transcript)
    merged_here = [window for window in windows if window.opening >= since]
    peers_of = {w: _whose_window_repeats(setup, transcript, w) for w in merged_here}
    replay = Replay(setup, transcript)

    # Everything cheap, of every round
    findings = audit(setup, transcript, since)

    # A sample of windows, unless the transcript contradicts itself: nothing can be built on that
    replayed, why = list[tuple[Window, int]](), None
    if sound := not contradictions(findings):
        drawn = sample.draw(run, transcript, windows, sample.seed_of(run, transcript), replay.kept)
        complete = {w for w in peers_of if len(peers_of[w]) == run.peers.count}
        drawn = [
            (w, p) for w, p in drawn if w in complete or (replay.kept and p in peers_of.get(w, ()))
        ]
        work = [(w, [peer for window, peer in drawn if window == w]) for w in peers_of]
        work = [(w, _with_idle(replay, w, peers, peers_of[w])) for w, peers in work]
        outcomes = _replay(replay, work, paths.scratch)
        findings += [finding for outcome in outcomes.values() for finding in outcome.findings]
        replayed = [(w, p) for w, p in drawn if p in outcomes[w].peers]
        why = next((outcomes[w].why for w, _ in drawn if outcomes[w].why), None)
    findings = merged(findings)

    with paths.building() as folder:
        for window, peer in itertools.product(windows if sound else (), range(run.peers.count)):
            if repeated := bundle.repeatable(findings, window, peer):
                name = bundle.name(window, peer)
                bundle.write(folder / name, replay, window, peer, repeated)
                findings = [replace(f, bundle=name) if f in repeated else f for f in findings]
        verdict = judge(run, transcript, findings, why, windows, replayed, kept=replay.kept)
        text = verdict.write(folder)
    shutil.rmtree(paths.scratch, ignore_errors=True)
    for line in text.splitlines():
        log.info(f"witness: {line}")


def _messages_since(setup: Setup, transcript: Transcript) -> int:
    """Return the round since which a witness has all: the run's start, or the first state's.

    Only a run that may begin after rounds that others trained lacks what was before: messages or,
    where these are not kept, snapshots.
    """
    start = setup.start.step
    if not setup.run.runtime.begins_late:
        return start
    first = min((step for step in transcript.snapshots if step > start), default=start)
    if setup.programs.form.kept:
        before = (e.evidence.messages for e in transcript.rounds if e.round.step <= first)
        lacks = any(message.payload is None for messages in before for message in messages.values())
    else:
        lacks = any(start < step < first for step in setup.run.snapshots(start).steps)
    if not lacks:
        return start
    log.warning(f"witness: rounds up to {first} are the word of who signed the state after it")
    return first


def _whose_window_repeats(setup: Setup, transcript: Transcript, window: Window) -> list[int]:
    """Return the peers whose window the witness can replay.

    Their own state before it is here, or they sent something in it and began anew.
    """
    owners = whose_own_is_here(setup, transcript, window.opening)
    sent = transcript.senders(window).difference(owners)
    anew = [peer for peer in sent if transcript.begins_anew(window, peer)]
    return sorted([*owners, *anew])


def _with_idle(replay: Replay, window: Window, drawn: list[int], possible: list[int]) -> list[int]:
    """Return the drawn peers, and those without a message: they cost no step, and count as none."""
    senders = replay.transcript.senders(window)
    if senders and not replay.kept:
        return drawn
    return sorted({*drawn, *possible} - (senders - {*drawn}))


def _replay(
    replay: Replay, work: list[tuple[Window, list[int]]], scratch: Path
) -> dict[Window, WindowOutcome]:
    """Replay windows for the witness side by side, one per device group; read earlier results."""
    total = sum(len(window.rounds) for window, _ in work)
    with Progress("witness", total=total, unit="round") as bar:

        def replay_one(item: tuple[Window, list[int]], group: DeviceGroup) -> WindowOutcome:
            window, peers = item
            path = scratch / "windows" / f"{window.first:05}.json"
            if path.exists():
                bar.advance(len(window.rounds))
                found = read_json(path)
                findings = [Finding(**finding) for finding in found["findings"]]
                return WindowOutcome(findings, tuple(found["peers"]), found["why"])
            outcome = replay.window(window, peers, bar.advance, group)
            path.parent.mkdir(parents=True, exist_ok=True)
            findings = [asdict(finding) for finding in outcome.findings]
            write_json(path, {**outcome._asdict(), "findings": findings})
            return outcome

        done = side_by_side(replay.groups, work, replay_one)
    return {window: outcome for (window, _), outcome in zip(work, done, strict=True)}
