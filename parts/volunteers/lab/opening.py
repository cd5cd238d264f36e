"""What the lab does: it opens a run in a store, and says who has its slots."""

import jax

from lockstep.errors import LockstepError
from lockstep.protocol.attestation import Hash
from lockstep.tables.validation import validate
from lockstep.transcript.state import State
from lockstep.transcript.trees import is_blob, saved_bytes, tree_hash
from lockstep.wire.message import Form
from parts.volunteers import layout
from parts.volunteers.bodies import Admission, CollectedNotice, RunDocument
from parts.volunteers.chain.statements import MOST_STATEMENTS, Admissions, read_run, stated
from parts.volunteers.keys import PrivateKey, PublicKey, parse_public, public_text
from parts.volunteers.signed import MOST_BYTES, sign
from parts.volunteers.store.verbs import Store
from parts.volunteers.tables import volunteers_of
from pipeline.start.set_up import Setup, self_test
from pipeline.version import with_commit


def document_of(setup: Setup, lab: str, tested: Hash | None = None) -> RunDocument:
    """Return what a lab signs to open a run; `lab` is its key, `tested` its self-test's."""
    run, state = setup.run, setup.start.state
    return RunDocument(
        release=release(),
        run=run.model_dump(mode="json", exclude={"runtime"}),  # which is of this machine
        pins={"data": run.pins.data},
        start=tree_hash(jax.device_get((state.params, state.shared))),
        slots=run.peers.count,
        payload_bytes=payload_bytes(setup.programs.form, volunteers_of(run).most_bytes),
        own_bytes=saved_bytes(state.own[0]),
        self_test=tested,
        state_bytes=state_bytes(state),
        lab=lab,
    )


def payload_bytes(form: Form, most: int) -> int:
    """Return the one length of an opened run's payloads.

    Raises:
      LockstepError: it is over `most`.
    """
    if form.bytes_most > most:
        raise LockstepError(
            f"[volunteers] most_bytes is {most}, expected at least {form.bytes_most} for a message "
            "of this run, or a method that sends less"
        )
    return form.bytes_most


def release() -> str:
    """Return the release that opens a run here, with its commit if it is between two releases."""
    return with_commit().removesuffix(".changed")


def state_bytes(state: State) -> int:
    """Return the size of a file of what all agree on in the opened run; 0 where it can change."""
    agreed = {"params": state.params, "shared": state.shared}  # as `States` writes it
    return 0 if any(map(is_blob, jax.tree.leaves(agreed))) else saved_bytes(agreed)


def open_run(store: Store, setup: Setup, key: PrivateKey, planted: Hash | None) -> RunDocument:
    """Open a run in the lab's store: put run.json, with the hash of the lab's seal of any lies.

    Raises:
      LockstepError: there is another run.
    """
    tested = self_test(setup) if setup.run.peers.bits == "everywhere" else None
    named = {"planted": planted}
    document = document_of(setup, public_text(key), tested).model_copy(update=named)
    if not store.create(layout.RUN, sign(document, key)):
        raise LockstepError(
            f"{store.address}/{layout.RUN}: exists already, expected an empty folder"
        )
    return document


def read_own(store: Store, lab: PrivateKey) -> tuple[RunDocument, Hash]:
    """Return the lab's own run.json and its hash, see `read_run`.

    Raises:
      LockstepError: the run is another lab's.
    """
    document, run, _ = read_run(store)
    if public_text(lab) != document.lab:
        raise LockstepError(f"{store.address}: its lab is {document.lab}, expected your key")
    return document, run


def _check_key(admissions: Admissions, public: PublicKey, peer: int) -> None:
    """Check that a key has no other slot in the opened run."""
    for other in range(admissions.count):
        if other != peer and admissions.newest(other) == public:
            raise LockstepError(f"{public_text(public)}: has slot {other}, expected another's KEY")


def put_over(store: Store, name: str, body: Admission | CollectedNotice, lab: PrivateKey) -> bool:
    """Put what the lab signed over what it did not sign; return whether it stands there now.

    What another process of the lab has put there first stays.
    """
    place = body.model_dump(include={"run", "peer", "number"})
    stored = store.look(name, MOST_BYTES)
    if stored is not None and stated(type(body), stored, lab.public_key(), name, place) is None:
        store.remove(name)
    return store.create(name, sign(body, lab))


def admit(
    store: Store, peer: int, public: str | None, key: PrivateKey, because: str | None = None
) -> str:
    """Say for the lab who has a slot of the opened run from now on; return the statement's name.

    Where `because` names what a peer put, or was to put, that is the evidence.
    """
    document, run = read_own(store, key)
    if not 0 <= peer < document.slots:
        raise LockstepError(f"slot {peer}, expected 0 to {document.slots - 1}")
    evidence = (because,) if because is not None and layout.parse(because) else ()
    admissions = Admissions(store, run, key.public_key(), document.slots)
    while True:  # another process of the lab may be the first to say something
        admissions.read()
        if public is not None:
            _check_key(admissions, parse_public(public, "KEY"), peer)
        number = admissions.statements(peer)
        if number >= MOST_STATEMENTS:
            raise LockstepError(f"slot {peer} has {number} statements, expected fewer")
        said = {"run": run, "peer": peer, "number": number, "key": public}
        said |= {"because": because, "evidence": evidence}
        statement = validate(Admission, said, "volunteer admit")
        name = layout.admission(peer, number)
        if put_over(store, name, statement, key):
            return name
