"""Stage witness: audits the whole transcript, replays a sample of it -> data/verdict.

A verdict is data: whatever is found, the stage ends well, and `export` is what refuses.
"""

import logging
import random

from pipeline import artifacts, config, devices, earlier, start, tokens
from pipeline.artifacts import METRICS, Paths
from pipeline.progress import Progress
from pipeline.swarm import wire
from pipeline.swarm.audit import audit
from pipeline.swarm.replay import Replay, Window
from pipeline.swarm.transcript import Transcript
from pipeline.train_step import Programs

log = logging.getLogger(__name__)


def run(run: config.Run, paths: Paths) -> None:
    """Writes data/verdict/verdict.json and metrics/witness.json."""
    init, shards, trained = paths.need("convert"), paths.need("download"), paths.need("train")
    devices.keep_compiled(paths.store / "compiled")
    hf_config = artifacts.read_json(init / "hf" / "config.json")
    programs = Programs(run, hf_config, earlier.trained_steps(init))
    begin = start.read(init, run, programs)
    form = wire.form_of(programs.optimizer, begin.state.params, run.peers.wire)
    data = tokens.open_shards(shards, "train", run.llm.max_seq_len)
    transcript = Transcript(trained / "transcript")

    # Everything cheap, of every round
    why_not_bitwise = _why_not_bitwise(run, transcript)
    findings = audit(run, hf_config, transcript, form, begin)

    # A sample of windows, unless the rest is refused already: nothing can be built on that
    windows = [Window(*steps) for steps in transcript.windows()]
    seed = _sample_seed(run, transcript)
    sample = [] if findings else _sample(run, windows, seed, form)
    if not findings:
        replay = Replay(
            run, programs, transcript, data, form, begin.state, bitwise=not why_not_bitwise
        )
        with Progress("witness", total=run.config.total_steps, unit="round") as bar:
            for window in windows:
                peers = [peer for place, peer in sample if place == window]
                findings += replay.window(window, peers, bar.advance)

    verdict = {
        "accepted": not findings,
        "method": "tolerance" if why_not_bitwise else "bitwise",
        "why_not_bitwise": why_not_bitwise,
        "audited_rounds": len(transcript.rounds),
        "windows": len(windows) * run.peers.count,
        "replayed_windows": [
            {"first": window.first + 1, "last": window.last, "peer": peer}
            for window, peer in sample
        ],
        "sample_seed": seed,
        "findings": [finding.to_json() for finding in findings],
    }
    with paths.building() as folder:
        artifacts.write_json(folder / "verdict.json", verdict)
        metrics = {
            "accepted": verdict["accepted"],
            "method": verdict["method"],
            "findings": len(findings),
            "audited_rounds": verdict["audited_rounds"],
            "replayed_windows": len(sample),
            "windows": verdict["windows"],
        }
        artifacts.write_json(folder / METRICS / "witness.json", metrics)
    for finding in findings:
        who = "the transcript" if finding.peer is None else f"peer {finding.peer}"
        log.info(f"witness: round {finding.round}, {who}, {finding.kind}: {finding.detail}")
    log.info(f"witness: {'accepted' if verdict['accepted'] else 'REFUSED'} ({verdict['method']})")


def _why_not_bitwise(run: config.Run, transcript: Transcript) -> str | None:
    """The reason why bits cannot be compared, or None where they can."""
    header = transcript.header
    if run.peers.layout != "each":
        return f"[peers] layout = {run.peers.layout} is another program than a lone peer's"
    if not header.bitwise:
        return "the training machine did not repeat a step bit for bit"
    here = devices.describe()
    for name, there in header.environment.items():
        if here.get(name) != there:
            return f"{name} is {here.get(name)!r} here, was {there!r} in training"
    return None


def _sample_seed(run: config.Run, transcript: Transcript) -> str:
    """The auditor's own seed, or the hash of the rounds.

    The default needs no secret and stops no author of a whole transcript from trying until the
    sample suits: who does not trust that author supplies a seed.
    """
    if run.witness.seed is not None:
        return run.witness.seed
    return artifacts.sha256_file(transcript.folder / "rounds.jsonl")


def _sample(
    run: config.Run, windows: list[Window], seed: str, form: wire.Form
) -> list[tuple[Window, int]]:
    """Which windows are replayed, of which peers: `[witness] replay_percent`, rounded up.

    Dense messages are not kept, so a window is replayed for all its peers or for none.
    """
    peers = range(run.peers.count)
    if form.kind == wire.DENSE:
        groups = [[(window, peer) for peer in peers] for window in windows]
    else:
        groups = [[(window, peer)] for window in windows for peer in peers]
    count = -int(-len(groups) * run.witness.replay_percent // 100)
    chosen = random.Random(seed).sample(groups, count)
    return sorted(pair for group in chosen for pair in group)
