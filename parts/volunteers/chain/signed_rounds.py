"""What people signed in a run, kept beside its transcript, so that it is checked without a store.

    signed/admitted.json     run.json, and who was admitted
    signed/00000123.json     the links of round 123 that count, and the records that they name

Each file maps names in the store to when the object was put, in seconds, and to its text without
the newlines after it. Whoever knows the lab's key sees here who signed what.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lockstep.errors import LockstepError, brief
from lockstep.files import read_json, write_json
from lockstep.protocol.attestation import Hash
from lockstep.transcript.transcript import Transcript
from parts.volunteers import layout
from parts.volunteers.bodies import LATEST, MessageRecord
from parts.volunteers.chain.links import AskedLink, Head, RoundLink
from parts.volunteers.chain.statements import Admissions, read_run
from parts.volunteers.keys import parse_public
from parts.volunteers.signed import FILLING, opened
from parts.volunteers.store.verbs import MOST_NAMES, StoredObject
from pipeline.stage.untrusted_files import check_regular

FOLDER, ADMITTED = "signed", "admitted"
KINDS = "asked", "closed", "record"
Signed = TypeVar("Signed", AskedLink, RoundLink, MessageRecord)


class SignedRounds:
    """Writes what counts of what people signed in a run, a file a round."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._objects = dict[str, StoredObject]()  # of rounds that are not over

    def saw(self, name: str, stored: StoredObject | None) -> None:
        """Remember a signed object of a round in progress."""
        slot = layout.parse(name)
        if stored is not None and slot is not None and slot.what in KINDS:
            self._objects[name] = stored

    def keep(self, link: RoundLink, sha256: Hash, admitted: Mapping[str, StoredObject]) -> None:
        """Write a signed round, whose link has this SHA-256, and all that was admitted so far."""
        entries = *link.messages.values(), *link.rejected.values()
        hashes = {sha256, link.previous, *(item.record for item in entries)}
        folder = layout.round_folder(link.round)
        current = {name: item for name, item in self._objects.items() if name.startswith(folder)}
        self._objects = {name: item for name, item in self._objects.items() if name not in current}
        current = {n: item for n, item in current.items() if item.sha256 in hashes}
        for file, objects in ((f"{link.round:08}", current), (ADMITTED, admitted)):
            texts = {
                n: [o.seconds, (o.content or b"").rstrip().decode()] for n, o in objects.items()
            }
            write_json(self.folder / f"{file}.json", texts)


class CheckedSignatures(NamedTuple):
    """What was found in a run, of which each link is signed."""

    lab: str  #: The lab's key, as the run names it.
    rounds: int
    signed: int  #: Messages of which the record is here, and is signed.
    messages: int  #: All messages.


def check(trained: Path) -> CheckedSignatures:
    """Check who signed each link of data/trained, and each record that is there.

    Raises:
      LockstepError: one is not signed by the peer that had its slot, or the transcript differs.
    """
    check_regular(trained)
    folder, transcript = trained / FOLDER, Transcript(trained / "transcript")
    store = _Kept(folder / f"{ADMITTED}.json")
    document, run, stored = read_run(store)
    admissions = Admissions(store, run, parse_public(document.lab, str(folder)), document.slots)
    admissions.read()
    head, signed, messages = Head(run, stored.seconds), 0, 0
    for entry in transcript.rounds:
        round_ = _Round(folder / f"{entry.round.step:08}.json", admissions, entry.round.step)
        evidence, decision = entry.evidence, entry.decision
        head, link = round_.links(head)
        sent = {
            p: (message.commitment, message.bytes, evidence.arrivals.get(p))
            for p, message in evidence.messages.items()
        }
        linked = {p: (m.commitment, m.bytes, m.seconds) for p, m in link.messages.items()}
        liars = {*link.false_links, *link.messages}.difference(link.applied)
        round_.same("messages", linked, sent)
        round_.same("asked", round_.askers, entry.asked)
        round_.same("left", link.left, entry.left)
        round_.same("false_links", link.false_links, evidence.false_links)
        round_.same("applied", link.applied, tuple(decision.applied))
        round_.same("ejected", liars, {*decision.ejected})
        if round_.step in transcript.snapshots:
            hashes = transcript.hashes(round_.step)
            round_.same("state", (link.params, link.shared), (hashes.params, hashes.shared))
        signed, messages = signed + round_.records(link), messages + len(sent)
    if transcript.rounds and transcript.rounds[-1].round.step not in transcript.snapshots:
        raise LockstepError(f"{transcript.folder}: no state after the last round, expected one")
    return CheckedSignatures(document.lab, len(transcript.rounds), signed, messages)


class _Kept:
    """The signed objects of a store that a file has."""

    def __init__(self, path: Path):
        self.address, self.objects = str(path), _read(path)

    def look(self, name: str, most: int) -> StoredObject | None:
        """Return a signed object of the file; its time is the file's word."""
        stored = self.objects.get(name)
        if stored is not None and len(stored.content or b"") > most:
            return StoredObject(None, stored.seconds)
        return stored

    def names(self, prefix: str, most: int = MOST_NAMES) -> dict[str, int]:
        """Return all names of signed objects below a folder, which is in memory already."""
        return {n: stored.seconds for n, stored in self.objects.items() if n.startswith(prefix)}


class _Round:
    """What people signed in a round."""

    def __init__(self, path: Path, admissions: Admissions, step: int):
        self.path, self.admissions, self.step = path, admissions, step
        self.objects, self.began = _read(path), 0
        self.askers: tuple[int, ...] = ()  # who asked in the round before, or for this one

    def same(self, what: str, actual: Any, expected: Any) -> None:
        """Refuse what of a signed round is not as expected."""
        if actual != expected:
            raise LockstepError(f"{self.path}: {what}: {actual}, expected {expected}")

    def links(self, head: Head) -> tuple[Head, RoundLink]:
        """Return the chain's head after the signed round, and the link that closed it."""
        link, self.askers = None, head.asked
        for model in (AskedLink, RoundLink):
            names = layout.names_by_peer(self.objects, what := model.slot)
            if len(names) > 1:
                raise LockstepError(f"{self.path}: {len(names)} links {what}, expected one")
            for peer, name in names.items():
                self.began = head.seconds
                at = self.objects[name].seconds if what == "asked" else head.seconds
                link, sha256 = self._opened(model, name, peer, at)
                self.same(f"{name}: previous", link.previous, head.sha256)
                if isinstance(link, AskedLink):
                    self.askers = (*self.askers, *link.asked)
                head = Head(sha256, self.objects[name].seconds, link.asked)
        if not isinstance(link, RoundLink):
            raise LockstepError(f"{self.path}: no link closes the round, expected one")
        return head, link

    def records(self, link: RoundLink) -> int:
        """Check the signed records of a link's messages; return how many are here."""
        names = layout.names_by_peer(self.objects, "record")
        peers = [*names.keys() & link.messages.keys()]
        for peer in peers:
            message = link.messages[peer]
            body, sha256 = self._opened(MessageRecord, names[peer], peer, self.began)
            actual, expected = (sha256, body.commitment), (message.record, message.commitment)
            self.same(names[peer], actual, expected)
        return len(peers)

    def _opened(self, model: type[Signed], name: str, peer: int, at: int) -> tuple[Signed, Hash]:
        """Return what stands under a name, signed by the slot's holder then, and its SHA-256."""
        key, where = self.admissions.key(peer, at), f"{self.path}: {name}"
        if key is None:
            raise LockstepError(
                f"{where}: nobody had slot {peer} then, expected an object of a peer that was "
                "admitted"
            )
        length = layout.signed_bytes(model.slot, self.admissions.count)
        content = (self.objects[name].content or b"").ljust(length, FILLING)
        body = opened(model, content, key, where, length)
        self.same(name, body.place, (self.admissions.run, self.step, peer))
        return body, hashlib.sha256(content).hexdigest()


def _read(path: Path) -> dict[str, StoredObject]:
    objects = {}
    for name, item in read_json(path).items():
        match item:
            case [int(at), str(text)] if 0 <= at < LATEST:
                objects[name] = StoredObject(text.encode(errors="replace"), at)
            case _:
                raise LockstepError(
                    f"{path}: {brief(name)}: found {brief(repr(item))}, expected seconds and a text"
                )
    return objects
