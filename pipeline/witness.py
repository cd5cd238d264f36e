"""Stage witness: audits the whole transcript, replays a sample of it -> data/verdict.

A verdict is data: whatever is found, the stage ends well, and `export` is what refuses. Windows are
replayed side by side, and each one that is done is kept in data/runs/<key>, so that a killed audit
goes on where it was.
"""

import logging
import random
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from pipeline import runfile
from pipeline.audit import bundle, verdict_text
from pipeline.audit.audit import audit
from pipeline.audit.replay import TOLERANCE, Replay, why_not_bitwise
from pipeline.audit.verdict import Finding, Replayed, Verdict, accepts, merged
from pipeline.programs.placement import DeviceGroup, side_by_side
from pipeline.stage import artifacts, devices
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.progress import Progress
from pipeline.swarm import begin
from pipeline.transcript.transcript import Transcript
from pipeline.wire import message as wire

log = logging.getLogger(__name__)


def run(run: runfile.Run, paths: Paths) -> None:
    """Writes data/verdict: verdict.json, verdict.txt, bundles, and metrics/witness.json."""
    init, shards, trained = paths.need("convert"), paths.need("download"), paths.need("train")
    devices.keep_compiled(paths.store / "compiled")
    setup, transcript = begin.read(run, init, shards), Transcript(trained / "transcript")

    # Everything cheap, of every round
    findings = audit(run, setup.hf_config, transcript, setup.form, setup.start)

    # A sample of windows, unless the transcript contradicts itself: nothing can be built on that
    sound = not any(finding.peer is None or finding.applied for finding in findings)
    why = why_not_bitwise(run, transcript.header)
    replay = Replay(
        run,
        setup.programs,
        transcript,
        setup.data,
        setup.form,
        setup.start.state,
        bitwise=not why,
    )
    windows = run.snapshots(setup.start.step).windows
    seed = _sample_seed(run, transcript)
    sample = _sample(run, windows, seed, setup.form) if sound else []
    if sound:
        work = [(w, [peer for window, peer in sample if window == w]) for w in windows]
        findings += _replay(replay, work, paths.scratch)
    findings = merged(findings)

    with paths.building() as folder:
        for peer, window in _to_repeat(findings, windows):
            name = bundle.name(window, peer)
            bundle.write(folder / name, replay, window, peer, findings)
            findings = [_with_bundle(f, name, window, peer) for f in findings]
        verdict = _verdict(run, transcript, findings, why, windows, sample, seed)
        artifacts.write_text(folder / "verdict.json", verdict.model_dump_json(indent=2) + "\n")
        artifacts.write_text(folder / "verdict.txt", verdict_text.render(verdict.model_dump()))
        metrics = {
            "accepted": verdict.accepted,
            "method": verdict.method,
            "findings": len(findings),
            "ejected": len(verdict.ejected),
            "audited_rounds": verdict.audited_rounds,
            "replayed_windows": len(sample),
            "windows": verdict.windows,
        }
        artifacts.write_json(folder / METRICS / "witness.json", metrics)
    shutil.rmtree(paths.scratch, ignore_errors=True)
    for line in verdict_text.render(verdict.model_dump()).splitlines():
        log.info(f"witness: {line}")


def _replay(
    replay: Replay, work: list[tuple[runfile.Window, list[int]]], scratch: Path
) -> list[Finding]:
    """Replays windows side by side, one on each device group; reads what an earlier try did."""
    total = sum(len(window.rounds) for window, _ in work)
    with Progress("witness", total=total, unit="round") as bar:

        def one(item: tuple[runfile.Window, list[int]], group: DeviceGroup) -> list[Finding]:
            window, peers = item
            kept = scratch / "windows" / f"{window.first:05}.json"
            if kept.exists():
                bar.advance(len(window.rounds))
                return [Finding(**finding) for finding in artifacts.read_json(kept)["findings"]]
            found = replay.window(window, peers, bar.advance, group)
            kept.parent.mkdir(parents=True, exist_ok=True)
            artifacts.write_json(kept, {"findings": [asdict(finding) for finding in found]})
            return found

        done = side_by_side(replay.groups, work, one)
    return [finding for found in done for finding in found]


def _sample_seed(run: runfile.Run, transcript: Transcript) -> str:
    """The auditor's own seed, or the hash of the rounds.

    The default needs no secret and stops no author of a whole transcript from trying until the
    sample suits: who does not trust that author supplies a seed.
    """
    return run.witness.seed if run.witness.seed is not None else transcript.hash


def _sample(
    run: runfile.Run, windows: list[runfile.Window], seed: str, form: wire.Form
) -> list[tuple[runfile.Window, int]]:
    """Which windows are replayed, of which peers: `[witness] replay_percent`, rounded up, and those
    that `[witness] replay` names.

    Dense messages are not kept, so a window is replayed for all its peers or for none.
    """
    peers = range(run.peers.count)
    groups = [[(window, peer)] for window in windows for peer in peers]
    named = {pair for pair in run.witness.chosen if pair[0] < len(windows)}
    chosen = [(windows[number], peer) for number, peer in named]
    if form.kind == wire.DENSE:
        groups = [[(window, peer) for peer in peers] for window in windows]
        chosen = [(window, peer) for window, _ in chosen for peer in peers]
    count = -int(-len(groups) * run.witness.replay_percent // 100)
    drawn = random.Random(seed).sample(groups, count)
    return sorted({pair for group in drawn for pair in group} | set(chosen))


def _to_repeat(
    findings: Iterable[Finding], windows: list[runfile.Window]
) -> list[tuple[int, runfile.Window]]:
    """The windows of peers in which something was found that a replay shows."""
    found = set()
    for finding in findings:
        if finding.peer is not None and finding.kind in bundle.KINDS:
            found |= {(finding.peer, w) for w in windows if finding.round in w.rounds}
    return sorted(found)


def _with_bundle(finding: Finding, name: str, window: runfile.Window, peer: int) -> Finding:
    here = finding.round in window.rounds
    if finding.peer == peer and here and finding.kind in bundle.KINDS:
        return replace(finding, bundle=name)
    return finding


def _verdict(
    run: runfile.Run,
    transcript: Transcript,
    findings: list[Finding],
    why: str | None,
    windows: list[runfile.Window],
    sample: list[tuple[runfile.Window, int]],
    seed: str,
) -> Verdict:
    ejected, dropped, late = {}, {}, Counter()
    for entry in transcript.rounds:
        for peer in entry.decision.ejected:
            ejected.setdefault(peer, entry.round.step)
        for peer in entry.decision.dropped:
            dropped.setdefault(peer, entry.round.step)
        late.update(entry.decision.late)
    return Verdict(
        accepted=accepts(run.witness.policy, findings),
        policy=run.witness.policy,
        method="tolerance" if why else "bitwise",
        why_not_bitwise=why,
        tolerance=TOLERANCE[run.peers.precision] if why else None,
        audited_rounds=len(transcript.rounds),
        windows=len(windows) * run.peers.count,
        replayed_windows=tuple(
            Replayed(windows.index(window), window.first, window.last, peer)
            for window, peer in sample
        ),
        sample_seed=seed,
        sample_seed_of="auditor" if run.witness.seed is not None else "transcript",
        transcript=transcript.hash,
        ejected=ejected,
        dropped=dropped,
        late=dict(sorted(late.items())),
        findings=tuple(findings),
    )
