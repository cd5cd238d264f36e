"""Stage train asks here who trains in a run of volunteers, and over which store."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError
from lockstep.protocol.driver import RoundSettings, RunProgress
from lockstep.swarm.faults import FaultSchedule
from lockstep.swarm.peers import Rows, SimulatedPeers
from lockstep.swarm.training_loop import Start, StartingPoint
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from lockstep.transcript.transcript import Writer
from parts.volunteers import keys, layout, planted
from parts.volunteers.bodies import RunDocument
from parts.volunteers.chain import statements
from parts.volunteers.chain.chain import Chain
from parts.volunteers.chain.draws import AuditDraws
from parts.volunteers.chain.links import Head, Terms
from parts.volunteers.chain.signed_rounds import FOLDER, SignedRounds
from parts.volunteers.chain.statements import Admissions
from parts.volunteers.keys import parse_public
from parts.volunteers.lab import opening
from parts.volunteers.store.addresses import AddressReader, open_addressed
from parts.volunteers.store.patient_store import LONGEST, PatientStore
from parts.volunteers.store.schemes import open_store
from parts.volunteers.store.web_store import WebStore
from parts.volunteers.tables import runtime_of, volunteers_of
from parts.volunteers.training.late_joiner import LateJoiner
from parts.volunteers.training.process import Onlooker, Process, Volunteer
from parts.volunteers.training.rounds import StoredSwarm
from parts.volunteers.training.states import OwnStates, States
from pipeline.start.set_up import Setup, self_test


@dataclass
class StoredRun(Observer):
    """A run of volunteers over a store.

    start: The state before the first round, with what the peer here owns alone.
    process: The run's links, and who trains here.
    own_states: Puts what the volunteer here owned, where it is drawn; None where nobody trains.
    """

    start: Start
    process: Process
    setup: Setup
    own_states: OwnStates | None = None

    @property
    def observers(self) -> list[Observer]:
        """Who follows the stored run's rounds: this keeps how far the links were followed."""
        return [self]

    def begin(self, start: StartingPoint, peers: SimulatedPeers, writer: Writer) -> StartingPoint:
        """Return where a stored run goes on; with `[runtime] from_state` it is after a state."""
        chain, folder = self.process.chain, writer.folder.parent
        chain.restore(start.extras)
        chain.signed = SignedRounds(folder / FOLDER)
        if start.extras is not None or not runtime_of(self.setup.run).from_state:
            return start
        states = self._states(folder)
        return LateJoiner(chain, states, self.setup.settings).begin(start, peers, writer)

    def swarm(
        self,
        settings: RoundSettings,
        peers: SimulatedPeers,
        data_of: Callable[[int], Rows],
        faults: FaultSchedule,
        *,
        spool: Path,
        **more: Any,
    ) -> StoredSwarm:
        """Return the stored run's peers, from the arguments of `Swarm`."""
        volunteer, chain = self.process.volunteer, self.process.chain
        if volunteer is not None:
            transcript, store = spool / "transcript", chain.store
            self.own_states = OwnStates(store, chain.run, volunteer, transcript, self.start.step)
            faults = planted.faults_of(volunteer, chain.document, self.setup) or faults
        own = self.process, self.setup.run.snapshots(self.start.step).takes, self._states(spool)
        return StoredSwarm(*own, settings, peers, data_of, faults, spool=spool, **more)

    def saves(self) -> dict[str, Any]:
        """Return how far the stored run's links were followed, for a checkpoint."""
        return self.process.chain.to_json()

    def kept(self, entry: Entry, progress: RunProgress) -> None:
        """Put what the stored run's volunteer owned, where it was drawn lately."""
        if self.own_states is None:
            return
        chain, seconds = self.process.chain, volunteers_of(self.setup.run).audit_seconds
        for draw in chain.draws.drawn:
            if chain.head.seconds <= draw.seconds + seconds:
                self.own_states.begin(draw)
        if entry.round.step == chain.snapshots.end:
            self.own_states.wait()

    def _states(self, folder: Path) -> States:
        chain = self.process.chain
        return States(chain.store.store, chain.document, folder)


def stored_run(setup: Setup, onlooker: Onlooker | None = None) -> StoredRun:
    """Return the run of volunteers to take part in or, with an `onlooker`, to look on."""
    run = setup.run
    if not (address := runtime_of(run).store):
        raise LockstepError(
            '[runtime] store = "", expected the address of a store with links.clock = "store"'
        )
    store = open_store(address, run.runtime)
    document, sha256, stored = statements.read_run(store)
    lab = parse_public(document.lab, store.address)
    _check_is_the_stored_run(setup, document, store.address)
    admissions = Admissions(store, sha256, lab, document.slots)
    volunteer = _volunteer(setup, admissions)
    if volunteer is not None:
        _check_step(setup, document, store.address)
    if volunteer is not None and isinstance(store, WebStore) and store.endpoint.hides:
        reader = AddressReader(volunteer.peer, volunteer.key.public_key(), sha256, document)
        store = open_addressed(store.address, reader, volunteer.key, lab, run.runtime)
        admissions = Admissions(store, sha256, lab, document.slots)
    admissions.objects[layout.RUN] = stored
    volunteers = volunteers_of(run)
    terms = Terms(
        setup.settings.closing.limit,
        volunteers.settle_seconds,
        run.config.waiting_for_members_extra_time,
        volunteers.stagger_seconds + LONGEST,
    )
    head, draws = Head(sha256, stored.seconds), AuditDraws(volunteers.replay_percent)
    snapshots = run.snapshots(setup.start.step)
    chain = Chain(PatientStore(store), document, admissions, terms, snapshots, draws, head)
    local = () if volunteer is None else (volunteer.peer,)
    state = setup.start.state
    own = tuple(tree if peer in local else None for peer, tree in enumerate(state.own))
    start = setup.start._replace(state=state._replace(own=own))
    return StoredRun(start, Process(chain, volunteer, onlooker), setup)


def _check_is_the_stored_run(setup: Setup, document: RunDocument, address: str) -> None:
    """Check that this machine would do what the stored run asks for."""
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


def _check_step(setup: Setup, document: RunDocument, address: str) -> None:
    """Check that this machine takes a step as the stored run's lab did, where all are to do so."""
    if document.self_test is not None and (result := self_test(setup)) != document.self_test:
        raise LockstepError(
            f"a first step here gives {result[:12]}, expected {document.self_test[:12]} as in "
            f'{address}: with [peers] bits = "everywhere" all machines give the same bits'
        )


def _volunteer(setup: Setup, admissions: Admissions) -> Volunteer | None:
    """Return who trains here in the stored run, by its key."""
    name = runtime_of(setup.run).volunteer_key
    if not name:
        return None
    key = keys.read(Path(name))
    admissions.read()
    return Volunteer(admissions.slot_of(key.public_key()), key, setup.environment())
