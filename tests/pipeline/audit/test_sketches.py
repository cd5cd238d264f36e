"""Messages that are not kept: what of them can be compared, by whom, and who is named."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.files import read_json
from lockstep.swarm.lies import LIES
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import save_tree
from lockstep.wire import sketches
from lockstep.wire.leaves import leaf_of
from lockstep.wire.pieces import Pieces
from pipeline import runfile
from pipeline.audit import rounding
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.rounding import OtherBits
from pipeline.audit.tolerance import (
    LEAST,
    MARGIN,
    MOST,
    TOLERANCE,
    UNRELATED,
    distance_of_state,
    distance_of_update,
    how,
    limit,
    to_blame,
)
from pipeline.audit.verdict import Finding, ReplayComparison, Varied
from pipeline.stage.devices import difference
from tests.lockstep.swarm.simulated import PEERS, lab, run_of
from tests.pipeline.audit.edited.audited_run import edit_round

LIAR = 2


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Callable[..., tuple[runfile.Run, Path]]:
    """Runs of AdamW, by the fault of a peer."""

    @cache
    def one(kind: str = "") -> tuple[runfile.Run, Path]:
        fault = {"kind": kind, "peer": LIAR, "rounds": [2, 2]}
        run = run_of("dense", *([fault] if kind else []))
        folder = tmp_path_factory.mktemp("dense")
        lab("dense").train(run, folder)
        return run, folder

    return one


def audited(run: runfile.Run, folder: Path) -> list[Finding]:
    return audit(lab("dense").setup(run), Transcript(folder))


def replayed(run: runfile.Run, folder: Path, *, bitwise: bool = False) -> list[Finding]:
    work = [(window, range(PEERS)) for window in run.snapshots().windows]
    varied = Varied(1e-6, "other threads", 24, 1e-6, {})
    replay = Replay(
        lab("dense").setup(run), Transcript(folder), None if bitwise else "bits", work, varied
    )
    return [f for some in work for f in replay.window(*some, lambda: None)]


def test_every_message_has_a_sketch_and_an_honest_run_has_no_findings(trained):
    run, folder = trained()
    transcript = Transcript(folder)
    pieces = lab("dense").programs.form.pieces
    messages = [m for e in transcript.rounds for m in e.evidence.messages.values()]
    assert len(messages) == 8 * PEERS and all(m.root and m.sketch for m in messages)
    kept = sum(path.stat().st_size for path in (folder / "payloads").iterdir())
    assert kept == sum(m.sketch for m in messages)
    assert max(m.sketch for m in messages) <= pieces.drawn * (pieces.size + 32 * 5)
    assert audited(run, folder) == []
    assert replayed(run, folder) == replayed(run, folder, bitwise=True) == []


def edited(folder: Path, to: Path, edit: Callable[[dict], None]) -> Path:
    """A copy in which the message of peer 1 in round 3 was edited."""
    copy = shutil.copytree(folder, to)
    edit_round(copy, 3, lambda entry: edit(entry["messages"]["1"]))
    return copy


EDITS = {
    "root": (lambda m: m.update(root="00" * 32), "its root gives"),
    "no root": (lambda m: m.pop("root"), "has no root"),
    "no sketch": (lambda m: m.pop("sketch"), "has no sketch"),
    "elsewhere": (lambda m: m.update(offset=0), "does not lead to the root"),
    "shorter": (lambda m: m.update(sketch=3), "a sketch of 3 bytes"),
    "huge": (lambda m: m.update(sketch=2**60), "a sketch of 1152921504606846976 bytes"),
    "smaller": (lambda m: m.update(bytes=17), "has 17 bytes, expected 17616"),
    "no file": (lambda m: m.update(payload="00099.bin"), "a sketch of 0 bytes"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_sketch_that_is_not_the_messages_is_a_finding_against_the_author(name, trained, tmp_path):
    run, folder = trained()
    edit, text = EDITS[name]
    found = audited(run, edited(folder, tmp_path / "copy", edit))
    (finding,) = [f for f in found if f.kind == "sketch"]
    assert (finding.round, finding.peer, finding.applied) == (3, None, True)
    assert text in finding.detail


def test_a_transcript_without_sketches_of_large_messages_is_a_finding(
    trained, tmp_path, monkeypatch
):
    form = lab("dense").programs.form
    monkeypatch.setitem(form.__dict__, "kept", True)  # commits to the fields, not to a root
    run = run_of("dense")
    lab("dense").train(run, tmp_path)
    monkeypatch.undo()
    assert not read_json(tmp_path / "header.json").get("sketched")
    found = {(f.kind, f.peer, f.applied) for f in audited(run, tmp_path)}
    assert found == {("sketch", None, True)}


# ---- Liars ----


@pytest.mark.parametrize("kind", ["sign_flip", "stale", "little_enough"])
def test_within_a_tolerance_the_liar_is_named_and_nobody_else(kind, trained):
    run, folder = trained(kind)
    assert audited(run, folder) == []
    assert [(f.round, f.peer, f.kind) for f in replayed(run, folder)] == [(2, LIAR, "message")]


def undrawn(message: list[np.ndarray], drawn: list[int], pieces: Pieces, by: float) -> list:
    """A message with a lie in every piece but the drawn ones."""
    flat = [np.array(leaf).reshape(-1) for leaf in message]
    for n in set(range(pieces.count)) - set(drawn):
        field, begin, end = pieces.ranges[n]
        flat[field][begin // 4 : end // 4] *= by
    return [x.reshape(np.shape(leaf)) for x, leaf in zip(flat, message, strict=True)]


@pytest.mark.parametrize(
    ("step", "by", "found_in", "text"),
    [
        (2, -3.0, 3, "a lie that no drawn piece shows came before"),
        (4, 1.5, 4, "of the window's update from those that follow from its messages"),
    ],
)
def test_a_lie_that_no_drawn_piece_shows_refuses_the_run_and_blames_no_peer(
    step, by, found_in, text, tmp_path, monkeypatch
):
    """By later messages or, of a last round, by the params. Everyone knows the draw beforehand."""
    real, pieces = sketches.drawn, lab("dense").programs.form.pieces

    def foreseen(seed, step, commitments, peer, count, number):
        return real(seed, step, dict.fromkeys(commitments, "00" * 32), peer, count, number)

    def false(message):
        everybody = dict.fromkeys(range(PEERS), "00" * 32)
        drawn = real(run_of("dense").peers.seed, step, everybody, LIAR, pieces.count, pieces.drawn)
        found = undrawn([p.true.node for p in message], drawn, pieces, by)
        return list(map(leaf_of, found))

    monkeypatch.setattr(sketches, "drawn", foreseen)
    monkeypatch.setitem(LIES, "sign_flip", false)
    run = run_of("dense", {"kind": "sign_flip", "peer": LIAR, "rounds": [step, step]})
    lab("dense").train(run, tmp_path)
    assert audited(run, tmp_path) == []
    (finding,) = replayed(run, tmp_path)
    assert (finding.round, finding.peer, finding.kind) == (found_in, None, "params")
    assert text in finding.detail
    assert [(f.round, f.peer) for f in replayed(run, tmp_path, bitwise=True)] == [(step, LIAR)]


@pytest.mark.parametrize(
    ("distances", "named", "astray"),
    [
        ({0: 1e-6, 1: 0.4, 2: 2e-6, 3: 1e-6}, [1], []),
        ({0: 0.4, 1: 0.3, 2: 2e-6, 3: 1e-6}, [0, 1], []),
        ({0: 0.4, 1: 0.3, 2: 0.2, 3: 0.3}, [], [0, 1, 2, 3]),
        ({0: 0.1, 1: 0.3}, [], [0, 1]),
        ({0: np.inf, 1: 0.3, 2: 0.4, 3: 0.3}, [0], [1, 2, 3]),
        ({0: np.inf, 1: np.inf}, [], [0, 1]),
        ({0: 0.3}, [0], []),
        ({0: 1e-6, 1: 1e-6}, [], []),
    ],
)
def test_whoever_strays_alone_is_named(distances, named, astray):
    found, others = to_blame(distances, 0.01)
    assert (list(found), others) == (named, astray)


# ---- What is accepted ----


def test_a_tolerance_is_learnt_between_two_bounds():
    run = run_of("dense")
    assert limit(run, None, 2e-3) == MARGIN * 2e-3
    assert limit(run, None, 1e-9) == LEAST["float32"]
    assert limit(run, None, 9.0) == MOST
    assert limit(run, None) == TOLERANCE["float32"]


def test_in_bfloat16_nothing_is_told_of_another_kind_of_device():
    float32 = run_of("dense")
    peers = float32.peers.model_copy(update={"precision": "bfloat16"})
    bfloat16 = float32.model_copy(update={"peers": peers})
    other = {"device_kind": "NVIDIA H200"}
    why = "{} is {!r} here, was {!r} in training".format(*difference({"device_kind": "cpu"}, other))
    assert not how(bfloat16, why, True, None, None).tells
    assert how(bfloat16, "jax is '1' here", True, None, None).limit == TOLERANCE["bfloat16"]
    assert how(float32, why, True, None, None).limit == TOLERANCE["float32"]


def test_messages_params_and_states_have_each_what_was_learnt_of_them(trained):
    run, folder = trained()
    setup, transcript = lab("dense").setup(run), Transcript(folder)
    own = {"mu": 1e-6, "error": 0.1, "more": 9.0}
    replay = Replay(setup, transcript, "bits", (), Varied(2e-3, "there", 24, 3e-3, own))
    assert (replay.how.limit, replay.how.params_limit) == (MARGIN * 2e-3, MARGIN * 3e-3)
    assert replay.how.own_limits == {
        "mu": MARGIN * LEAST["float32"], "error": UNRELATED, "more": MARGIN * 9.0
    }  # fmt: skip
    fixed = replace(replay, varied=None).how
    assert fixed.params_limit == TOLERANCE["float32"] and fixed.own_limits is None
    assert replace(replay, why=None).how == ReplayComparison()


def test_params_are_compared_by_the_norm_of_the_update():
    opening, moved = {"w": np.zeros(4, np.float32)}, {"w": np.float32([3, 0, 4, 0])}
    found = {"w": np.float32([3, 0, 4, 0.25])}
    assert distance_of_update(found, moved, opening) == pytest.approx(0.05)
    assert distance_of_update(moved, moved, opening) == 0
    assert distance_of_update(found, opening, opening) == np.inf
    for planted in (np.nan, np.inf):
        found = {"w": np.float32([3, 0, 4, planted])}
        assert distance_of_update(found, moved, opening) == np.inf
        assert distance_of_state(found, moved, opening, moved) == np.inf


def test_params_that_moved_twice_as_far_are_off_by_a_whole_update(trained, tmp_path):
    """Of their own update it would be a half, which a wide limit lets pass."""
    run, folder = trained()
    copy, like = shutil.copytree(folder, tmp_path / "copy"), lab("dense").setup(run).start.state
    window, transcript = run.snapshots().windows[-1], Transcript(copy)
    opening, closing = (transcript.agreed(s, like)[0] for s in (window.opening, window.last))
    twice = jax.tree.map(lambda x, y: y + (y - x), opening, closing)
    save_tree(copy / f"snapshots/{window.last:05}/params.safetensors", twice)
    (finding,) = replayed(run, copy)
    assert finding.detail.startswith("the params are at distance 1 of the window's update")


def test_other_settings_than_these_are_taken_back():
    wide = {"NPROC": "4", "XLA_FLAGS": "--a=1"}
    narrow = OtherBits.than(wide)
    assert (narrow.threads, narrow.flags) == ("1", "--a=1 --xla_cpu_max_isa=AVX")
    assert narrow.words == "AVX instructions and 1 thread"
    back = OtherBits.than({"NPROC": narrow.threads, "XLA_FLAGS": narrow.flags})
    assert (back.threads, back.flags) == ("4", "--a=1")
    assert back.words == "the CPU's widest vector instructions and 4 threads"


@pytest.mark.parametrize(
    ("change", "measured"),
    [({"threads": "1"}, True), ({"jax": "0.1"}, False), ({"platform": "gpu"}, False),
     ({"xla_flags": "--xla_cpu_enable_fast_math=true"}, False)],
)  # fmt: skip
def test_only_what_can_be_varied_here_is_measured(change, measured, trained, monkeypatch):
    run, folder = trained()
    header = Transcript(folder).header
    there = header.environment | change
    if measured:
        there["xla_flags"] += " --xla_cpu_max_isa=AVX"
    header = header.model_copy(update={"environment": there})
    assert rounding.measurable(lab("dense").setup(run), header) == measured


@pytest.mark.long
def test_honest_bits_elsewhere_are_measured_in_a_process(tmp_path):
    run = run_of("signs", total_steps=4)
    lab("signs").train(run, tmp_path)
    setup, transcript = lab("signs").setup(run), Transcript(tmp_path)
    work = [(window, range(PEERS)) for window in run.snapshots().windows]
    found = rounding.measure(setup, transcript, work)
    assert found.messages == 4  # of one peer
    assert found.there == "AVX instructions and 1 thread"
    assert 0 <= found.distance < 1e-4
    assert found.own and all(0 <= distance < 1e-3 for distance in found.own.values())
