"""What stands in a round's slots is its peer's word alone; and who begins with a state."""

import hashlib
import shutil
from types import SimpleNamespace

import pytest

from lockstep.protocol import driver
from lockstep.protocol.consensus import SharedStore
from lockstep.transcript.windows import Snapshots
from parts.volunteers import keys, layout
from parts.volunteers.bodies import Admission
from parts.volunteers.chain import links
from parts.volunteers.chain.chain import Chain
from parts.volunteers.chain.draws import AuditDraws
from parts.volunteers.chain.links import AskedLink, Head
from parts.volunteers.chain.statements import Admissions
from parts.volunteers.signed import sign
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.store.patient_store import PatientStore
from parts.volunteers.training.late_joiner import LateJoiner
from tests.lockstep.protocol.driver.driven_run import LONG, started
from tests.parts.volunteers.stores import put_at
from tests.parts.volunteers.test_links import RUN, TERMS, counted
from tests.parts.volunteers.test_links import link as round_link

LAB, *KEYS = (keys.PrivateKey.generate() for _ in range(5))
BEGAN, LINK_BYTES = 900, layout.signed_bytes("closed", len(KEYS))


@pytest.fixture
def chain(tmp_path):
    store = FolderStore(tmp_path)
    for peer, key in enumerate(KEYS):
        said = Admission(run=RUN, peer=peer, number=0, key=keys.public_text(key))
        put_at(store, layout.admission(peer, 0), sign(said, LAB), BEGAN - 1)
    admissions = Admissions(store, RUN, LAB.public_key(), len(KEYS))
    admissions.read()
    document, head = SimpleNamespace(slots=len(KEYS)), Head("cd" * 32, BEGAN)
    audits = Snapshots(0, 9, 3), AuditDraws(6.25)
    return Chain(PatientStore(store), document, admissions, TERMS, *audits, head)


def put_link(chain, peer, key=None, **changes):
    """Put a link in a peer's slot, signed by it unless there is another key."""
    body = {"run": RUN, "round": 1, "peer": peer, "previous": "cd" * 32, "asked": ()} | changes
    content = sign(AskedLink(**body), key or KEYS[peer], LINK_BYTES)
    put_at(chain.store.store, layout.of_peer(1, peer, "asked"), content, 1_000)


def test_a_slot_is_its_peers_alone(chain):
    put_at(chain.store.store, layout.of_peer(1, 2, "asked"), b"x" * LINK_BYTES, 1_000)
    put_link(chain, 0, key=KEYS[3])  # signed by another peer, for itself
    put_link(chain, 3, key=KEYS[1])
    put_link(chain, 1)
    assert [*chain.signed_links(1, "asked", BEGAN)] == [1]
    assert [*chain.signed_links(1, "asked", BEGAN, ejected=(1,))] == []


@pytest.mark.parametrize("other", [{"run": "ee" * 32}, {"round": 2}])
def test_a_link_of_another_slot_is_no_word_of_its_signer(chain, other):
    """Whoever may write in a peer's slot could copy it there from another run or round."""
    put_link(chain, 2, **other)
    put_link(chain, 0)
    assert [*chain.signed_links(1, "asked", BEGAN)] == [0]


# ---- Who begins with a state ----


def test_of_several_links_the_one_counts_on_which_most_peers_have_built(chain):
    """One peer has a slot in each round, and so can put a chain of its own."""
    begun = chain.head.sha256

    def put_chain(rounds, seconds):
        previous = begun
        for step, peer in rounds:
            said = round_link({}, peer=peer, round=step, previous=previous)
            content = sign(said, KEYS[peer], LINK_BYTES)
            put_at(chain.store.store, layout.of_peer(step, peer, "closed"), content, seconds + step)
            previous = hashlib.sha256(content).hexdigest()

    put_chain([(1, 3), (2, 3), (3, 3)], BEGAN)  # early, so that it costs it nothing
    put_chain([(1, 0)], BEGAN + 100)
    following = "closed", 1, chain.head, ()
    assert LateJoiner(chain, None, None)._following(*following) is None  # nobody can tell yet
    shutil.rmtree(chain.store.store.root / layout.round_folder(1))
    put_chain([(1, 0), (2, 1), (3, 2)], BEGAN + 200)
    put_chain([(1, 3)], BEGAN)
    assert LateJoiner(chain, None, None)._following(*following).body.peer == 0


def put_closed(chain, peer, said, seconds):
    content = sign(said, KEYS[peer], LINK_BYTES)
    put_at(chain.store.store, layout.of_peer(said.round, peer, "closed"), content, seconds)


BEFORE = driver.ask(started(LONG, 6, reports=SharedStore()), range(5))
ALLOWED = {"applied": ()}  # where nobody sent a message


@pytest.mark.parametrize(
    ("changes", "passed"),
    [
        ({}, 1),
        ({"left": (5,)}, 0),  # no member
        ({"asked": (5,)}, 1),
        ({"asked": (6,)}, 0),  # of 6 peers
        ({"applied": (0,)}, 0),
        ({"messages": {5: links.linked({0: counted(0)})[0][0]}}, 0),  # it was assigned nothing
    ],
)
def test_a_link_that_no_run_allows_ends_what_is_followed(chain, changes, passed):
    said = round_link({}, previous=chain.head.sha256, **ALLOWED | changes)
    put_closed(chain, 0, said, BEGAN + 50)
    assert len([*LateJoiner(chain, None, None)._passed(BEFORE, "44" * 32)]) == passed


@pytest.mark.parametrize(
    ("changes", "key", "counts"),
    [({}, 1, True), ({"base": "00" * 32}, 1, False), ({"span": (0, 0)}, 1, False), ({}, 0, False)],
)
def test_a_link_counts_once_enough_peers_have_trained_on_it_with_their_own_keys(
    chain, changes, key, counts
):
    chain.document = SimpleNamespace(slots=4, payload_bytes=9, run={"config": {"min_clients": 2}})
    passed = SimpleNamespace(progress=BEFORE, link=round_link({}), head=chain.head)
    follows = {"base": passed.link.params}
    for peer, signer, said in ((0, 0, follows), (1, key, follows | changes)):
        assert not LateJoiner(chain, None, None)._is_trained_on(passed)
        body = counted(peer).body.model_copy(update=said)
        record, name = (
            sign(body, KEYS[signer], layout.RECORD_BYTES),
            layout.of_peer(1, peer, "record"),
        )
        put_at(chain.store.store, name, record, BEGAN + 5)
    assert LateJoiner(chain, None, None)._is_trained_on(passed) == counts
