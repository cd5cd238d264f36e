"""A bundle: what anybody needs to repeat one replay that found something, and nothing else.

    bundle.json            what was found, and the SHA-256 of every other file
    run.json               the run file
    tokens.safetensors     the sequences that the replayed peers were assigned, by column
    transcript/            the window's part of the transcript, in the transcript's own layout

`lockstep replay BUNDLE` repeats it. That the rounds, snapshots and sequences are the run's own is
for those to compare who have the run's transcript and data: they are the same bytes. A finding that
the bytes of a message show, and no training, needs neither snapshots nor sequences.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from pipeline import runfile
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from pipeline.protocol.dispute import Hash
from pipeline.runfile.table import Table
from pipeline.stage.artifacts import link, sha256_file, write_json, write_text
from pipeline.tokens.columns import Columns, split
from pipeline.transcript.entry import Entry
from pipeline.transcript.transcript import Transcript
from pipeline.weights.trees import save_tree

KINDS = ("message", "state", "check", "payload", "commitment")
"""Findings that can be repeated: by taking a peer's steps again, or by decoding what it sent."""
DECODED = ("payload", "commitment")  # the latter
SAID, RUN, TOKENS, TRANSCRIPT = "bundle.json", "run.json", "tokens.safetensors", "transcript"
COLUMNS = ("tokens", *Columns._fields[1:])
"""The names of a row's columns in TOKENS."""


class Said(Table):
    """bundle.json."""

    format: Literal[1]
    """Its version."""
    key: str
    """Of the run's stage train."""
    window: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=1)]]
    """The steps of the window's two snapshots: rounds first + 1 to last."""
    peer: Annotated[int, Field(ge=0)]
    """Who is to blame."""
    first_step: Annotated[int, Field(ge=0)]
    """Rounds trained by the run that this one extends, 0 for a new run."""
    bitwise: bool
    """Whether the witness compared bits."""
    findings: Annotated[tuple[Finding, ...], Field(min_length=1)]
    """What it found."""
    files: dict[str, Hash]
    """SHA-256 of every other file of the bundle, by its name."""

    @property
    def rounds(self) -> runfile.Window:
        """The window as its first and last round."""
        return runfile.Window(self.window[0] + 1, self.window[1])


def name(window: runfile.Window, peer: int) -> str:
    """The folder of a bundle in data/verdict."""
    return f"bundles/{window.first:05}-{window.last:05}-peer-{peer:02}"


def write(
    folder: Path, replay: Replay, window: runfile.Window, peer: int, findings: Sequence[Finding]
) -> None:
    """Writes the bundle of a peer's window into a folder that is built aside.

    Args:
      folder: to fill.
      replay: what the witness replayed with.
      window: which.
      peer: who is to blame.
      findings: all of the witness's.
    """
    transcript = replay.transcript
    entries = list(transcript.window(window))
    steps = {entry.round.step for entry in entries}
    kept = [f for f in findings if f.peer == peer and f.kind in KINDS and f.round in steps]
    peers = replayed(kept, entries, range(replay.run.peers.count) if replay.dense else None)

    write_json(folder / RUN, replay.run.model_dump(mode="json"))
    between = [step for step in transcript.snapshots if window.opening < step < window.last]
    for file in _files(entries, window, between, peers):
        if (transcript.folder / file).exists():  # that a payload is not there may be the finding
            (folder / TRANSCRIPT / file).parent.mkdir(parents=True, exist_ok=True)
            link(transcript.folder / file, folder / TRANSCRIPT / file)
    write_text(folder / TRANSCRIPT / "rounds.jsonl", _lines(transcript, steps))
    if peers:
        indices_N = np.unique(np.concatenate(list(_assigned(entries, peers))))
        rows = split(replay.data.take(indices_N), replay.programs.columns)
        named = zip(COLUMNS, rows, strict=True)
        there = {name: np.ascontiguousarray(x_NT) for name, x_NT in named if x_NT is not None}
        save_tree(folder / TOKENS, {"indices": indices_N} | there)
    said = Said(
        format=1,
        key=transcript.header.key,
        window=(window.opening, window.last),
        peer=peer,
        first_step=transcript.snapshots[0],
        bitwise=replay.bitwise,
        findings=tuple(kept),
        files=listing(folder),
    )
    write_text(folder / SAID, said.model_dump_json(indent=2) + "\n")


def replayed(
    findings: Iterable[Finding], entries: Iterable[Entry], everybody: Iterable[int] | None
) -> tuple[int, ...]:
    """Whose steps have to be taken again to show the findings: a liar's own; or, where it said
    something false about another's, that one's.

    Args:
      findings: of one peer in one window.
      entries: the window's rounds.
      everybody: all peers, where a window is replayed for all of them or none; else None.
    """
    rounds, peers = {entry.round.step: entry for entry in entries}, set()
    for finding in findings:
        if finding.kind == "check":
            entry = rounds[finding.round]
            peers |= {
                check.peer for check in entry.evidence.checks if check.verifier == finding.peer
            }
            peers |= {
                ruling.peer for ruling in entry.evidence.rulings if finding.peer in ruling.found
            }
        elif finding.kind not in DECODED:
            peers.add(finding.peer)
    return tuple(sorted(peers if everybody is None or not peers else everybody))


def listing(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below a bundle's folder but bundle.json, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: sha256_file(path) for name, path in names.items() if name != SAID}


def _files(
    entries: Iterable[Entry], window: runfile.Window, between: Iterable[int], peers: Iterable[int]
) -> set[str]:
    """The transcript's files that are needed whole. The params at the window's end are needed where
    the machine that repeats cannot compare bits."""
    first, last = (f"snapshots/{step:05}" for step in (window.opening, window.last))
    sent = [
        m for e in entries for m in (*e.evidence.messages.values(), *e.evidence.others.values())
    ]
    files = {"header.json"} | {f"payloads/{m.payload}" for m in sent if m.payload is not None}
    if peers:
        for snapshot in (first, last):
            files |= {f"{snapshot}/state.json"}
            files |= {f"{snapshot}/{part}.safetensors" for part in ("params", "shared")}
        files |= {f"snapshots/{step:05}/state.json" for step in between}
    return files | {f"{first}/own-{peer:03}.safetensors" for peer in peers}


def _lines(transcript: Transcript, steps: set[int]) -> str:
    """The lines of some rounds, as they stand in the transcript."""
    text = (transcript.folder / "rounds.jsonl").read_text(encoding="utf-8")
    lines = zip(text.splitlines(), transcript.rounds, strict=True)
    return "".join(f"{line}\n" for line, entry in lines if entry.round.step in steps)


def _assigned(entries: Iterable[Entry], peers: Iterable[int]) -> Iterator[np.ndarray]:
    """The sequences of each step that is taken again."""
    for entry in entries:
        for peer in peers:
            if peer in entry.evidence.messages:
                first, last = entry.round.assignment[peer]
                yield np.arange(first, last + 1)
