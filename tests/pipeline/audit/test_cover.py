"""A small lie, which gets nowhere, is no cover for a larger one in the same window."""

import pytest

from lockstep.protocol import consensus
from lockstep.protocol.closing import slot
from lockstep.transcript.transcript import Transcript
from pipeline.audit import bundle
from pipeline.audit.verdict import Finding
from tests.lockstep.swarm.simulated import lab
from tests.pipeline.audit.edited.audited_run import Audited, edit_arrays, edit_round, trained

pytestmark = pytest.mark.long

LIAR, MIDDLE = 2, 4  # the step between the two windows


def first_window(run: Audited) -> list[Finding]:
    """What a replay of all peers finds in the first window, after an audit that finds nothing
    against the author."""
    assert all(f.peer is not None and not f.applied for f in run.audit())
    window = run.run.snapshots().windows[0]
    assert window.last == MIDDLE
    return run.replay_of(window)


def blamed(run: Audited) -> list[tuple[int, int | None, str, bool]]:
    return [(f.round, f.peer, f.kind, f.applied) for f in first_window(run)]


def plant(run: Audited) -> None:
    """Put another state of the liar's own into the snapshot between the windows, with its hash."""
    edit_arrays(run.folder, MIDDLE, f"own-{LIAR:03}", hashed=True)


def test_a_false_ruling_of_an_honest_sender_does_not_end_the_replay(tmp_path, monkeypatch):
    """Peer 4 accuses another in vain, and one of those who rule agrees with neither."""
    drawn, found = consensus.checked, list[int]()
    monkeypatch.setattr(consensus, "checked", lambda r, e: drawn(r, e) if r.step == 1 else {})
    accuser = {"kind": "false_verifier", "peer": 4, "rounds": [1, 1]}
    liar = {"kind": "sign_flip", "peer": LIAR, "rounds": [MIDDLE, MIDDLE]}
    run = trained(tmp_path, accuser, liar, form="dense", verified=True)

    def rule(entry: dict) -> None:
        (ruling,) = entry["rulings"]
        found.append(next(p for p in (3, 5) if p != ruling["peer"]))
        assert found[0] in entry["decision"]["applied"]
        ruling["found"][str(found[0])] = ["0" * 64] * 2

    edit_round(tmp_path, 1, rule)
    assert blamed(run) == [
        (1, 4, "check", False), (1, *found, "check", False), (MIDDLE, LIAR, "message", True),
    ]  # fmt: skip


def late_lie(step: int) -> list[dict]:
    fault = {"peer": LIAR, "rounds": [step, step]}
    return [{"kind": "late", "size": 100, **fault}, {"kind": "sign_flip", **fault}]


def test_a_lie_that_travels_and_is_never_merged_does_not_end_the_replay(tmp_path):
    other = {"kind": "sign_flip", "peer": 5, "rounds": [3, 3]}
    run = trained(tmp_path, *late_lie(1), other, form="late")
    first, _, third, _ = Transcript(tmp_path).rounds[:MIDDLE]
    assert LIAR in first.decision.travelling and slot(LIAR, 1) in third.decision.late
    assert not lab("late").programs.form.kept and 5 in third.decision.applied
    assert blamed(run) == [(1, LIAR, "message", False), (3, 5, "message", True)]


@pytest.mark.parametrize("form", ["signs", "local"])
def test_a_late_lie_does_not_cover_a_planted_state(form, tmp_path):
    run = trained(tmp_path, *late_lie(2), form=form)
    late, planted = (2, LIAR, "message", False), (MIDDLE, LIAR, "state", True)
    assert blamed(run) == [late]
    plant(run)
    assert blamed(run) == [late, planted]


def test_a_planted_state_is_found_again_with_its_bundle_alone(tmp_path):
    run = trained(tmp_path / "run")
    plant(run)
    (finding,) = findings = first_window(run)
    assert (finding.round, finding.peer, finding.kind) == (MIDDLE, LIAR, "state")
    window = run.run.snapshots().windows[0]
    bundle.write(tmp_path / "bundle", run.replayer(), window, LIAR, findings)
    assert bundle.rerun(bundle.read(tmp_path / "bundle", max_gb=1)) == (findings, None)


def test_what_an_ejected_liar_owns_refuses_no_run(tmp_path):
    """Its state is another than its replay gives, and nobody uses it."""
    run = trained(tmp_path, {"kind": "malformed", "peer": LIAR, "rounds": [2, 2]})
    ejected = [p for e in Transcript(tmp_path).rounds[:MIDDLE] for p in e.decision.ejected]
    assert ejected == [LIAR]
    assert blamed(run) == []
    plant(run)
    assert blamed(run) == [(MIDDLE, LIAR, "state", False)]
