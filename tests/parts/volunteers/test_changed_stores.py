"""A finished run's store, changed in every way: each change has its outcome, and none passes.

A change that nobody signed is as if the object was not there; what follows from that is a
contradiction where others have gone on from it, and named where they have not.
"""

import fnmatch
import json
import os
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LockstepError, RequestError
from parts.volunteers import joining, keys, layout, stored_verification
from parts.volunteers.bodies import LeaveNotice, MessageRecord
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.replaying import ReplayRequest
from parts.volunteers.signed import sign, unsigned
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.training.process import Onlooker
from pipeline.net import limits
from tests import tiny
from tests.parts.volunteers import volunteering

pytestmark = pytest.mark.long

STEP, MIDDLE, LAST = 3, 5, 6
PEERS = len(volunteering.FINISHED) - 1


def outcome(store, root, *replays, key=None):
    """The status, and all that is said."""
    key = key or Path(json.loads((store / "run.json").read_text())["body"]["lab"])
    try:
        with tiny.like_a_process():
            _, claims, why_not, share = stored_verification.verify(
                f"file://{store}", root, replays or ("0:0",), bool, follows=False, key=key
            )
    except RequestError as error:
        return 2, str(error)
    except LockstepError as error:
        return 1, str(error)
    said = "; ".join([*why_not, share, *(claim.text for claim in claims)])
    return (3 if why_not else 0), said


def test_a_port_that_nobody_listens_on_takes_as_long_as_the_reader_says(tmp_path, monkeypatch):
    asked, call = [], limits.Attempts.__init__

    def counted(self, network, *more):
        asked.append((network.attempts, network.stall_seconds))
        call(self, network, *more)

    monkeypatch.setattr(limits.Attempts, "__init__", counted)
    network = limits.NetSettings(attempts=1, stall_seconds=0.5)
    with socket.socket() as held:  # bound, and not listened on
        held.bind(("127.0.0.1", 0))
        store = f"http://127.0.0.1:{held.getsockname()[1]}/run"
    assert not stored_verification.is_run(store, network)
    with pytest.raises(limits.UnreachableError):
        stored_verification.verify(store, tmp_path, [], bool, follows=False, network=network)
    assert {*asked} == {(1, 0.5)}


# ---- Objects of a round ----


def place(store, what, step):
    """The object of a kind in a round: of peer 1, or the link that closed it."""
    if what in ("closed", "asked"):
        (path,) = (store / layout.round_folder(step)).glob(f"*.{what}")
        return path
    return store / layout.of_peer(step, 1, what)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 20] ^= 1
    path.write_bytes(content)


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


def anothers(path):
    """Bytes of another peer's, or of another round's link."""
    others = sorted(p for p in path.parent.parent.glob(f"*/*{path.suffix}") if p != path)
    path.write_bytes(others[0].read_bytes())


def junk(path):
    path.write_bytes(b"x" * path.stat().st_size)


def changed(path, change):
    at = path.stat().st_mtime
    change(path)
    if path.exists():
        os.utime(path, (at, at))


@pytest.mark.parametrize(
    ("what", "step", "change"),
    [
        *(("payload", MIDDLE, change) for change in (flipped, Path.unlink, truncated)),
        *(("record", MIDDLE, change) for change in (flipped, Path.unlink, anothers)),
        *(("closed", MIDDLE, change) for change in (flipped, Path.unlink, anothers, junk)),
        *((what, 1, Path.unlink) for what in ("asked", "join")),
    ],
)
def test_what_others_went_on_from_contradicts_the_store(store, tmp_path, what, step, change):
    changed(place(store, what, step), change)
    status, said = outcome(store, tmp_path)
    assert status == 1, said
    assert f"rounds/{step:08}/" in said and "went on" in said


@pytest.mark.parametrize("change", [flipped, Path.unlink])
@pytest.mark.parametrize("what", ["payload", "record", "closed"])
def test_of_the_last_round_nobody_went_on_and_it_is_not_counted(store, tmp_path, what, change):
    changed(place(store, what, LAST), change)
    status, said = outcome(store, tmp_path)
    assert "5 of 6 rounds" in said
    assert status == (0 if what == "closed" else 3), said
    if what != "closed":
        assert "rounds/00000006/" in said and "nobody else went on" in said


@pytest.mark.parametrize("change", [{"params": "ee" * 32}, {"messages": {}}])
def test_a_link_that_a_peer_signs_anew_is_one_that_others_did_not_see(
    finished, store, tmp_path, change
):
    volunteering.sign_anew(finished, place(store, "closed", MIDDLE), **change)
    assert outcome(store, tmp_path)[0] == 1


# ---- Names that nothing follows from ----


JUNK = [
    "rounds/00000005/007.payload",  # of no slot
    layout.of_peer(LAST + 9, 1, "closed"),
    "rounds/00000005/000.asked",
    "rounds/00000005/001.leave",
    "peers/001/001.json",
    "peers/001/999.json",
    "collected/0000.json",
    "addresses/001/00000.sealed",
    "states/00000003/002/index",
    "own/00000003/001/0007",
    "notes.txt",
]


def test_what_nobody_signed_and_what_is_no_file_costs_nobody(store, tmp_path):
    for name, make in (
        *((name, lambda path: path.write_bytes(b"junk")) for name in JUNK),
        ("peers/002/001.json", os.mkfifo),
        (layout.of_peer(LAST + 1, 1, "closed"), Path.mkdir),
        (layout.of_peer(MIDDLE, 1, "asked"), lambda path: path.symlink_to("/dev/zero")),
    ):
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        make(store / name)
    status, said = outcome(store, tmp_path)
    assert (status, "6 of 6 rounds" in said, "count for nothing" in said) == (0, True, False), said


def test_what_a_peer_signed_of_a_round_beyond_the_end_counts_for_nothing(finished, store, tmp_path):
    record = unsigned(MessageRecord, (store / layout.of_peer(LAST, 1, "record")).read_bytes(), "")
    key, name = keys.read(finished / "001" / "key.pem"), layout.of_peer(LAST + 1, 1, "record")
    (store / name).parent.mkdir()
    later = record.model_copy(update={"round": LAST + 1})
    (store / name).write_bytes(sign(later, key, layout.RECORD_BYTES))
    status, said = outcome(store, tmp_path)
    assert (status, "6 of 6 rounds" in said) == (0, True), said
    assert "count for nothing" in said and name in said


@pytest.mark.parametrize("name", ["peers/001/000.json", "run.json"])
@pytest.mark.parametrize("change", [flipped, junk])
def test_what_the_lab_signed_is_its_word_or_nothing(finished, store, tmp_path, name, change):
    lab = Path(keys.public_text(keys.read(finished / "lab.pem")))
    changed(store / name, change)
    assert outcome(store, tmp_path, key=lab)[0] == 1


def test_a_store_without_a_run_cannot_be_asked(finished, store, tmp_path):
    lab = Path(keys.public_text(keys.read(finished / "lab.pem")))
    (store / "run.json").unlink()
    assert outcome(store, tmp_path, key=lab)[0] == 2
    other = Path(keys.public_text(keys.PrivateKey.generate()))
    shutil.copy(finished / "store" / "run.json", store)
    assert outcome(store, tmp_path, key=other)[0] == 1
    for bad in ("ed25519:0", tmp_path / "none.txt"):
        assert outcome(store, tmp_path, key=Path(bad))[0] == 2


# ---- The last link ----


def followed(store, root):
    """How many rounds a reader follows, where a link is the last one that was put."""
    for step in range(STEP + 1, LAST + 1):
        shutil.rmtree(store / layout.round_folder(step))
    with tiny.like_a_process():
        followed = joining.follow(f"file://{store}", root, Onlooker(False, bool))
    return len(followed.transcript.rounds)


@pytest.mark.parametrize(("later", "rounds"), [(-1, STEP), (0, STEP - 1), (5, STEP - 1)])
def test_link_that_names_a_notice_before_it_is_there_is_false_for_ever(
    finished, store, tmp_path, later, rounds
):
    path = place(store, "closed", STEP)
    link, at = unsigned(RoundLink, path.read_bytes(), ""), int(path.stat().st_mtime)
    volunteering.sign_anew(finished, path, at, left=(link.peer,))
    notice = store / layout.of_peer(STEP, link.peer, "leave")
    said = LeaveNotice(run=link.run, round=STEP, peer=link.peer)
    key = keys.read(finished / f"{link.peer:03}" / "key.pem")
    notice.write_bytes(sign(said, key, layout.LEAVE_BYTES))
    os.utime(notice, (at + later, at + later))
    assert followed(store, tmp_path) == rounds


def test_reader_who_does_not_wait_ends_where_a_link_does_not_count(finished, store, tmp_path):
    path = place(store, "closed", STEP)
    peer = 1 - int(path.name[:3]) % 2  # another one's, which is before its turn
    volunteering.sign_anew(finished, path, path.stat().st_mtime - 100, peer=peer)
    path.unlink()
    assert followed(store, tmp_path) == STEP - 1


def test_link_that_names_another_before_it_has_nobody_read_messages_again(
    finished, store, tmp_path, monkeypatch
):
    """It costs its signer nothing: it may come before its turn."""
    path = place(store, "closed", STEP)
    peer = (int(path.name[:3]) + 1) % PEERS
    volunteering.sign_anew(finished, path, 1000, peer=peer, previous="ee" * 32)
    looks, look = [], FolderStore.look

    def counted(self, name, most):
        looks.append(name)
        return look(self, name, most)

    monkeypatch.setattr(FolderStore, "look", counted)
    assert followed(store, tmp_path) == STEP
    payloads = [
        n for n in looks if n in {layout.of_peer(STEP - 1, p, "payload") for p in range(PEERS)}
    ]
    assert len(payloads) == PEERS


# ---- What a drawn peer shows ----


def shown(store, peer):
    return store / layout.of_peer(3, peer, "shown")


def chunk(store, peer, name):
    return store / layout.own_folder(3, peer) / name


@pytest.mark.parametrize(
    "changes",
    [  # by peer, and whether it costs the slot
        [
            (lambda store, peer: junk(shown(store, peer)), False),
            (lambda store, peer: flipped(chunk(store, peer, "0000")), False),
            (lambda store, peer: chunk(store, peer, "index").unlink(), True),
        ],
        [
            (lambda store, peer: junk(chunk(store, peer, "index")), False),
            (lambda store, peer: shutil.copy(shown(store, 2), shown(store, peer)), False),
            (lambda store, peer: chunk(store, peer, "0000").unlink(), True),
        ],
        [(lambda store, peer: shown(store, peer).unlink(), False)],  # the run ended: nobody knows
    ],
)
def test_a_state_costs_a_slot_only_by_what_its_peer_signed(store, tmp_path, changes):
    for peer, (change, _) in enumerate(changes):
        change(store, peer)
    status, said = outcome(store, tmp_path, "drawn")
    assert status == 3
    for peer in range(3):
        assert (f"peer {peer}, window 1" in said) == (peer < len(changes)), said
        costs = [cost for _, cost in changes[peer : peer + 1]]
        assert (f"admit file://{store} {peer}" in said) == any(costs), said


def test_all_that_is_false_is_found_at_once(lying, tmp_path, monkeypatch):
    """Of two liars and a store that somebody changed none hides another."""
    store = shutil.copytree(lying / "store", tmp_path / "store")
    real = stored_verification.replay

    def two(setup, transcript, place, request):
        found = real(setup, transcript, place, request)
        if request.peer == 2:
            findings = real(setup, transcript, place, ReplayRequest(1, 0)).findings
            found = found._replace(findings=[replace(one, peer=2) for one in findings])
        return found

    monkeypatch.setattr(stored_verification, "replay", two)
    status, said = outcome(store, tmp_path, "drawn")
    assert status == 1 and "rounds/00000002/001.record" in said and "/002.record" in said
    changed(place(store, "payload", 3), flipped)
    assert outcome(store, tmp_path, "drawn")[0] == 3  # the window is not over: none was repeated


# ---- All names ----

# Who signs what lies under a name, and whether peer 1 may put it; all others are nothing.
NAMES = [
    (r"run\.json", "the lab", False),
    (r"peers/\d{3}/\d{3}\.json", "the lab", False),
    (r"collected/\d{4}\.json", "the lab", False),
    (r"planted\.json", "run.json, by SHA-256", False),
    (r"addresses/\d{3}/\d{5}\.sealed", "the lab, within what is sealed", False),
    (r"rounds/\d{8}/001\.(record|join|leave|closed|asked|shown)", "the slot's peer", True),
    (r"rounds/\d{8}/001\.payload", "its record, by SHA-256", True),
    (r"states/\d{8}/001/(index|\d{4})", "its link, by the index's SHA-256", True),
    (r"own/\d{8}/001/(index|\d{4})", "its .shown, by the index's SHA-256", True),
    (r"rounds/\d{8}/(000|002)\.\w+", "another peer", False),
    (r"(states|own)/\d{8}/(000|002)/(index|\d{4})", "another peer", False),
]


def test_each_name_of_a_store_has_one_signer_whom_alone_the_printed_policy_lets_put_it(finished):
    page = (tiny.PROJECT / "docs" / "how-to" / "volunteer.md").read_text()
    text = page.split("## Or share credentials")[1].split("```json")[1].split("```")[0]
    puts = [
        resource
        for statement in json.loads(text)["Statement"]
        if statement["Effect"] == "Allow" and "s3:PutObject" in statement["Action"]
        for resource in statement["Resource"]
    ]
    folder = "arn:aws:s3:::BUCKET/RUN/"
    patterns = [one.replace("${aws:PrincipalTag/slot}", "001") for one in puts]
    stored = finished / "store"
    names = [p.relative_to(stored).as_posix() for p in stored.rglob("*") if p.is_file()]
    names += [layout.addresses(1, 0), layout.collected(0), layout.of_peer(1, 1, "leave")]
    names += [layout.admission(1, 1), f"{layout.state_folder(3, 1)}index", layout.PLANTED]
    for name in names:
        if name.startswith("."):
            continue
        (row,) = (row for row in NAMES if re.fullmatch(row[0], name))
        may = any(fnmatch.fnmatchcase(folder + name, pattern) for pattern in patterns)
        assert may == row[2], name
