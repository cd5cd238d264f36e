"""Stage train asks here who trains in a run of volunteers, and over which store."""

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.swarm.peers import SimulatedPeers
from lockstep.swarm.swarm import Swarm
from lockstep.swarm.training_loop import Start, StartingPoint
from lockstep.transcript.observer import Observer
from lockstep.transcript.transcript import Writer
from parts.volunteers import keys, slots
from parts.volunteers.addresses.ahead import AddressReader, open_addressed
from parts.volunteers.audits.draws import AuditDraws
from parts.volunteers.audits.showing import Showing
from parts.volunteers.bodies import RunDocument
from parts.volunteers.chain import opening
from parts.volunteers.chain.admissions import Admissions
from parts.volunteers.chain.links import Head, Terms
from parts.volunteers.chain.place import LONGEST, Onlooker, RunInStore, Volunteer
from parts.volunteers.chain.signed_rounds import FOLDER, SignedRounds
from parts.volunteers.keys import parse_public
from parts.volunteers.store.schemes import open_store
from parts.volunteers.store.web_store import WebStore
from parts.volunteers.tables import runtime_of, volunteers_of
from parts.volunteers.training.from_state import LateJoiner
from parts.volunteers.training.rounds import StoredSwarm
from parts.volunteers.training.states import States
from pipeline.start.begin import Setup, self_test

WATCH: ContextVar[Onlooker | None] = ContextVar("WATCH", default=None)
"""How this process follows a run, if it only looks on."""


@dataclass(frozen=True)
class StoredRun:
    """A run over a store.

    start: The state before the first round, with what the peer here owns alone.
    place: The run in its store, which a checkpoint keeps the newest link of.
    """

    start: Start
    place: RunInStore
    volunteer: Volunteer | None
    setup: Setup

    @property
    def observers(self) -> list[Observer]:
        """The run's place, which a checkpoint keeps."""
        return [self.place]

    def begin(self, start: StartingPoint, peers: SimulatedPeers, writer: Writer) -> StartingPoint:
        """Return where a run goes on; with `[runtime] from_state` it begins after a state."""
        self.place.restore(start.extras)
        self.place.signed = SignedRounds(writer.folder.parent / FOLDER)
        if start.extras is not None or not runtime_of(self.setup.run).from_state:
            return start
        states = self._states(writer.folder.parent)
        return LateJoiner(self.place, states, self.setup.settings).begin(start, peers, writer)

    def swarm(self, *arguments: Any, spool: Path, **more: Any) -> Swarm:
        """Return the peers of the run, from the arguments of `Swarm`."""
        if self.volunteer is not None:
            place, folder = self.place, spool / "transcript"
            place.shows = Showing(place.store, place.run, self.volunteer, folder, self.start.step)
        takes = self.setup.run.snapshots(self.start.step).takes
        leading = self.place, self.volunteer, takes, self._states(spool)
        return StoredSwarm(*leading, *arguments, spool=spool, **more)

    def _states(self, folder: Path) -> States:
        return States(self.place.store, self.place.document, folder)


def stored_run(setup: Setup) -> StoredRun:
    """Return what a run of volunteers goes over."""
    run = setup.run
    if not (address := runtime_of(run).store):
        raise LockstepError(
            '[runtime] store = "", expected the address of a store with links.clock = "store"'
        )
    store = open_store(address, run.runtime)
    document, sha256, stored = opening.read_run(store)
    lab = parse_public(document.lab, store.address)
    _check(setup, document, store.address)
    admissions = Admissions(store, sha256, lab, document.slots)
    volunteer = _volunteer(setup, admissions)
    if volunteer is not None:
        _test(setup, document, store.address)
    if volunteer is not None and isinstance(store, WebStore) and store.endpoint.hides:
        reader = AddressReader.of(volunteer.peer, volunteer.key.public_key(), sha256, document)
        store = open_addressed(store.address, reader, volunteer.key, lab, run.runtime)
        admissions = Admissions(store, sha256, lab, document.slots)
    admissions.objects[slots.RUN] = stored
    config, volunteers = run.config, volunteers_of(run)
    terms = Terms(
        config.max_round_train_time,
        volunteers.settle_seconds,
        config.waiting_for_members_extra_time,
        volunteers.stagger_seconds + LONGEST,
    )
    head = Head(sha256, stored.seconds)
    place = RunInStore(
        store, document, sha256, admissions, terms, head,
        run.snapshots(setup.start.step), AuditDraws(volunteers.replay_percent),
        volunteers.audit_seconds, WATCH.get(),
    )  # fmt: skip
    if place.watch is not None:
        place.watch.place = place
    local = () if volunteer is None else (volunteer.peer,)
    state = setup.start.state
    own = tuple(tree if peer in local else None for peer, tree in enumerate(state.own))
    start = setup.start._replace(state=state._replace(own=own))
    return StoredRun(start, place, volunteer, setup)


def _check(setup: Setup, document: RunDocument, address: str) -> None:
    """Check that this machine would do what the run asks for."""
    local = opening.document_of(setup, document.lab)
    fields = "release", "run", "pins", "start", "slots", "payload_bytes", "own_bytes", "state_bytes"
    for name in fields:
        actual, expected = getattr(local, name), getattr(document, name)
        if actual == expected:
            continue
        if name == "run":
            tables = [table for table in expected if actual.get(table) != expected[table]]
            raise LockstepError(
                f"[{tables[0]}] differs from that of the run in {address}, expected the same table"
            )
        raise LockstepError(f"{name} is {actual!r} here, expected {expected!r} as in {address}")


def _test(setup: Setup, document: RunDocument, address: str) -> None:
    """Check that this machine takes a step as the lab's did, where all are to do so."""
    if document.self_test is not None and (result := self_test(setup)) != document.self_test:
        raise LockstepError(
            f"a first step here gives {result[:12]}, expected {document.self_test[:12]} as in "
            f'{address}: with [peers] bits = "everywhere" all machines give the same bits'
        )


def _volunteer(setup: Setup, admissions: Admissions) -> Volunteer | None:
    """Return who trains here, by its key."""
    name = runtime_of(setup.run).volunteer_key
    if not name:
        return None
    key = keys.read(Path(name))
    admissions.read()
    return Volunteer(admissions.slot_of(key.public_key()), key, setup.environment())
