"""Lies that the lab planted: a seal says which, and a report what audits found of them."""

import json
import shutil
from dataclasses import replace

import pytest

from lockstep.errors import LockstepError, RequestError
from parts.volunteers import joining, keys, layout, planted, stored_verification
from parts.volunteers.chain.draws import AuditDraw
from parts.volunteers.store.schemes import open_store
from parts.volunteers.training.process import Onlooker
from tests import tiny
from tests.errors import refused
from tests.parts.volunteers.test_verification import verify


def opened(lying, folder):
    """A run with two liars, one of whom the lab planted; now its seal is open."""
    store = shutil.copytree(lying / "store", folder / "store")
    lab, seal = keys.read(lying / "lab.pem"), lying / "002" / layout.PLANTED
    (store / layout.PLANTED).write_bytes(b"somebody else's")
    planted.unseal(open_store(f"file://{store}"), lab, seal)
    return store


@pytest.mark.long
def test_a_planted_lie_is_found_and_accuses_nobody_once_the_seal_is_open(lying, tmp_path):
    store = opened(lying, tmp_path)
    bitwise, claims, why_not, _ = verify(store, tmp_path, "0:0", "2:0")
    assert bitwise and len(why_not) == 1
    assert (claims["planted"].kind, claims["windows"].values["repeated"]) == ("sampled", [[0, 0]])
    assert claims["planted"].values == {
        "by_chance": [0, 0, 0, 0], "interval": [0.0, 1.0], "always_drawn": [1, 1, 1, 1],
        "honest": [2, 2, 1, 0], "own_honest": [0, 0, 0, 0], "sealed": 2, "in_time": 1,
    }  # fmt: skip
    with pytest.raises(LockstepError, match="peer 1, round 2") as caught:
        verify(store, tmp_path, "drawn")
    assert "peer 2, round" not in str(caught.value)


@pytest.mark.long
def test_a_seal_that_the_lab_changed_afterwards_is_not_open(lying, tmp_path):
    store = opened(lying, tmp_path)
    there, lab = open_store(f"file://{store}"), keys.read(lying / "lab.pem")
    seal = json.loads((store / layout.PLANTED).read_text())
    changed = seal | {"lies": {key: {"3": "forged"} for key in seal["lies"]}}
    (store / layout.PLANTED).write_text(json.dumps(changed))
    with pytest.raises(LockstepError, match="peer 2, round 3, message: .* is not open"):
        verify(store, tmp_path, "2:0")
    assert verify(store, tmp_path, "0:0")[1]["planted"].kind == "stated"
    with refused(layout.PLANTED, "SHA-256"):
        planted.unseal(there, lab, store / layout.PLANTED)
    shutil.rmtree(store / "rounds" / "00000003")
    with pytest.raises(RequestError, match="round 3 has no link"):
        planted.unseal(there, lab, lying / "002" / layout.PLANTED)


@pytest.mark.long
def test_only_windows_that_chance_could_spare_count_for_the_share(lying, tmp_path):
    """By draws of later windows than the run has, which stand for those of a longer one."""
    address = f"file://{opened(lying, tmp_path)}"
    with tiny.like_a_process():
        followed = joining.follow(address, tmp_path, Onlooker(False, bool))
    _, transcript, chain, _ = followed
    drawn = [chain.draws.drawn.pop()]  # as if peer 2 had sent nothing
    left = {claim.name: claim.values for claim in stored_verification._claims(followed, [])}
    assert left["other_windows"] == {"count": 2}
    chain.draws.drawn += drawn
    own, other, at = chain.draws.drawn[2].key, chain.draws.drawn[0].key, chain.head.seconds
    window = AuditDraw(2, 0, 1, 3, at, own, 0, by_chance=True)
    drawn = [window._replace(number=n) for n in range(3)]
    drawn += [window._replace(number=3, by_chance=False), window._replace(number=4, signer=2)]
    honest = [window._replace(peer=0, number=5, key=other), window._replace(number=6, last=2)]
    spared = [window._replace(number=n) for n in range(7, 14)]
    chain.draws = replace(chain.draws, drawn=drawn + honest, spared=spared)
    accused = {(2, 0): True, (2, 1): False, (2, 3): True, (2, 4): True, (2, 7): True}
    accused |= {(0, 5): True, (2, 6): False}
    found = planted.report(chain, transcript, accused).values
    assert (found["by_chance"], found["interval"]) == ([10, 3, 2, 1], [0.0, 1.0])  # one was not
    assert (found["always_drawn"], found["honest"]) == ([2, 2, 2, 2], [1, 1, 1, 1])
    assert found["own_honest"] == [1, 1, 1, 0]
    found = planted.report(chain, transcript, accused | {(2, 2): False}).values
    assert found["interval"] == pytest.approx([0.0025, 0.4450], abs=1e-4)  # of 1 in 10


def test_a_seal_has_lies_that_only_a_replay_shows(tmp_path):
    key, file = keys.public_text(keys.PrivateKey.generate()), tmp_path / layout.PLANTED
    for lies in ({}, {key: {"1": "crash"}}, {f"a {key}": {"1": "drift"}}, {key: {"0": "drift"}}):
        file.write_text(json.dumps({"lies": lies, "word": "ab" * 32}))
        with refused(file, "lies"):
            planted.read(file)
    file.write_text(json.dumps({"lies": {key: {"17": "drift"}}, "word": "ab" * 32}))
    assert planted.read(file)[0].lies == {key: {17: "drift"}}
