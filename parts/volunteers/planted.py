"""The lab's own slots may lie, to measure what audits find; a seal says which of them, and when.

The SHA-256 of the seal stands in run.json, which every link and record names: so nobody can choose
afterwards whose lies were planted. Once the run is over the lab puts the seal into the store.
"""

import hashlib
from collections.abc import Mapping
from operator import add
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError, RequestError
from lockstep.files import read_bytes
from lockstep.protocol.attestation import Hash
from lockstep.swarm.faults import FaultSchedule
from lockstep.tables.faults import Fault
from lockstep.tables.table import AsKey, Count, Table
from lockstep.tables.validation import validate_json
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from parts.volunteers import layout
from parts.volunteers.bodies import KeyText, RunDocument
from parts.volunteers.chain.chain import Chain
from parts.volunteers.keys import PrivateKey, public_text
from parts.volunteers.lab.opening import read_own
from parts.volunteers.lab.signing import times_put
from parts.volunteers.signed import MOST_BYTES
from parts.volunteers.store.verbs import Store
from parts.volunteers.tables import runtime_of
from parts.volunteers.training.process import Volunteer
from pipeline.start.set_up import Setup

PeerWindow = tuple[int, int]  # a peer, and its window
PlantedKind = Literal["drift", "forged", "free_rider", "noise", "sign_flip"]


class Seal(Table):
    """planted.json: the lies of the lab's own slots."""

    lies: Annotated[dict[KeyText, dict[Annotated[Count, AsKey], PlantedKind]], Field(min_length=1)]
    """By the key of a slot and the round, their kind as in [faults]: those that every run can have
    and that only a replay shows."""
    word: Hash
    """64 random digits, without which one could try seals until one has the hash."""


def read(file: Path, run: RunDocument | None = None) -> tuple[Seal, bytes, Hash]:
    """Return the lab's seal in a file, its bytes and their hash, which is that of a run."""
    content = read_bytes(file, MOST_BYTES)
    found = hashlib.sha256(content).hexdigest()
    if run is not None and found != run.planted:
        raise LockstepError(f"{file}: its SHA-256 is {found}, expected {run.planted} of run.json")
    return validate_json(Seal, content, str(file)), content, found


def faults_of(volunteer: Volunteer, document: RunDocument, setup: Setup) -> FaultSchedule | None:
    """Return how a volunteer lies by the seal beside its key; None where there is none.

    What lies draw comes from the seal's word: anybody could repeat what the run's seed gives.
    """
    file = Path(runtime_of(setup.run).volunteer_key).with_name(layout.PLANTED)
    if not file.exists():
        return None
    seal, peer = read(file, document)[0], volunteer.peer
    lies = seal.lies.get(public_text(volunteer.key), {}).items()
    faults = [Fault(kind=kind, peer=peer, rounds=(step, step)) for step, kind in lies]
    return FaultSchedule(faults, int(seal.word, 16), setup.programs.form)


def unseal(store: Store, lab: PrivateKey, file: Path) -> str:
    """Put the seal of a run that is over; return its name."""
    document, _ = read_own(store, lab)
    content = read(file, document)[1]
    if not times_put(store, last := document.run["config"]["total_steps"]):
        raise RequestError(f"{store.address}: round {last} has no link, expected a run at its end")
    if not store.create(layout.PLANTED, content):  # what stands there is somebody else's
        store.remove(layout.PLANTED)
        store.create(layout.PLANTED, content)
    return layout.PLANTED


class PlantedReport(NamedTuple):
    """What is known of planted lies; no text where none are."""

    texts: list[str]
    values: dict[str, Any]
    shown: set[tuple[str, int | None, int]]  #: What a replay finds of them: kind, peer and round.


def report(
    chain: Chain, transcript: Transcript, accused: Mapping[PeerWindow, bool]
) -> PlantedReport:
    """Return what the windows that were repeated show, each by whether its peer is accused."""
    from scipy.stats import binomtest

    if (sha256 := chain.document.planted) is None:
        return PlantedReport([], {}, set())
    stored = chain.store.look(layout.PLANTED, MOST_BYTES)
    if stored is None or stored.sha256 != sha256:
        text = "some slots are the lab's own, and lie: the seal that run.json names is not open"
        return PlantedReport([text], {}, set())
    seal = validate_json(Seal, stored.content or b"", layout.PLANTED)
    drawn = {(draw.peer, draw.number) for draw in chain.draws.drawn}
    # windows; of them drawn; repeated here, of those with lies that are drawn; accused of these
    kinds = ("by_chance", "always_drawn", "honest", "own_honest")
    counts, planted = {kind: [0] * 4 for kind in kinds}, set[tuple[str, int | None, int]]()
    for draw in (*chain.draws.drawn, *chain.draws.spared):
        at, lies = (draw.peer, draw.number), seal.lies.get(draw.key, {})
        entries = transcript.window(Window(draw.first, draw.last)) if lies else ()
        steps = {e.round.step for e in entries if draw.peer in e.evidence.messages}
        kind, seen = "own_honest" if draw.key in seal.lies else "honest", at in accused
        if false := steps.intersection(lies):
            signer = chain.admissions.key(draw.signer, draw.seconds)
            is_fair = draw.by_chance and not (signer and public_text(signer) in seal.lies)
            kind, seen = kinds[not is_fair], seen and at in drawn
            planted |= {("message", draw.peer, step) for step in false}
        one = 1, at in drawn, seen, seen and accused[at]
        counts[kind] = [*map(add, counts[kind], one)]
    sealed, (chance, always, honest, own) = sum(map(len, seal.lies.values())), counts.values()
    low, high, share = 0.0, 1.0, "and no share, of none or where not all drawn were repeated"
    if chance[0] and chance[1] == chance[2]:
        low, high = binomtest(chance[3], chance[0]).proportion_ci()  # by Clopper and Pearson
        share = f"so that audits find {low:.3f} to {high:.3f} of such windows (95 %)"
    text = (
        "windows with lies in time that the lab planted by a seal that the first link names "
        f"already: {chance[0]} that chance could spare, {chance[1]} drawn, {chance[2]} of "
        f"these repeated here, {chance[3]} found, {share}; {always[0]} others, {always[2]} "
        f"repeated, {always[3]} found; without such lies: {honest[2]} of {honest[0]} repeated, "
        f"{honest[3]} accused, and {own[2]} of {own[0]} of the lab's own, {own[3]} accused; of "
        f"{sealed} lies in the seal {sealed - len(planted)} never came to be, or came too late"
    )
    lies = {"interval": [low, high], "sealed": sealed, "in_time": len(planted)}
    return PlantedReport([text], counts | lies, planted)
