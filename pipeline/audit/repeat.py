"""`lockstep replay BUNDLE`: repeats the replay that a bundle holds, and says what it confirms.

Nothing in a bundle is trusted: every file is checked against its hash, the snapshots against the
hashes that the peers committed to, and messages against their commitments. What contradicts itself
is refused, so that nobody is blamed for bytes that were changed on the way.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.audit.audit import why_refused
from pipeline.audit.bundle import (
    COLUMNS,
    DECODED,
    RUN,
    SAID,
    TOKENS,
    TRANSCRIPT,
    Said,
    listing,
    replayed,
)
from pipeline.audit.replay import TOLERANCE, Replay, why_not_bitwise
from pipeline.audit.verdict import Finding
from pipeline.errors import LockstepError
from pipeline.protocol.dispute import Hash
from pipeline.runfile.explain import validate_json
from pipeline.runfile.table import Table
from pipeline.stage.artifacts import read_json
from pipeline.swarm import begin
from pipeline.swarm.peers import capacity
from pipeline.tokens.columns import UNCOUNTED, Columns
from pipeline.tokens.shards import PLAIN, Column
from pipeline.transcript.entry import TABLES, Entry
from pipeline.transcript.state import State
from pipeline.transcript.transcript import Transcript
from pipeline.weights import hf
from pipeline.weights.trees import load_nested
from pipeline.wire import message as wire
from pipeline.wire.commitment import tree_hash


class Bundle(NamedTuple):
    """A bundle, read and checked.

    said: bundle.json; replay: with what it is repeated; entries: the window's rounds; peers: whose
    steps are taken again; why: what stands in the way of comparing bits here, or None.
    """

    said: Said
    replay: Replay
    entries: tuple[Entry, ...]
    peers: tuple[int, ...]
    why: str | None


class _Recorded(Table):
    """state.json of a snapshot."""

    step: int
    params: Hash
    shared: Hash
    own: tuple[Hash, ...]


def show(folder: Path) -> int:
    """Repeats a bundle's replay and prints what comes of it; 0 where all is confirmed, else 1.

    Raises:
      LockstepError: it is no bundle, or not as it was written.
    """
    bundle = read(folder)
    found = repeat(bundle)
    tolerance = TOLERANCE[bundle.replay.run.peers.precision]
    how = "compared " + verdict_text.compared(bundle.why, tolerance)
    if not bundle.peers:
        how = "by decoding what was sent"
    confirmed = 0
    for said in bundle.said.findings:
        yes = _confirms(bundle, found, said)
        confirmed += yes
        _print(f"peer {said.peer}, round {said.round}, {said.kind}: {said.detail}")
        _print(f"  found here: {_nearest(found, said)}")
        _print(f"  {'confirmed' if yes else 'not confirmed'}")
    for other in found:
        if other.peer is None:
            _print(f"The bundle contradicts itself in round {other.round}: {other.detail}")
    total = len(bundle.said.findings)
    _print(f"{confirmed} of {total} findings confirmed, {how}")
    return 0 if confirmed == total else 1


def read(folder: Path) -> Bundle:
    """Reads a bundle, and checks all that can be checked without taking a step.

    Raises:
      LockstepError: a file is missing, was added or changed, or does not fit to the others.
    """
    said = _read_said(folder)
    run = runfile.parse(read_json(folder / RUN), str(folder / RUN))
    transcript = Transcript(folder / TRANSCRIPT)
    header = transcript.header
    if (header.key, header.run) != (said.key, run.model_dump(mode="json", include=TABLES)):
        _refuse(transcript.folder / "header.json", f"it is not of run {said.key} as {RUN} has it")
    hf.model_of(header.model, transcript.folder / "header.json")  # refuses what is no model
    rows, columns = None, PLAIN
    if (folder / TOKENS).exists():
        rows, columns = _read_rows(folder / TOKENS, run, header.model)
    setup = begin.blank(run, header.model, rows, columns, said.first_step)
    form, like = setup.form, setup.start.state
    entries = tuple(transcript.rounds)
    _check_rounds(folder, said, run, entries, form.kind == wire.DENSE)
    everybody = range(run.peers.count) if form.kind == wire.DENSE else None
    peers = replayed(said.findings, entries, everybody)
    if peers and rows is None:
        _refuse(folder / TOKENS, "no such file, expected the sequences to train on")
    why = why_not_bitwise(run, header)
    replay = Replay(run, setup.programs, transcript, rows, form, like, bitwise=not why)
    if peers:
        _check_snapshots(transcript, said.rounds, peers, like)
        _check_messages(replay, entries)
    return Bundle(said, replay, entries, peers, why)


def repeat(bundle: Bundle) -> list[Finding]:
    """What a replay finds: about the bundle's peer, and where the bundle contradicts itself."""
    replay, entries = bundle.replay, {entry.round.step: entry for entry in bundle.entries}
    found = []
    for step in {said.round for said in bundle.said.findings if said.kind in DECODED}:
        found += _decode(replay, entries[step], bundle.said.peer)
    # one after another, so that what is found of one hides nothing of the others
    groups = [bundle.peers] if replay.dense else [(peer,) for peer in bundle.peers]
    for peers in groups:
        found += replay.window(bundle.said.rounds, peers, lambda: None)
    return [finding for finding in found if finding.peer in (bundle.said.peer, None)]


# ---- What was found, and what is found here ----


def _decode(replay: Replay, entry: Entry, peer: int) -> list[Finding]:
    """What anybody finds who decodes a peer's messages of a round."""
    found = []
    for messages in (entry.evidence.messages, entry.evidence.others):
        if peer in messages:
            refusal = why_refused(messages[peer], peer, entry.round, replay.transcript, replay.form)
            if refusal:
                applied = peer in entry.decision.applied
                found.append(Finding(entry.round.step, peer, *refusal, applied))
    return found


def _confirms(bundle: Bundle, found: Iterable[Finding], said: Finding) -> bool:
    """Whether what was found here says the same; to the letter, where bits were compared twice."""
    if any(finding.peer is None for finding in found):
        return False  # with such rounds anybody could be blamed
    exact = said.kind in DECODED or (bundle.said.bitwise and bundle.replay.bitwise)
    return any(
        finding == said if exact else (finding.round, finding.kind) == (said.round, said.kind)
        for finding in found
    )


def _nearest(found: Iterable[Finding], said: Finding) -> str:
    """What was found here that is most like a finding."""
    own = [finding for finding in found if finding.peer == said.peer]
    if not own:
        return "nothing against it"
    best = min(own, key=lambda f: (f.kind != said.kind, abs(f.round - said.round)))
    return f"round {best.round}, {best.kind}: {best.detail}"


def _print(line: str) -> None:
    print(verdict_text.printable(line))


# ---- Reading ----


class _Kept:
    """Some sequences of a run by their place in its order; stands for `tokens.Sequences`."""

    def __init__(self, indices_N: np.ndarray, rows_NW: np.ndarray):
        self.indices_N, self.rows_NW = indices_N, rows_NW

    def take(self, indices_N: np.ndarray) -> np.ndarray:
        """The sequences at these places.

        Raises:
          LockstepError: one of them is not kept.
        """
        rows_N = np.searchsorted(self.indices_N, indices_N)
        rows_N = np.minimum(rows_N, len(self.indices_N) - 1)
        if (self.indices_N[rows_N] != indices_N).any():
            text = f"without some of sequences {indices_N[0]} to {indices_N[-1]}"
            raise LockstepError(f"{TOKENS}: {text}, expected those that were assigned")
        return self.rows_NW[rows_N]


def _read_said(folder: Path) -> Said:
    path = folder / SAID
    try:
        said = validate_json(Said, path.read_bytes(), str(path))
    except OSError as error:
        raise LockstepError(f"{path}: {error.strerror}, expected a bundle") from error
    found = listing(folder)
    for name in sorted(found.keys() | said.files.keys()):
        if found.get(name) != said.files.get(name):
            there, listed = (files.get(name, "no file")[:12] for files in (found, said.files))
            _refuse(folder, f"{name!r}: found {there}, expected {listed} as {SAID} says")
    return said


def _check_rounds(
    folder: Path, said: Said, run: runfile.Run, entries: Iterable[Entry], dense: bool
) -> None:
    """The rounds are the window's, and such that a replay can follow them."""
    path, (first, last), everybody = folder / SAID, said.window, set(range(run.peers.count))
    if said.peer not in everybody or not said.first_step <= first < last <= run.config.total_steps:
        _refuse(path, f"peer {said.peer}, window {said.window}, expected such as {RUN} has")
    for finding in said.findings:
        if finding.peer != said.peer or not first < finding.round <= last:
            _refuse(
                path,
                f"a finding of peer {finding.peer}, round {finding.round}, expected of "
                f"peer {said.peer} in rounds {first + 1} to {last}",
            )
    path = folder / TRANSCRIPT / "rounds.jsonl"
    if [entry.round.step for entry in entries] != list(range(first + 1, last + 1)):
        _refuse(path, f"other rounds than {first + 1} to {last}")
    for entry in entries:
        round, senders = entry.round, entry.evidence.messages.keys()
        fits = (
            {*entry.decision.applied} <= senders <= round.assignment.keys() <= everybody
            and {*round.peers, *round.joined} <= everybody
            and (not senders or round.trainers > 0)
            and all(
                0 <= a <= b < a + capacity(run, round.trainers)
                for p, (a, b) in round.assignment.items()
                if p in senders
            )
            and (
                dense
                or None
                not in {
                    field
                    for m in entry.evidence.messages.values()
                    for field in (m.payload, m.offset)
                }
            )
        )
        if not fits:
            _refuse(path, f"round {round.step} is none that peers could have taken")


def _check_snapshots(
    transcript: Transcript, window: runfile.Window, peers: Iterable[int], like: State
) -> None:
    """The files of the window's two snapshots are what was committed to."""
    for step in (window.opening, window.last):
        folder = transcript.folder / "snapshots" / f"{step:05}"
        try:
            recorded = _Recorded.model_validate_json((folder / "state.json").read_bytes())
        except (OSError, ValidationError) as error:
            reason = getattr(error, "strerror", None) or "not the hashes of a state"
            raise LockstepError(f"{folder / 'state.json'}: {reason}, expected those") from error
        if recorded.step != step or len(recorded.own) != len(like.own):
            _refuse(folder / "state.json", f"expected step {step} and {len(like.own)} peers")
        params, shared = transcript.agreed(step, like)
        found = {"params": (params, recorded.params), "shared": (shared, recorded.shared)}
        if step == window.opening:
            for peer in peers:
                own = transcript.own(step, peer, like.own[peer])
                found[f"own-{peer:03}"] = own, recorded.own[peer]
        for name, (tree, expected) in found.items():
            if (hash := tree_hash(tree)) != expected:
                text = f"hashes to {hash[:12]}, expected {expected[:12]} as state.json says"
                _refuse(folder / f"{name}.safetensors", text)


def _check_messages(replay: Replay, entries: Iterable[Entry]) -> None:
    """Whatever was applied is what was committed to: the params follow from it."""
    for entry in entries if not replay.dense else ():
        for peer in entry.decision.applied:
            message = entry.evidence.messages[peer]
            refusal = why_refused(message, peer, entry.round, replay.transcript, replay.form)
            if refusal:
                text = f"round {entry.round.step}, peer {peer}: {refusal[1]}"
                _refuse(replay.transcript.folder / "payloads" / message.payload, text)


def _read_rows(
    path: Path, run: runfile.Run, hf_config: dict[str, Any]
) -> tuple[_Kept, tuple[Column, ...]]:
    """The sequences of a bundle, and the columns that they have."""
    found, length = load_nested(path), run.llm.max_seq_len
    arrays = {name: x for name, x in found.items() if isinstance(x, np.ndarray)}
    indices_N = arrays.get("indices", np.zeros(0, np.int64))
    rows = {name: arrays[name] for name in COLUMNS if name in arrays}
    if (
        found.keys() != {"indices", *rows}
        or COLUMNS[0] not in rows
        or indices_N.dtype != np.int64
        or indices_N.shape != (indices_N.size,)
        or any((x.dtype, x.shape) != (np.int32, (indices_N.size, length)) for x in rows.values())
        or not indices_N.size
        or (np.diff(indices_N) <= 0).any()
    ):
        _refuse(path, f"expected ascending indices, and as many sequences of {length}")
    vocabulary = hf_config["vocab_size"]
    # of what a number can be in a row; sequences are as many as tokens, and padding
    limits = dict(zip(COLUMNS, (vocabulary, vocabulary, length, length + 1), strict=True))
    for name, x_NT in rows.items():
        known = x_NT[x_NT != UNCOUNTED] if name == "labels" else x_NT
        if known.size and (known.min() < 0 or known.max() >= limits[name]):
            what = "token ids" if name == COLUMNS[0] else name
            _refuse(path, f"expected {what} from 0 and below {limits[name]}")
    columns = tuple(Columns._fields[COLUMNS.index(name)] for name in rows)
    return _Kept(indices_N, np.concatenate(list(rows.values()), axis=1)), columns


def _refuse(path: Path, text: str) -> None:
    raise LockstepError(f"{path}: {text}")
