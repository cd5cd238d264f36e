"""A bundle: what anybody needs to repeat one replay that found something.

    bundle.json            what was found, and the SHA-256 of every other file
    run.json               the run file
    tokens.safetensors     the sequences that the replayed peers were assigned, by their index
    transcript/            the part of the transcript that the replay needs, in its own layout: all
                           rounds up to the window's last, the window's payloads and snapshots

A finding that the bytes of a message show needs neither snapshots nor sequences.

`lockstep replay BUNDLE` repeats the replay, and says what it confirms. Nothing in a bundle is
trusted: every file is checked against its hash, and what it holds of the transcript by the audit
itself. A bundle that contradicts itself is refused, so that nobody is blamed for bytes that were
changed on the way. Whether its rounds, snapshots and sequences are the run's own is for those to
compare who have the run's transcript and data: they are the same bytes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn

from pydantic import Field

from lockstep.errors import LockstepError, expecting, shown
from lockstep.files import link, sha256_file, write_json, write_text
from lockstep.programs.columns import Column
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from lockstep.tables.validation import validate_json
from lockstep.transcript.entry import Entry
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit import rows_file
from pipeline.audit.audit import audit_ends, audit_header, audit_rounds
from pipeline.audit.replay import Replay
from pipeline.audit.unchecked_bundle import RUN, WorkerOfReader, read_run
from pipeline.audit.verdict import SHOWN_BY, Finding, contradictions
from pipeline.start import set_up
from pipeline.start.set_up import Setup
from pipeline.subject import subject_of

KINDS = tuple(kind for kind, by in SHOWN_BY.items() if by != "record")
"""Findings that can be repeated: by recomputing a peer's steps, or by decoding what it sent."""
DECODED = tuple(kind for kind, by in SHOWN_BY.items() if by == "bytes")  # the latter
CONFIRMED, NOT_CONFIRMED = "confirmed", "not confirmed"
NOT_COMPARABLE = "not comparable here"
STATUS = {NOT_CONFIRMED: 1, NOT_COMPARABLE: 3, CONFIRMED: 0}  # the first that a finding has
MANIFEST, TOKENS, TRANSCRIPT = "bundle.json", "tokens.safetensors", "transcript"


class BundleManifest(Table):
    """The list of a bundle, bundle.json: what was found, and every other file."""

    format: Literal[3]
    """Version of the bundle's format."""
    window: tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]
    """First and last round of the window."""
    peer: Annotated[int, Field(ge=0)]
    """Peer that is to blame."""
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    """Columns of the data's rows."""
    findings: Annotated[tuple[Finding, ...], Field(min_length=1)]
    """What the auditor found."""
    files: dict[str, Hash]
    """SHA-256 of every other file of the bundle, by its name."""


def name(window: Window, peer: int) -> str:
    """Return the folder of a bundle in data/verdict."""
    return f"bundles/{window.first:05}-{window.last:05}-peer-{peer:02}"


def repeatable(findings: Sequence[Finding], window: Window, peer: int) -> list[Finding]:
    """Return the findings that the bundle of a peer's window repeats."""
    return [f for f in findings if f.peer == peer and f.kind in KINDS and f.round in window.rounds]


def write(
    folder: Path, replay: Replay, window: Window, peer: int, findings: Sequence[Finding]
) -> None:
    """Write the bundle of the `repeatable` findings on a peer in a window."""
    transcript = replay.transcript
    entries = list(transcript.window(window))
    peers = replayed(replay.setup, entries, findings)

    write_json(folder / RUN, replay.setup.run.model_dump(mode="json"))
    files = files_of(transcript, entries, window, peers)
    for file in files:
        if (transcript.folder / file).exists():  # that a payload is missing may be the finding
            (folder / TRANSCRIPT / file).parent.mkdir(parents=True, exist_ok=True)
            link(transcript.folder / file, folder / TRANSCRIPT / file)
    lines = (transcript.folder / "rounds.jsonl").read_text(encoding="utf-8").splitlines(True)
    count = window.last - transcript.snapshots[0]
    write_text(folder / TRANSCRIPT / "rounds.jsonl", "".join(lines[:count]))
    if peers:
        rows_file.write(folder / TOKENS, replay.setup.data, rows_file.assigned(entries, peers))
    manifest = BundleManifest(
        format=3,
        window=tuple(window),
        peer=peer,
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
    all_peers = peers and not setup.programs.form.kept
    return tuple(range(setup.run.peers.count) if all_peers else sorted(peers))


def listing(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a bundle but bundle.json, by its name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: sha256_file(path) for name, path in names.items() if name != MANIFEST}


def files_of(
    transcript: Transcript, entries: Iterable[Entry], window: Window, peers: Iterable[int]
) -> set[str]:
    """Return the transcript's files that a window's replay needs whole.

    Without `peers`, whose steps are recomputed, messages are decoded and no more.
    """
    evidences = [entry.evidence for entry in entries]
    messages = [m for e in evidences for m in (*e.messages.values(), *e.others.values())]
    files = {"header.json"} | {f"payloads/{m.payload}" for m in messages if m.payload is not None}
    if not peers:
        return files
    opening, closing = (f"snapshots/{step:05}" for step in (window.opening, window.last))
    steps = [step for step in transcript.snapshots if window.opening <= step <= window.last]
    files |= {f"snapshots/{step:05}/state.json" for step in steps}
    files |= {
        f"{s}/{part}.safetensors" for s in (opening, closing) for part in ("params", "shared")
    }
    return files | {f"{opening}/own-{peer:03}.safetensors" for peer in peers}


# ---- lockstep replay ----


class Bundle(NamedTuple):
    """A bundle, read and checked.

    The steps of `peers` are recomputed. The audit, which needs no training, finds `audited` about
    the bundle's peer.
    """

    manifest: BundleManifest
    replay: Replay
    window: Window
    peers: tuple[int, ...]
    audited: list[Finding]


def show(folder: Path, max_gb: int, worker: WorkerOfReader | None = None) -> int:
    """Repeat a bundle's replay, and print what it confirms.

    Return 0 if it confirms all, 3 if what it does not confirm is not comparable here, else 1.
    """
    bundle = read(folder, max_gb, worker)
    findings, why = rerun(bundle)
    claims, states = bundle.manifest.findings, list[str]()
    for claim in claims:
        states.append(_state(findings, claim, why))
        print(shown(f"peer {claim.peer}, round {claim.round}, {claim.kind}: {claim.detail}"))
        print(shown(f"  found here: {_nearest(findings, claim)}"))
        print(f"  {states[-1]}")
    for finding in findings:
        if finding.peer is None:
            text = f"The bundle contradicts itself in round {finding.round}: {finding.detail}"
            print(shown(text))
    how = "compared bit for bit" if bundle.peers else "by decoding what was sent"
    if why is not None:
        how = f"{NOT_COMPARABLE}: {why}"
    print(shown(f"{states.count(CONFIRMED)} of {len(claims)} findings confirmed, {how}"))
    return next(status for state, status in STATUS.items() if state in states)


def read(folder: Path, max_gb: int, worker: WorkerOfReader | None = None) -> Bundle:
    """Read a bundle, and check all that can be checked without training.

    Its files may have at most `max_gb` 10^9 bytes together.
    """
    run = read_run(folder, max_gb, worker)
    manifest = _read_manifest(folder)
    transcript = Transcript(folder / TRANSCRIPT)
    header, entries = transcript.header, transcript.rounds
    window = Window(*manifest.window)
    start = entries[0].round.step - 1 if entries else -1
    if start < 0 or run.snapshots(start).window_after(window.opening) != window:
        _refuse(folder / MANIFEST, f"window {list(window)} is not one of this run's")

    _check_claims(folder / MANIFEST, manifest, run, window)
    subject = subject_of(run)
    subject.check_model(run, header.model, transcript.folder / "header.json")
    rows = None
    if TOKENS in manifest.files:
        bound = subject.vocab_size(header.model)
        rows = rows_file.read(folder / TOKENS, manifest.columns, run, bound)
    index = entries[0].round.data_index
    setup = set_up.blank(run, header.model, rows, manifest.columns, start, index)

    found = audit_header(setup, transcript) + audit_rounds(setup, transcript, [window], window.last)
    _refuse_contradictions(transcript, found)
    peers = replayed(setup, transcript.window(window), manifest.findings)
    replay = Replay(setup, transcript)
    if peers:
        _refuse_contradictions(transcript, audit_ends(setup, transcript, window, peers))
        if rows is None:
            _refuse(folder / TOKENS, "no such file, expected the sequences to train on")
    audited = [f for f in found if f.peer == manifest.peer and f.kind in KINDS]
    return Bundle(manifest, replay, window, peers, audited)


def rerun(bundle: Bundle) -> tuple[list[Finding], str | None]:
    """Return the findings about the bundle's peer, or about no peer, and `WindowOutcome.why`."""
    replay, findings, why = bundle.replay, [*bundle.audited], None
    # one peer after another, so that findings about one hide none about the others
    groups = [(peer,) for peer in bundle.peers] if replay.kept else [bundle.peers]
    for peers in groups:
        outcome = replay.window(bundle.window, peers, lambda: None)
        findings, why = findings + outcome.findings, why or outcome.why
    return [finding for finding in findings if finding.peer in (bundle.manifest.peer, None)], why


# ---- What was claimed, and what is found here ----


def _state(findings: Iterable[Finding], claim: Finding, why: str | None) -> str:
    """Return whether a bundle's finding is found here, to the letter; `why` is the window's."""
    if any(finding.peer is None for finding in findings):
        return NOT_CONFIRMED  # with such rounds anybody could be blamed
    if claim in findings:
        return CONFIRMED
    return NOT_COMPARABLE if why is not None and claim.kind not in DECODED else NOT_CONFIRMED


def _nearest(findings: Iterable[Finding], claim: Finding) -> str:
    """Return the finding here that is most like the bundle's."""
    own = [finding for finding in findings if finding.peer == claim.peer]
    if not own:
        return "nothing against it"
    best = min(own, key=lambda f: (f.kind != claim.kind, abs(f.round - claim.round)))
    return f"round {best.round}, {best.kind}: {best.detail}"


# ---- Reading ----


def _read_manifest(folder: Path) -> BundleManifest:
    path = folder / MANIFEST
    with expecting(path, "a bundle"):
        manifest = validate_json(BundleManifest, path.read_bytes(), str(path))
    hashes = listing(folder)
    for name in sorted(hashes.keys() | manifest.files.keys()):
        if hashes.get(name) != manifest.files.get(name):
            actual, listed = (files.get(name, "no file")[:12] for files in (hashes, manifest.files))
            _refuse(folder, f"{name!r}: found {actual}, expected {listed} as {MANIFEST} says")
    return manifest


def _check_claims(path: Path, manifest: BundleManifest, run: runfile.Run, window: Window) -> None:
    """Check that every finding is about the bundle's peer and window."""
    if manifest.peer >= run.peers.count:
        _refuse(path, f"peer {manifest.peer}, expected a peer below {run.peers.count}")
    for finding in manifest.findings:
        if finding.peer != manifest.peer or finding.round not in window.rounds:
            actual = f"a finding of peer {finding.peer}, round {finding.round}"
            expected = f"peer {manifest.peer} in rounds {window.first} to {window.last}"
            _refuse(path, f"{actual}, expected of {expected}")


def _refuse_contradictions(transcript: Transcript, findings: Iterable[Finding]) -> None:
    if bad := contradictions(findings):
        _refuse(transcript.folder, str(bad[0]))


def _refuse(path: Path, text: str) -> NoReturn:
    raise LockstepError(f"{path}: {text}")
