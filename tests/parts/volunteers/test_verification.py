"""A run of volunteers in a store, verified without a key."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import LockstepError, RequestError
from parts.volunteers import joining, keys, layout, stored_verification
from parts.volunteers.bodies import Admission, ShownState
from parts.volunteers.lab import opening
from parts.volunteers.replaying import ReplayRequest, audit_states, replay
from parts.volunteers.signed import sign, unsigned
from parts.volunteers.store.schemes import open_store
from parts.volunteers.training.process import Onlooker
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import print_of
from tests.parts.volunteers.stores import SOON

pytestmark = pytest.mark.long


def verify(store, root, *replays, follows=False):
    """What a reader finds who knows the lab's key."""
    lines, key = [], Path(json.loads((store / "run.json").read_text())["body"]["lab"])
    with tiny.like_a_process():
        found = stored_verification.verify(
            f"file://{store}", root, replays, lines.append, follows=follows, key=key
        )
    bitwise, claims, why_not, _ = found
    return bitwise, {claim.name: claim for claim in claims}, why_not, lines


def followed(store, root):
    return joining.follow(f"file://{store}", root, Onlooker(False, bool))


def test_drawn_windows_of_honest_peers_are_repeated_bit_for_bit(store, tmp_path):
    bitwise, claims, why_not, lines = verify(store, tmp_path, "drawn", follows=True)
    assert (bitwise, why_not) == (True, [])
    assert (claims["links"].values["rounds"], claims["links"].values["messages"]) == (6, 18)
    every = [[peer, window] for window in (0, 1) for peer in range(3)]  # all are newcomers
    assert claims["windows"].values == {"repeated": every, "total": 6}
    assert [one[2] for one in claims["audits"].values["drawn"]] == ["known"] * 3 + ["shown"] * 3
    assert len(lines) == 6 + 2  # of rounds and windows


def test_window_is_repeated_only_from_the_state_that_its_peer_committed_to(
    finished, store, tmp_path
):
    own, said = store / layout.own_folder(3, 1), store / layout.of_peer(3, 1, "shown")
    with refused("--replay 0:2", "below 2", error=RequestError):
        verify(store, tmp_path, "0:2")
    shutil.rmtree(own)
    shutil.copytree(store / layout.own_folder(3, 2), own)  # another's
    other = unsigned(ShownState, (store / layout.of_peer(3, 2, "shown")).read_bytes(), "")
    key = keys.read(finished / "001" / "key.pem")
    said.write_bytes(sign(other.model_copy(update={"peer": 1}), key, layout.SHOWN_BYTES))
    with refused("peer 1", "round 3", "own/00000003/001/", error=RequestError):
        verify(store, tmp_path, "1:1")
    _, claims, why_not, _ = verify(store, tmp_path, "1:0")
    assert claims["windows"].values["repeated"] == [[1, 0]]
    assert claims["other_windows"].values == {"count": 5}
    assert why_not == []


def test_peer_that_does_not_show_its_state_in_time_is_named(store, tmp_path):
    (store / layout.of_peer(3, 1, "shown")).unlink()
    with tiny.like_a_process():
        setup, transcript, chain, _ = followed(store, tmp_path)

    def states():
        audits = audit_states(setup, transcript, chain)
        return {(one.drawn.peer, one.drawn.number): one.state for one in audits}

    assert states()[1, 1] == "awaited"
    seconds = chain.head.seconds + setup.run.volunteers.audit_seconds + 1
    chain.head = replace(chain.head, seconds=seconds)
    found = states()
    assert (found.pop((1, 1)), {*found.values()}) == ("missing", {"known", "shown"})


def test_window_of_another_machine_is_not_comparable_and_accuses_nobody(store, tmp_path):
    def elsewhere(entry):
        messages = entry.evidence.messages.items()
        others = {p: replace(one, environment="ab" * 32) for p, one in messages}
        return entry.model_copy(update={"evidence": replace(entry.evidence, messages=others)})

    with tiny.like_a_process():
        setup, transcript, chain, _ = followed(store, tmp_path)
        transcript.__dict__["rounds"] = [*map(elsewhere, transcript.rounds)]
        one = replay(setup, transcript, chain, ReplayRequest(1, 0))
    assert (one.messages, one.findings) == (3, [])
    assert "abababababab is another machine than this" in one.why


def test_lie_of_a_volunteer_is_found_and_its_record_is_the_evidence(lying, tmp_path):
    store = shutil.copytree(lying / "store", tmp_path / "store")
    record = layout.of_peer(2, 1, "record")
    with pytest.raises(LockstepError, match=f"peer 1, round 2, message: .*{record}"):
        verify(store, tmp_path, "drawn")
    assert "peer" not in "; ".join(verify(store, tmp_path, "0:0")[2])  # no honest peer is named
    there, lab = open_store(f"file://{store}"), keys.read(lying / "lab.pem")
    name = opening.admit(there, 1, None, lab, record)
    ended = unsigned(Admission, (store / name).read_bytes(), name)
    assert (ended.key, ended.evidence) == (None, (record,))


def test_run_in_progress_is_verified_up_to_its_newest_link(finished, store, tmp_path):
    for step in (5, 6):
        shutil.rmtree(store / "rounds" / f"{step:08}")
    _, claims, why_not, _ = verify(store, tmp_path)
    assert claims["links"].values["rounds"] == 4
    lab = keys.public_text(keys.read(finished / "lab.pem"))  # its store could have put any
    assert claims["keys"].values == {"lab": lab}
    assert why_not


def test_address_of_no_run_is_none(tmp_path):
    assert stored_verification.is_run("s3://bucket/run", SOON)
    assert not stored_verification.is_run("owner/name", SOON)
    assert not stored_verification.is_run(str(tmp_path), SOON)


def test_command_says_what_is_known_and_what_a_reader_repeated(finished, store, tmp_path):
    asked = "verify", f"file://{store}", "--root", str(tmp_path), "--json", "--replay", "0:0"
    status, out = print_of(*asked)
    assert (status, json.loads(out)["verified"]) == (3, False)  # by the store's word alone
    (tmp_path / "lab.txt").write_text(keys.public_text(keys.read(finished / "lab.pem")) + "\n")
    asked += "--key", str(tmp_path / "lab.txt")
    status, out = print_of(*asked)
    said = json.loads(out)
    assert (status, said["verified"], said["bitwise"]) == (0, True, True)
    for more, expected in ((("--root", os.devnull), 6), (("--replay", f"{'9' * 5000}:0"), 2)):
        assert print_of(*asked, *more)[0] == expected
    assert said["claims"]["links"]["is"] == "proven"
    assert said["claims"]["windows"]["is"] == "sampled"
    assert said["claims"]["other_windows"]["is"] == "stated"
