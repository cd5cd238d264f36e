"""Who signed what of a run is shown by data/trained alone."""

import json
import os
import shutil

import pytest

from lockstep.errors import LockstepError
from parts.volunteers import keys
from parts.volunteers.chain import signed_rounds
from tests.parts.publication.published_run import print_of
from tests.parts.volunteers import volunteering

ROUNDS, PEERS = 6, 3


@pytest.fixture
def trained(finished, tmp_path):
    return shutil.copytree(finished / "follower" / "data" / "trained", tmp_path / "trained")


@pytest.mark.parametrize("name", volunteering.FINISHED)
def test_each_link_and_each_message_is_signed_by_who_had_the_slot(finished, name):
    lab = keys.public_text(keys.read(finished / "lab.pem"))
    found = signed_rounds.check(finished / name / "data" / "trained")
    assert found == (lab, ROUNDS, ROUNDS * PEERS, ROUNDS * PEERS)


def changed(trained, name, step, change):
    path = trained / "signed" / f"{step:08}.json"
    found = json.loads(path.read_text())
    (key,) = [one for one in found if one.endswith(name)]
    found[key][1] = change(found[key][1])
    path.write_text(json.dumps(found))


def give_slot_of_another(trained):
    """Have the lab's statement say that another had slot 1."""
    path = trained / "signed" / "admitted.json"
    found = json.loads(path.read_text())
    found["peers/001/000.json"] = found["peers/002/000.json"]
    path.write_text(json.dumps(found))


def test_what_was_changed_is_found(trained):
    cases = {
        "001.record": lambda text: text.replace('"loss":', '"loss":1'),
        ".closed": lambda text: text.replace('"applied":[0,1,2]', '"applied":[0,1]'),
    }
    whole = shutil.copytree(trained, trained.with_name("whole"))
    for name, change in cases.items():
        changed(trained, name, 4, change)
        with pytest.raises(LockstepError, match=f"00000004.*{name}.*signature"):
            signed_rounds.check(trained)
        shutil.rmtree(trained)
        shutil.copytree(whole, trained)
    give_slot_of_another(trained)
    with pytest.raises(LockstepError, match="nobody had slot 1"):
        signed_rounds.check(trained)


@pytest.mark.parametrize("one", [None, [1], ["1", "text"], [-1, "text"], [2**70, "text"], [1, 2]])
def test_a_file_of_another_form_is_refused_in_one_line(trained, one):
    (trained / "signed" / "admitted.json").write_text(json.dumps({"run.json": one}))
    with pytest.raises(LockstepError, match="admitted.json: run.json: found") as caught:
        signed_rounds.check(trained)
    assert "\n" not in str(caught.value)


def test_a_link_of_another_round_is_found(trained):
    third, fourth = (trained / "signed" / f"{step:08}.json" for step in (3, 4))
    fourth.write_bytes(third.read_bytes().replace(b"rounds/00000003", b"rounds/00000004"))
    with pytest.raises(LockstepError, match="00000004"):
        signed_rounds.check(trained)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("asked", lambda said: said.update(asked=[0])),
        ("left", lambda said: said.update(left=[1])),
        ("false_links", lambda said: said["evidence"].update(false_links=[1])),
        ("ejected", lambda said: said["decision"].update(ejected={"1": "false link"})),
        ("applied", lambda said: said["decision"].update(applied=[0, 1])),
        ("messages", lambda said: said["evidence"]["arrivals"].update({"1": 0.5})),
    ],
)
def test_decision_that_no_link_has_is_found(trained, what, change):
    path = trained / "transcript" / "rounds.jsonl"
    lines = path.read_text().splitlines()
    said = json.loads(lines[3])
    change(said)
    path.write_text("\n".join([*lines[:3], json.dumps(said), *lines[4:]]) + "\n")
    with pytest.raises(LockstepError, match=f"00000004.json: {what}: "):
        signed_rounds.check(trained)


def test_states_that_were_taken_away_are_missed(trained):
    for folder in (trained / "transcript" / "snapshots").iterdir():
        shutil.rmtree(folder)
    with pytest.raises(LockstepError, match="no state after the last round"):
        signed_rounds.check(trained)


def test_two_links_of_a_round_are_one_too_many(trained):
    path = trained / "signed" / "00000004.json"
    found = json.loads(path.read_text())
    (name,) = [one for one in found if one.endswith(".closed")]
    other = next(n for p in range(3) if (n := f"rounds/00000004/{p:03}.closed") != name)
    path.write_text(json.dumps(found | {other: found[name]}))
    with pytest.raises(LockstepError, match="2 links closed"):
        signed_rounds.check(trained)


def test_pipe_in_the_place_of_a_file_holds_nobody_up(trained):
    path = trained / "transcript" / "rounds.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LockstepError, match="not a regular file"):
        signed_rounds.check(trained)


def test_names_in_a_file_make_no_files(trained):
    path = trained / "signed" / "admitted.json"
    names = {f"../{n}": [1, "x"] for n in range(3)} | {"peers/000/000.json/x": [1, "x"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    assert signed_rounds.check(trained).rounds == ROUNDS


def test_command_says_how_many_are_signed_and_by_whose_word(finished):
    status, said = print_of("volunteer", "signatures", "--root", str(finished / "001"))
    assert status == 0
    assert f"{ROUNDS * PEERS} of {ROUNDS * PEERS}" in said
    assert keys.public_text(keys.read(finished / "lab.pem")) in said
