"""Forged weights, rounds, states, verdicts and run files, where every hash and key agrees."""

import gzip
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import save_file

from lockstep.files import read_json
from lockstep.programs.train_step import Programs
from lockstep.protocol import consensus
from lockstep.transcript.entry import Entry
from lockstep.transcript.trees import load_arrays, save_tree, tree_hash
from lockstep.wire import exchange
from lockstep.wire import message as wire
from parts.publication import layout, publish, transcript
from pipeline import runfile
from pipeline.recheck import outputs
from pipeline.start import set_up
from pipeline.weights import hf
from pipeline.weights.fresh import fresh_params
from tests import tiny
from tests.parts.publication.forged.changes import (
    HEADER,
    SNAPSHOT,
    another_machine,
    change_run,
    new_transcript_hash,
    other_rate,
)
from tests.parts.publication.forged.test_measured import MEASURED
from tests.parts.publication.published_run import (
    TRANSCRIPT,
    add,
    change_json,
    change_round,
    change_tensors,
    entry,
    flip,
    forge,
    refusal,
    size_of,
)

pytestmark = pytest.mark.long


def other_weights(folder: Path) -> None:
    """Of another run, as stage export would write them."""
    config, params = hf.read_folder(folder)
    hf.write_folder(folder, config, jax.tree.map(lambda x: 1.01 * x, params), "float32")


def other_seed(tables: dict) -> None:
    tables["model"]["LLM"]["checkpoint"]["Init"]["seed"] = 7


def other_seed_and_its_hash(folder: Path) -> None:
    """The first snapshot has the hash of fresh weights of the claimed seed."""
    change_run(other_seed)(folder)
    architecture, config = hf.model_of(read_json(folder / HEADER)["model"], HEADER)
    params = fresh_params(architecture, config, 7)
    own = tree_hash(jax.device_get(programs_of(folder).init(params)[0]))
    here = {"params": tree_hash(jax.device_get(params)), "own": [own] * 2}
    change_json(SNAPSHOT.format(0), lambda s: s.update(here))(folder)


def other_theta(tables: dict) -> None:
    tables["model"]["LLM"]["checkpoint"]["Init"]["config"]["rope_theta"] = 500000.0


def back_door(folder: Path) -> None:
    """Some of the params, their hash in the last snapshot, and a header of another machine."""
    config, params = hf.read_folder(folder)
    params["embed"]["embedding"] = params["embed"]["embedding"].copy()
    params["embed"]["embedding"][5] += 1.0
    hf.write_folder(folder, config, params, "float32")
    change_json(SNAPSHOT.format(6), lambda s: s.update(params=tree_hash(params)))(folder)
    change_json(HEADER, another_machine)(folder)


def other_token(folder: Path) -> None:
    change_tensors(f"{outputs.ROWS}/00001-000.safetensors", change_token)(folder)


def other_state(folder: Path, *, hashed: bool) -> None:
    """Another momentum, with its hash in the snapshot or without."""
    plain = folder / TRANSCRIPT / "snapshots/00003/own-001.safetensors"
    path = plain.with_name(plain.name + layout.PLANES)
    transcript.unpack_file(path, plain, size_of(path))
    tensors = {name: array + np.float32(0.5) for name, array in load_arrays(plain).items()}
    save_tree(plain, unflatten_dict(tensors, sep="/"))
    transcript.pack(plain, path)
    found = tree_hash(unflatten_dict(tensors, sep="/"))
    plain.unlink()

    def change(state: dict) -> None:
        state["own"][1] = found

    if hashed:
        change_json(SNAPSHOT.format(3), change)(folder)


def programs_of(folder: Path) -> Programs:
    run = runfile.parse(read_json(folder / outputs.RUN), "run.json")
    model = read_json(folder / HEADER)["model"]
    with tiny.like_a_process():
        return set_up.blank(run, model, None, ("inputs",), 0, 0).programs


def other_message(folder: Path) -> None:
    """A message of round 2 is another, and all that is said of it agrees."""
    line = gzip.decompress((folder / layout.ROUNDS).read_bytes()).splitlines()[1]
    entry = Entry.model_validate_json(line)
    plan, message = entry.round, entry.evidence.messages[0]
    path = folder / TRANSCRIPT / "payloads" / message.payload
    data = bytearray(path.read_bytes())
    form = programs_of(folder).form
    before = wire.decode(bytes(data[message.offset :][: message.bytes]), form)
    for at in range(message.offset + message.bytes - 1, message.offset, -1):
        data[at] ^= 1
        with suppress(wire.WireError):
            decoded = wire.decode(bytes(data[message.offset :][: message.bytes]), form)
            if tree_hash(decoded) != tree_hash(before):
                break
        data[at] ^= 1
    path.write_bytes(data)
    said = replace(message, commitment=exchange.commit(decoded, 0, plan).hex())
    evidence = replace(entry.evidence, messages=entry.evidence.messages | {0: said})
    limit = runfile.parse(read_json(folder / outputs.RUN), "run.json").config.max_round_train_time
    honest = consensus.witnessed(plan, evidence, limit)
    evidence = replace(evidence, attestations=tuple(honest))
    other = entry.model_copy(update={"evidence": evidence})
    change_round(folder, 2, lambda e: e.update(json.loads(other.model_dump_json())))
    new_transcript_hash(folder)


def add_metadata(name: str) -> Callable[[Path], None]:
    """Words in a file of arrays, which no reader shows."""

    def changed(folder: Path) -> None:
        arrays = load_arrays(folder / name)
        save_file(arrays, folder / name, metadata={"verified_by": "an independent lab"})

    return changed


def change_token(tensors: dict) -> None:
    tensors["rows"] = tensors["rows"].copy()
    tensors["rows"][:, 3] = (tensors["rows"][:, 3] + 1) % 64


def labelled(folder: Path) -> None:
    """Labels beside all tokens, the same ones: a forger could take others."""
    change_json(layout.MANIFEST, lambda m: m.update(columns=["inputs", "labels"]))(folder)
    names = [path.relative_to(folder) for path in (folder / outputs.ROWS).iterdir()]
    for name in (*map(str, names), outputs.HELD_OUT):
        change_tensors(name, lambda t: t.update(rows=np.tile(t["rows"], (1, 2))))(folder)


def change_commitment(folder: Path) -> None:
    """One message of the first window, which is not published, is committed to as another."""
    change_round(folder, 2, lambda e: e["evidence"]["messages"]["0"].update(commitment="ab" * 32))
    new_transcript_hash(folder)


def append(path: Path, data: bytes) -> None:
    path.write_bytes(path.read_bytes() + data)


def accuse(*, applied: bool) -> Callable[[Path], None]:
    """The verdict blames peer 1, which is honest."""
    detail = "sent 000000000000, its replay gives 111111111111"
    said = {"round": 2, "peer": 1, "kind": "message", "detail": detail, "applied": applied}
    said["bundle"] = "bundles/00001-00003-peer-01"
    return change_json(outputs.VERDICT, lambda verdict: verdict["findings"].append(said))


FORGED = MEASURED | {
    "weights of another run": (other_weights, "model.safetensors: "),
    "a back door, and a header that names another machine": (back_door, "round 6, params: "),
    "another model in config.json": (
        change_json("config.json", lambda c: c.update(rms_norm_eps=1e-3)), "config.json: "),
    "another theta in the run file": (
        change_run(other_theta), "header.json: rope_parameters of the model is "),
    "a changed round": (change_commitment, "round 2, peer 0, commitment: payload hashes to "),
    "a changed message in a window that is not published": (other_message, "round 3, params: "),
    "a changed token": (other_token, ", message: sent "),
    "a changed payload": (flip(f"{TRANSCRIPT}/payloads/00004.bin"), "proof/transcript: round "),
    "a changed state": (lambda folder: other_state(folder, hashed=False), "snapshot: "),
    "a changed state, with its hash": (
        lambda folder: other_state(folder, hashed=True), "proof/transcript: "),
    "metadata that nobody reads": (
        add_metadata(outputs.HELD_OUT), "held_out.safetensors: metadata {'verified_by': "),
    "a hash of params that nothing gives": (
        change_json(SNAPSHOT.format(3), lambda s: s.update(params="ab" * 32)),
        "round 3, params: the params at the snapshot are abababababab"),
    "columns that the data have not": (
        labelled, "publication.json: columns are ['inputs', 'labels'], expected ['inputs'] as in "),
    "hashes of the states of more peers than there are": (
        change_json(SNAPSHOT.format(0), lambda s: s.update(own=s["own"] * 2)),
        "state.json is of step 0 and 4 peers, expected 0 and 2"),
    "a verdict that was refused": (
        accuse(applied=True), "proof/verdict.json: accepted is True, expected False"),
    "an accusation that a repeated window does not show": (
        accuse(applied=False), "window 1-3 of peer 1"),
    "a verdict that compared nothing": (
        change_json(outputs.VERDICT, lambda v: v.update(not_comparable="because")),
        "proof/verdict.json: not_comparable is because, expected None"),
    "a run file with another learning rate": (
        change_json(outputs.RUN, other_rate), "round 0, header: its run "),
    "another seed of fresh weights": (
        change_run(other_seed), "proof/transcript: the params before the first round"),
    "another seed of fresh weights, with its hash": (
        other_seed_and_its_hash, "round 3, params: "),
    "messages of nobody": (
        lambda folder: append(folder / TRANSCRIPT / "payloads/00004.bin", bytes(10**6)),
        "payloads/00004.bin: 100"),
    "params that nobody needs": (
        add(f"{TRANSCRIPT}/snapshots/00003/params.safetensors"),
        "snapshots/00003/params.safetensors: "),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_what_contradicts_itself_is_not_verified_though_all_hashes_agree(folder, case):
    change, said = FORGED[case]
    change(folder)
    forge(folder)
    assert said in refusal(folder)


def test_rounds_that_do_not_unpack_are_refused(folder):
    (folder / layout.ROUNDS).write_bytes(b"[]")
    here = {layout.ROUNDS: entry(folder / layout.ROUNDS)}
    change_json(layout.MANIFEST, lambda m: m["files"].update(here))(folder)
    assert "rounds.jsonl.gz: Not a gzipped file (b'[]'), expected a gzip file" in refusal(folder)


@pytest.mark.soak  # compiles another program
def test_another_learning_rate_in_the_transcript_too_is_found_without_replay(folder):
    change_run(other_rate)(folder)
    forge(folder)
    assert "round 3, params: " in refusal(folder)


def test_an_optimizer_that_began_with_a_planted_state_is_refused(tmp_path, monkeypatch):
    """Momentum leads true fresh weights wherever the author likes, and all replays agree."""
    read_start = set_up._read_start

    def planted(*arguments: object) -> set_up.Start:
        start = read_start(*arguments)
        shared = jax.tree.map(lambda leaf: np.full_like(leaf, 3), start.state.shared)
        return start._replace(state=start.state._replace(shared=shared))

    run_file, root = tiny.start(tmp_path, model__LLM__optimizer=tiny.ADAMW)
    with monkeypatch.context() as forger:
        forger.setattr(set_up, "_read_start", planted)
        tiny.make(run_file, root, *layout.ALWAYS)
        publish.write(tmp_path / "whole", run_file, root, 2, None)
    assert "the shared state before the first round has hash " in refusal(tmp_path / "whole")
