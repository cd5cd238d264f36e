"""Bundles that somebody changed and sealed again: not confirmed, or refused in one line."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from ml_dtypes import float8_e4m3fn

from lockstep.errors import LockstepError
from lockstep.transcript.trees import load_nested, save_tree
from pipeline.audit import bundle
from tests.errors import refused
from tests.pipeline.audit.bundle.bundled_run import (
    OPENING,
    change_json,
    change_said,
    flip_bit,
    found,
    seal,
)

pytestmark = pytest.mark.long


def change_tree(name: str, change: Callable[[dict], dict]) -> Callable[[Path], None]:
    return lambda folder: save_tree(folder / name, change(load_nested(folder / name)))


change_tokens, drop_tokens, break_tokens = (
    change_tree("tokens.safetensors", change)
    for change in (
        lambda tree: tree | {"rows": (tree["rows"] + 1) % 64},
        lambda tree: {name: rows[1:] for name, rows in tree.items()},
        lambda tree: tree | {"rows": tree["rows"] - 64},
    )
)
change_own, change_params = (
    change_tree(f"{OPENING}/{name}.safetensors", partial(jax.tree.map, lambda x: 2 * x + 1))
    for name in ("own-001", "params")
)


def change_rounds(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "transcript/rounds.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    change(entries[1])
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def cut_rounds(folder: Path, count: int) -> None:
    path = folder / "transcript/rounds.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def about(**said: object) -> Callable[[Path], None]:
    """Changes what bundle.json says of itself."""
    return lambda folder: change_said(folder, lambda found: found.update(said))


def blame_the_other(folder: Path) -> None:
    """Everything that speaks of peer 1 speaks of peer 0, whose state is put in."""
    about(peer=0)(folder)
    found(peer=0)(folder)
    opening = folder / OPENING
    shutil.copy(opening / "own-001.safetensors", opening / "own-000.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_tokens, "found here: round 1, message"),
        (found(round=1), "found here: round 2, message"),
        (found(round=3), "found here: round 2, message"),
        (found(kind="state"), "found here: round 2, message"),
        (found(detail="sent 0123, its replay gives 4567"), "found here: round 2, message"),
        (found(applied=False), "found here: round 2, message"),
        (found(kind="payload"), "found here: nothing against it"),
    ],
)
def test_what_a_replay_does_not_find_is_not_confirmed(folder, change, said, capsys):
    change(folder)
    seal(folder)
    assert bundle.show(folder, 1) == 1
    out = capsys.readouterr().out
    assert said in out and "\n  not confirmed\n" in out and "0 of 1 findings" in out


def test_an_honest_peer_is_not_blamed(folder):
    # peers begin with equal states, so that of peer 1 will do: only the sequences are missing
    blame_the_other(folder)
    seal(folder)
    with pytest.raises(LockstepError, match="tokens.safetensors: lacks some of the sequences"):
        bundle.show(folder, 1)


REFUSED = {
    "own state": (change_own, "round 0, snapshot: its files do not have the hashes"),
    "opening params": (change_params, "round 0, snapshot: its files do not have the hashes"),
    "payload": (
        lambda f: flip_bit(f / "transcript/payloads/00001.bin"), "transcript: round 3, peer"),
    "no payload": (lambda f: shutil.rmtree(f / "transcript/payloads"), "transcript: round 1, peer"),
    "fewer tokens": (drop_tokens, "tokens.safetensors: lacks some of the sequences"),
    "no token ids": (break_tokens, "tokens.safetensors: expected inputs from 0"),
    "another peer": (found(peer=0), "a finding of peer 0, round 2, expected of peer 1"),
    "eight bits": (
        lambda f: save_tree(
            f / "tokens.safetensors",
            {"indices": np.zeros(2, np.int64), "rows": np.zeros((2, 16), float8_e4m3fn)},
        ),
        "tokens.safetensors: expected ascending indices",
    ),
    "tensors in tensors": (
        lambda f: save_tree(f / "tokens.safetensors", {"indices": {"x": np.zeros(2)}, "rows": {}}),
        "tokens.safetensors: expected ascending indices"),
    "no such peer": (about(peer=7), "peer 7, expected a peer below 2"),
    "another round": (found(round=4), "a finding of peer 1, round 4, expected"),
    "another window": (about(window=[1, 2]), "bundle.json: window [1, 2] is not one of this run's"),
    "a later window": (about(window=[4, 6]), "round 2, expected of peer 1 in rounds 4 to 6"),
    "another format": (about(format=1), "bundle.json: format is "),
    "nothing found": (about(findings=[]), "bundle.json: findings is "),
    "an unknown key": (about(code="x"), "bundle.json: code: "),
    "a broken file": (
        lambda f: (f / OPENING / "own-001.safetensors").write_bytes(b"x"),
        "own-001.safetensors: Error while deserializing header"),
    "a state of others": (
        lambda f: change_json(f / OPENING / "state.json", lambda s: s["own"].pop()),
        "round 0, snapshot: state.json is of step 0 and 1 peers"),
    "no hashes": (
        lambda f: (f / OPENING / "state.json").write_text("[]"),
        "round 0, snapshot: snapshots/00000/state.json: "),
    "a peer too many": (
        lambda f: change_rounds(f, lambda e: e["decision"].update(applied=[0, 1, 2])),
        "round 2, decision: does not follow from the evidence: applied"),
    "a span too long": (
        lambda f: change_rounds(f, lambda e: e["round"]["assignment"].update({"1": [0, 10**12]})),
        "round 2, assignment: does not follow from the run file: assignment"),
    "a payload elsewhere": (
        lambda f: change_rounds(
            f, lambda e: e["evidence"]["messages"]["1"].update(payload="../../x")
        ),
        "rounds.jsonl:2: evidence.messages.1.payload is ",
    ),
    "no payload's place": (
        lambda f: change_rounds(f, lambda e: e["evidence"]["messages"]["1"].update(payload=None)),
        "round 2, peer 1, payload: is not kept"),
    "another model": (
        lambda f: change_json(f / "transcript/header.json", lambda h: h.update(model={})),
        "header.json: model_type is None"),
    "a list for a header": (
        lambda f: (f / "transcript/header.json").write_text("[]"), "header.json: "),
    "a list for a run": (lambda f: (f / "run.json").write_text("[]"), "run.json: "),
    "another run file": (
        lambda f: change_json(f / "run.json", lambda r: r["peers"].update(seed=9)),
        "round 0, header: its run differs from"),
    "fewer rounds": (lambda f: cut_rounds(f, 2), "round 3, rounds: the transcript ends before"),
    "no rounds": (lambda f: cut_rounds(f, 0), "bundle.json: window [1, 3] is not one of this"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_in_one_line(folder, case):
    change, said = REFUSED[case]
    change(folder)
    seal(folder)
    with refused(said):
        bundle.show(folder, 1)
