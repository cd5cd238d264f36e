"""A bundle: what anybody needs to repeat one replay that found something.

    bundle.json            what was found, and the SHA-256 of every other file
    run.json               the run file
    tokens.safetensors     the sequences that the replayed peers were assigned, by their index
    transcript/            the part of the transcript that the replay needs, in its own layout: all
                           rounds up to the window's last, the window's payloads and snapshots

`lockstep replay BUNDLE` repeats it (rerun_bundle.py). A finding that the bytes of a message show
needs neither snapshots nor sequences.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lockstep.files import link, sha256_file, write_json, write_text
from lockstep.protocol.dispute import Hash
from lockstep.tables.table import Table
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit import given_rows
from pipeline.audit.given_bundle import RUN
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from pipeline.start.begin import Setup
from pipeline.tokens.shards import Column

KINDS = ("message", "state", "check", "payload", "commitment")
"""Findings that can be repeated: by recomputing a peer's steps, or by decoding what it sent."""
DECODED = ("payload", "commitment")  # the latter
MANIFEST, TOKENS, TRANSCRIPT = "bundle.json", "tokens.safetensors", "transcript"


class BundleManifest(Table):
    """bundle.json."""

    format: Literal[2]
    """Version of the bundle's format."""
    window: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    """First and last round of the window."""
    peer: Annotated[int, Field(ge=0)]
    """Peer that is to blame."""
    bitwise: bool
    """Whether the auditor compared bits."""
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    """Columns of the data's rows."""
    findings: Annotated[tuple[Finding, ...], Field(min_length=1)]
    """What the auditor found."""
    files: dict[str, Hash]
    """SHA-256 of every other file of the bundle, by its name."""


def name(window: runfile.Window, peer: int) -> str:
    """Return the folder of a bundle in data/verdict."""
    return f"bundles/{window.first:05}-{window.last:05}-peer-{peer:02}"


def repeatable(findings: Sequence[Finding], window: runfile.Window, peer: int) -> list[Finding]:
    """Return the findings that the bundle of a peer's window repeats."""
    return [f for f in findings if f.peer == peer and f.kind in KINDS and f.round in window.rounds]


def write(
    folder: Path, replay: Replay, window: runfile.Window, peer: int, findings: Sequence[Finding]
) -> None:
    """Write the bundle of the `repeatable` findings on a peer in a window."""
    transcript = replay.transcript
    entries = list(transcript.window(window))
    peers = replayed(replay.setup, entries, findings)

    write_json(folder / RUN, replay.setup.run.model_dump(mode="json"))
    files = files_of(transcript, entries, window, peers)
    if any(finding.kind == "state" for finding in findings):  # elsewhere its hash says nothing
        files |= {f"snapshots/{window.last:05}/own-{owner:03}.safetensors" for owner in peers}
    for file in files:
        if (transcript.folder / file).exists():  # that a payload is missing may be the finding
            (folder / TRANSCRIPT / file).parent.mkdir(parents=True, exist_ok=True)
            link(transcript.folder / file, folder / TRANSCRIPT / file)
    lines = (transcript.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines(True)
    count = window.last - transcript.snapshots[0]
    write_text(folder / TRANSCRIPT / "rounds.jsonl", "".join(lines[:count]))
    if peers:
        given_rows.write(folder / TOKENS, replay.setup.data, given_rows.assigned(entries, peers))
    manifest = BundleManifest(
        format=2,
        window=tuple(window),
        peer=peer,
        bitwise=replay.bitwise,
        columns=replay.setup.programs.task.columns,
        findings=tuple(findings),
        files=listing(folder),
    )
    write_text(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n")


def replayed(
    setup: Setup, entries: Iterable[Entry], findings: Iterable[Finding]
) -> tuple[int, ...]:
    """Return the peers whose steps must be recomputed to show the findings.

    That is the liar or, if it made a false check of another peer's step, that peer. All findings
    are about one peer in these rounds.
    """
    rounds, peers = {entry.round.step: entry for entry in entries}, set()
    for finding in findings:
        if finding.kind == "check":
            evidence = rounds[finding.round].evidence
            peers |= {check.peer for check in evidence.checks if check.verifier == finding.peer}
            peers |= {ruling.peer for ruling in evidence.rulings if finding.peer in ruling.found}
        elif finding.kind not in DECODED:
            peers.add(finding.peer)
    together = peers and not setup.programs.form.kept
    return tuple(range(setup.run.peers.count) if together else sorted(peers))


def listing(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a bundle but bundle.json, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: sha256_file(path) for name, path in names.items() if name != MANIFEST}


def files_of(
    transcript: Transcript, entries: Iterable[Entry], window: runfile.Window, peers: Iterable[int]
) -> set[str]:
    """Return the transcript's files that a window's replay needs whole.

    Without `peers`, whose steps are recomputed, messages are decoded and no more.
    """
    evidences = [entry.evidence for entry in entries]
    sent = [m for e in evidences for m in (*e.messages.values(), *e.others.values())]
    files = {"header.json"} | {f"payloads/{m.payload}" for m in sent if m.payload is not None}
    if not peers:
        return files
    opening, closing = (f"snapshots/{step:05}" for step in (window.opening, window.last))
    steps = [step for step in transcript.snapshots if window.opening <= step <= window.last]
    files |= {f"snapshots/{step:05}/state.json" for step in steps}
    files |= {
        f"{s}/{part}.safetensors" for s in (opening, closing) for part in ("params", "shared")
    }
    return files | {f"{opening}/own-{peer:03}.safetensors" for peer in peers}
