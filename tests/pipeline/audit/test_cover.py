"""A small lie, which gets nowhere, is no cover for a larger one in the same window."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.protocol import consensus
from lockstep.protocol.closing import slot
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import save_tree, tree_hash
from pipeline import runfile
from pipeline.audit import bundle
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from tests.lockstep.swarm.simulated import PEERS, lab, run_of
from tests.pipeline.audit.edited.audited_run import edit_round, record

pytestmark = pytest.mark.long

LIAR, MIDDLE = 2, 4  # the step between the two windows


def first_window(form: str, run: runfile.Run, folder: Path) -> list[Finding]:
    """What a replay of all peers finds in the first window, after an audit that finds nothing
    against the author."""
    setup, transcript = lab(form).setup(run), Transcript(folder)
    assert all(f.peer is not None and not f.applied for f in audit(setup, transcript))
    window = run.snapshots().windows[0]
    assert window.last == MIDDLE
    return Replay(setup, transcript).window(window, range(PEERS), lambda: None).findings


def blamed(findings: list[Finding]) -> list[tuple[int, int | None, str, bool]]:
    return [(f.round, f.peer, f.kind, f.applied) for f in findings]


def plant(form: str, folder: Path, part: str, change: Callable[[Tree], Tree]) -> None:
    """Put another state into the snapshot between the windows, with its hash."""
    snapshot, like = folder / f"snapshots/{MIDDLE:05}", lab(form).begin.state
    transcript = Transcript(folder)
    is_own = part == "own"
    if is_own:
        tree, name = transcript.own(MIDDLE, LIAR, like.own[LIAR]), f"own-{LIAR:03}"
    else:
        tree, name = transcript.agreed(MIDDLE, like)[1], part
    planted = change(tree)
    save_tree(snapshot / f"{name}.safetensors", planted)

    def hashed(state: dict) -> None:
        if is_own:
            state["own"][LIAR] = tree_hash(planted)
        else:
            state[part] = tree_hash(planted)

    record(folder, MIDDLE, hashed)


def larger(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x + np.ones_like(x), tree)


def test_a_false_ruling_of_an_honest_sender_does_not_end_the_replay(tmp_path, monkeypatch):
    """Peer 4 accuses another in vain, and one of those who rule agrees with neither."""
    drawn, found = consensus.checked, list[int]()
    monkeypatch.setattr(consensus, "checked", lambda r, e: drawn(r, e) if r.step == 1 else {})
    accuser = {"kind": "false_verifier", "peer": 4, "rounds": [1, 1]}
    liar = {"kind": "sign_flip", "peer": LIAR, "rounds": [MIDDLE, MIDDLE]}
    run = run_of("dense", accuser, liar, verified=True)
    lab("dense").train(run, tmp_path)

    def rule(entry: dict) -> None:
        (ruling,) = entry["rulings"]
        found.append(next(p for p in (3, 5) if p != ruling["peer"]))
        assert found[0] in entry["decision"]["applied"]
        ruling["found"][str(found[0])] = ["0" * 64] * 2

    edit_round(tmp_path, 1, rule)
    assert blamed(first_window("dense", run, tmp_path)) == [
        (1, 4, "check", False), (1, *found, "check", False), (MIDDLE, LIAR, "message", True),
    ]  # fmt: skip


def late_lie(step: int) -> list[dict]:
    fault = {"peer": LIAR, "rounds": [step, step]}
    return [{"kind": "late", "size": 100, **fault}, {"kind": "sign_flip", **fault}]


def test_a_lie_that_travels_and_is_never_merged_does_not_end_the_replay(tmp_path):
    run = run_of("late", *late_lie(1), {"kind": "sign_flip", "peer": 5, "rounds": [3, 3]})
    lab("late").train(run, tmp_path)
    first, _, third, _ = Transcript(tmp_path).rounds[:MIDDLE]
    assert LIAR in first.decision.travelling and slot(LIAR, 1) in third.decision.late
    assert not lab("late").programs.form.kept and 5 in third.decision.applied
    assert blamed(first_window("late", run, tmp_path)) == [
        (1, LIAR, "message", False), (3, 5, "message", True),
    ]  # fmt: skip


@pytest.mark.parametrize("form", ["signs", "local"])
def test_a_late_lie_does_not_cover_a_planted_state(form, tmp_path):
    run = run_of(form, *late_lie(2))
    lab(form).train(run, tmp_path)
    late, planted = (2, LIAR, "message", False), (MIDDLE, LIAR, "state", True)
    assert blamed(first_window(form, run, tmp_path)) == [late]
    plant(form, tmp_path, "own", larger)
    assert blamed(first_window(form, run, tmp_path)) == [late, planted]


def test_a_planted_state_is_found_again_with_its_bundle_alone(tmp_path):
    run = run_of("signs")
    lab("signs").train(run, tmp_path / "run")
    plant("signs", tmp_path / "run", "own", larger)
    findings = first_window("signs", run, tmp_path / "run")
    assert blamed(findings) == [(MIDDLE, LIAR, "state", True)]
    window, setup = run.snapshots().windows[0], lab("signs").setup(run)
    replay = Replay(setup, Transcript(tmp_path / "run"))
    bundle.write(tmp_path / "bundle", replay, window, LIAR, findings)
    assert bundle.rerun(bundle.read(tmp_path / "bundle", max_gb=1)) == (findings, None)


def test_what_an_ejected_liar_owns_refuses_no_run(tmp_path):
    """Its state is another than its replay gives, and nobody uses it."""
    run = run_of("signs", {"kind": "malformed", "peer": LIAR, "rounds": [2, 2]})
    lab("signs").train(run, tmp_path)
    ejected = [p for e in Transcript(tmp_path).rounds[:MIDDLE] for p in e.decision.ejected]
    assert ejected == [LIAR]
    assert first_window("signs", run, tmp_path) == []
    plant("signs", tmp_path, "own", larger)
    assert blamed(first_window("signs", run, tmp_path)) == [(MIDDLE, LIAR, "state", False)]


# ---- Snapshots of which there are only hashes ----


def without_a_peer(path: Path) -> None:
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"own": state["own"][1:]}))


SHORT = "state.json is of step 2 and 5 peers, expected 2 and 6"
MISSING = "snapshots/00002/state.json: No such file or directory, expected hashes of a state"


@pytest.mark.parametrize(("edit", "text"), [(without_a_peer, SHORT), (Path.unlink, MISSING)])
def test_hashes_that_are_not_of_all_peers_are_a_finding_against_the_author(edit, text, tmp_path):
    run = run_of("signs")
    every = run.witness.model_copy(update={"snapshot_every": 2, "keep_every": 2})
    run = run.model_copy(update={"witness": every})
    lab("signs").train(run, tmp_path)
    assert first_window("signs", run, tmp_path) == []
    edit(tmp_path / "snapshots/00002/state.json")
    setup, transcript = lab("signs").setup(run), Transcript(tmp_path)
    assert [(f.round, f.peer, f.kind, f.detail) for f in audit(setup, transcript)] == [
        (2, None, "snapshot", text)
    ]
    window = run.snapshots().windows[0]
    replay = Replay(setup, transcript)
    with pytest.raises(LockstepError, match=text):  # of a bundle, whose snapshots were not audited
        replay.window(window, range(PEERS), lambda: None)


@pytest.mark.parametrize("name", ["1" * 300, "00099"])
def test_a_payload_that_no_file_can_have_is_a_finding(name, tmp_path):
    run = run_of("signs")
    lab("signs").train(run, tmp_path)
    (tmp_path / "payloads/00099.bin").mkdir()

    def elsewhere(entry: dict) -> None:
        entry["messages"][f"{LIAR}"]["payload"] = f"{name}.bin"

    edit_round(tmp_path, 8, elsewhere)
    found = audit(lab("signs").setup(run), Transcript(tmp_path))
    assert (8, LIAR, "payload", True) in blamed(found)
