"""The transcript of a run: all that anyone needs to recompute a window and get the same hashes.

    header.json            format, what was run, on what machine
    rounds.jsonl           one line per round: seed, assignment, committee, commitments,
                           attestations, the coordinator's decision, position of each payload
    payloads/00001.bin     the payloads from one snapshot to the next, named for their first round;
                           large ones (AdamW's gradients) are not kept
    snapshots/00000/       the full state after that step, and `state.json` with its hashes; some
                           snapshots have only the hashes

A window lies between two snapshots that are kept whole. Docs: docs/reference/transcript.md.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import link, read_json, sha256_file, write_json, write_text, writes
from lockstep.optim.optimizer import Tree
from lockstep.protocol.attestation import Hash
from lockstep.protocol.round import Message
from lockstep.tables.validation import validate_json
from lockstep.transcript.entry import FORMAT, Entry, Header
from lockstep.transcript.state import State, StateHashes, hashes
from lockstep.transcript.trees import load_tree, save_tree
from lockstep.transcript.windows import Snapshots, Window
from lockstep.wire import message as wire
from lockstep.wire.exchange import Asked


class RoundsFile:
    """A file rounds.jsonl that is being written; the first round makes it.

    `remedy` is what a user can do where it is damaged; `committed` is whether rounds have the
    commitments to their messages, for which each of these comes to the host.
    """

    def __init__(
        self,
        path: Path,
        remedy: str = "start over after `lockstep clean`",
        *,
        committed: bool = True,
    ):
        self.path, self.remedy, self.committed = path, remedy, committed

    def takes(self, step: int) -> bool:
        """Return whether the transcript has a snapshot after a step: never, in rounds alone."""
        return False

    def asked(self, form: wire.Form) -> Asked:
        """Return what the transcript's rounds.jsonl reads of messages of this form."""
        return Asked.COMMITMENT if self.committed else Asked.FACTS

    def round(self, entry: Entry, *sent: dict[int, bytes]) -> None:
        """Append a round to rounds.jsonl; the bytes that were sent in it are not kept here."""
        self._append(entry)

    def _append(self, entry: Entry) -> None:
        with writes(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(entry.model_dump_json() + "\n")

    def flush(self) -> None:
        """Wait until all rounds of rounds.jsonl so far are on disk."""
        with writes(self.path), open(self.path, "ab") as file:
            os.fsync(file.fileno())

    def cut(self, step: int) -> list[Entry]:
        """Forget rounds of rounds.jsonl after `step`, counted from 0; return those before.

        Raises:
          LockstepError: There are fewer, or a line is no round.
        """
        lines = self._lines() if step else []
        if len(lines) < step:
            raise LockstepError(
                f"{self.path}: {len(lines)} rounds, expected the {step} before the checkpoint; "
                f"{self.remedy}"
            )
        head = lines[:step]
        entries = [
            _entry(line, f"{self.path}:{number}", committed=self.committed)
            for number, line in enumerate(head, start=1)
        ]
        write_text(self.path, "".join(head))
        return entries

    def _lines(self) -> list[str]:
        with (
            expecting(self.path, ENTRIES, OSError, UnicodeDecodeError),
            suppress(FileNotFoundError),
        ):
            return self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        return []


def _entry(line: str, where: str, *, committed: bool = True) -> Entry:
    entry = validate_json(Entry, line, where)
    for message in (*entry.evidence.messages.values(), *entry.evidence.others.values()):
        if bool(message.commitment) != committed:
            expected = "64 hexadecimal digits" if committed else "none where nobody reads it"
            raise LockstepError(
                f"{where}: evidence.messages: commitment is {message.commitment!r}, expected "
                f"{expected}"
            )
    return entry


ENTRIES = "one JSON object per line"  # of rounds.jsonl
DECODED_BYTES = 2**28  # of messages that are kept decoded
READ_BY = {  # which versions read other formats
    "1": "a development version before release 0.1",
    "2": "release 0.2",
    "3": "a development version before release 0.3",
}


class Writer(RoundsFile):
    """Appends to a transcript in a folder, and can be cut back to where a checkpoint was."""

    def __init__(self, folder: Path, snapshots: Snapshots):
        self.folder, self.snapshots = folder, snapshots
        self._unflushed: set[Path] = set()  # payloads, which are one file after the other
        super().__init__(folder / "rounds.jsonl")
        (folder / "payloads").mkdir(parents=True, exist_ok=True)
        (folder / "snapshots").mkdir(exist_ok=True)

    def header(self, header: Header) -> None:
        """Write the transcript's header.json."""
        write_text(self.folder / "header.json", header.model_dump_json(indent=2) + "\n")

    def cut(self, step: int) -> list[Entry]:
        """Forget all of the transcript after `step`, and return the rounds before.

        That is what a killed run wrote beyond its last checkpoint.

        Raises:
          LockstepError: Rounds or payloads before it are missing or damaged.
        """
        entries = super().cut(step - self.snapshots.start)
        ends: dict[str, int] = {}
        for entry in entries:
            for message in (*entry.evidence.messages.values(), *entry.evidence.others.values()):
                if message.payload:
                    ends[message.payload] = message.offset + message.bytes
        payloads = self.folder / "payloads"
        sizes = {path.name: path.stat().st_size for path in payloads.iterdir()}
        for name, end in ends.items():
            if (size := sizes.get(name, 0)) < end:
                raise LockstepError(
                    f"{payloads / name}: {size} bytes, expected the {end} before the checkpoint; "
                    f"{self.remedy}"
                )
        for name in sizes:
            os.truncate(payloads / name, ends.get(name, 0))
        return entries

    def takes(self, step: int) -> bool:
        """Return whether the transcript has a snapshot after a step."""
        return self.snapshots.takes(step)

    def asked(self, form: wire.Form) -> Asked:
        """Return what the transcript reads of messages: of those too large to keep, hashes."""
        return Asked.BYTES if form.kept else Asked.COMMITMENT

    def round(
        self, entry: Entry, payloads: dict[int, bytes], others: dict[int, bytes] | None = None
    ) -> None:
        """Append to the transcript a round and its kept payloads; messages gain positions."""
        others = others or {}
        if payloads or others:
            name = f"{self.snapshots.first_round_of_payloads(entry.round.step):05}.bin"
            path = self.folder / "payloads" / name
            self._unflushed.add(path)
            with writes(path), open(path, "ab") as file:

                def keep(messages: dict[int, Message], sent: dict[int, bytes]) -> dict:
                    updated = dict(messages)
                    for peer, message in messages.items():
                        if (data := sent.get(peer)) is None:
                            continue
                        updated[peer] = replace(message, payload=name, offset=file.tell())
                        file.write(data)
                    return updated

                evidence = replace(
                    entry.evidence,
                    messages=keep(entry.evidence.messages, payloads),
                    others=keep(entry.evidence.others, others),
                )
            entry = entry.model_copy(update={"evidence": evidence})
        self._append(entry)

    def flush(self) -> None:
        """Wait until all of the transcript's rounds so far are on disk."""
        for path in sorted(self._unflushed):
            with writes(path), open(path, "ab") as file:
                os.fsync(file.fileno())
        self._unflushed.clear()
        super().flush()

    def snapshot(self, step: int, state: State, remote: Mapping[int, Hash] | None = None) -> None:
        """Write the snapshot after `step`: its hashes and, if it is to be kept whole, the state.

        Equal states of peers, as at the start of a run, are one file with a name for each peer.
        `remote` are the hashes of what peers own that live elsewhere.
        """
        folder = self.folder / "snapshots" / f"{step:05}"
        state_hashes = hashes(step, state, remote)
        if self.snapshots.keeps(step):
            save_tree(folder / "params.safetensors", state.params)
            save_tree(folder / "shared.safetensors", state.shared)
            for peer, own in enumerate(state.own):
                if own is None:
                    continue
                first = state_hashes.own.index(state_hashes.own[peer])
                path = folder / f"own-{peer:03}.safetensors"
                if first == peer:
                    save_tree(path, own)
                else:
                    path.unlink(missing_ok=True)  # left by a run that was killed
                    link(folder / f"own-{first:03}.safetensors", path)
        write_json(folder / "state.json", state_hashes.model_dump(mode="json"))


@dataclass(frozen=True)
class Transcript:
    """A transcript on disk, read when needed."""

    folder: Path

    @cached_property
    def header(self) -> Header:
        """The transcript's header."""
        path = self.folder / "header.json"
        version = read_json(path).get("format")
        if version != FORMAT:
            text = brief(str(version))  # whatever a stranger's file may hold
            reader = READ_BY.get(text, "a later release")
            raise LockstepError(f"{path}: format {text}, expected {FORMAT}; {reader} reads it")
        return validate_json(Header, path.read_text(encoding="utf-8"), str(path))

    @property
    def hash(self) -> str:
        """SHA-256 of the transcript's rounds.jsonl, which holds every commitment."""
        return sha256_file(self.folder / "rounds.jsonl")

    @cached_property
    def rounds(self) -> list[Entry]:
        """The transcript's entry of every round."""
        path = self.folder / "rounds.jsonl"
        with (
            expecting(path, ENTRIES, OSError, UnicodeDecodeError),
            open(path, encoding="utf-8") as file,  # a line at a time: a stranger's may have many
        ):
            return [_entry(line, f"{path}:{n}") for n, line in enumerate(file, 1)]

    @cached_property
    def snapshots(self) -> list[int]:
        """The steps after which the transcript has a snapshot, ascending."""
        names = (folder.name for folder in (self.folder / "snapshots").iterdir())
        return sorted(int(n) for n in names if n.isdecimal() and n == f"{int(n):05}")

    @cached_property
    def kept_snapshots(self) -> list[int]:
        """The steps whose snapshots the transcript keeps whole."""
        return [s for s in self.snapshots if (self._snapshot(s) / "params.safetensors").exists()]

    def hashes(self, step: int, peers: int | None = None) -> StateHashes:
        """Return the transcript's committed hashes at a snapshot, of `peers` peers if given.

        Raises:
          LockstepError: state.json is missing, or does not hold them.
        """
        path = self._snapshot(step) / "state.json"
        with expecting(path, "hashes of a state"):
            recorded = validate_json(StateHashes, path.read_bytes(), str(path))
        if peers is not None and (recorded.step, len(recorded.own)) != (step, peers):
            text = f"is of step {recorded.step} and {len(recorded.own)} peers"
            raise LockstepError(f"{path.name} {text}, expected {step} and {peers}")
        return recorded

    def window(self, window: Window) -> Iterator[Entry]:
        """Return the transcript's rounds of a window."""
        return (entry for entry in self.rounds if entry.round.step in window.rounds)

    def senders(self, window: Window) -> set[int]:
        """Return the peers that sent a message in a window of the transcript."""
        return {peer for entry in self.window(window) for peer in entry.evidence.messages}

    def agreed(self, step: int, like: State) -> tuple[Tree, Tree]:
        """Return the transcript's params and optimizer's shared state after `step`."""
        folder = self._snapshot(step)
        return (
            load_tree(folder / "params.safetensors", like.params),
            load_tree(folder / "shared.safetensors", like.shared),
        )

    def own(self, step: int, peer: int, like: Tree) -> Tree:
        """Return what a peer owns after `step`, by the transcript."""
        return load_tree(self.own_file(step, peer), like)

    def own_before(self, window: Window, peer: int, like: Tree) -> Tree:
        """Return what a peer owned before a window; `like` if the transcript need not have it.

        A peer that takes no part in the window ends it with what it owned before.
        """
        if not self.has_own(window.opening, peer) and self.begins_anew(window, peer):
            return like
        return self.own(window.opening, peer, like)

    def has_own(self, step: int, peer: int) -> bool:
        """Return whether the transcript has a peer's state; a bundle has few."""
        return self.own_file(step, peer).is_file()

    def own_file(self, step: int, peer: int) -> Path:
        """Return the transcript's file of what a peer owns after `step`."""
        return self._snapshot(step) / f"own-{peer:03}.safetensors"

    def begins_anew(self, window: Window, peer: int) -> bool:
        """Return whether a peer's work in the transcript's window needs nothing from before."""
        for entry in self.window(window):
            if peer in entry.round.joined or peer in entry.evidence.silent:
                return True
            if peer in entry.round.peers:
                return False
        return True

    def message(self, message: Message, form: wire.Form) -> Tree:
        """Return a message of the transcript, decoded. The first ones are cached.

        Raises:
          WireError: Its bytes do not decode, or are too many, which are not read.
        """
        wire.check_length(message.bytes, form)
        position = message.payload, message.offset, message.bytes
        if position in self._decoded:
            return self._decoded[position]
        decoded = wire.decode(self.payload(message), form)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(decoded))
        if (len(self._decoded) + 1) * size <= DECODED_BYTES:  # all are of one size
            self._decoded[position] = decoded
        return decoded

    @cached_property
    def _decoded(self) -> dict[tuple, Tree]:
        return {}

    def payload(self, message: Message) -> bytes:
        """Return the transcript's bytes of a message; fewer if its file is cut or missing."""
        try:
            with open(self.folder / "payloads" / message.payload, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = min(message.offset, size)
                file.seek(begin)
                return file.read(min(message.bytes, size - begin))
        except OSError:  # also of a name that is too long, or of a folder
            return b""

    def _snapshot(self, step: int) -> Path:
        return self.folder / "snapshots" / f"{step:05}"
