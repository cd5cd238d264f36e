"""A tiny run over a folder in real processes: the lab's part, and each volunteer's training."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import tomlkit

from lockstep.files import write_json
from parts.volunteers import keys, layout, planted
from parts.volunteers.chain.links import RoundLink
from parts.volunteers.lab import opening, signing
from parts.volunteers.signed import sign, unsigned
from parts.volunteers.store.schemes import open_store
from pipeline import runfile
from pipeline.stage import pins
from pipeline.stage.artifacts import Paths
from pipeline.start import set_up
from tests import tiny

FINISHED = ("000", "001", "002", "follower")
BYTES = {"vocab_size": 258, "held_out_percent": 0.05, "shuffle": "DontShuffle"}  # text anywhere
MODEL = tiny.MODEL | {"num_hidden_layers": 1, "vocab_size": BYTES["vocab_size"]}
STORED = {"links__clock": "store", "config__witness_nodes": 0}


def document(peers: int, **changes: object) -> tomlkit.TOMLDocument:
    """A run of as many volunteers, which all must be there for it to begin."""
    changes = {
        "model__LLM__data_location": {"Corpus": BYTES},
        "model__LLM__checkpoint": {"Init": {"seed": 0, "config": MODEL}},
        "download": {"limit": {"files": 60}},
        "peers__count": peers,
        "config__init_min_clients": peers,
        "config__global_batch_size_start": 2 * peers,
        "config__global_batch_size_end": 2 * peers,
        "config__waiting_for_members_extra_time": 1,
        "config__max_round_train_time": 600,  # all are in time, on the slowest machine too
        "volunteers": {"settle_seconds": 1, "stagger_seconds": 0.2, "most_bytes": 2**20},
        **STORED,
        **changes,
    }
    return tiny.run_document("nowhere", **changes)


def opened(
    folder: Path,
    peers: int,
    *,
    alone: bool = False,
    store: str = "",
    by: str = "",
    lies: dict[int, str] | None = None,
    **changes: object,
) -> str:
    """Open a run, with a root for each volunteer, which the lab has admitted.

    The run is in `store`, folder/store without one, whose address the volunteers have as `by`; if
    that is another, the lab signs their addresses.

    The last slot is the lab's own, if it has planted `lies`: kinds by round.

    The lab trains the same run `alone`, in one process without a store, from which all others have
    their programs compiled.
    """
    base, address = folder / "lab", store or f"file://{folder / 'store'}"
    base.mkdir()
    if alone:
        tiny.write_run(base / "run.toml", document(peers, links__clock="simulated", **changes))
        tiny.make(base / "run.toml", base, "download", "convert", "train")
    found = document(peers, **changes)
    tiny.write_run(base / "run.toml", found)
    tiny.make(base / "run.toml", base, "download", "convert")
    found["pins"] = pins.write(base / "run.toml", base) | {"tasks": ""}
    lab, there = keys.create(folder / "lab.pem"), open_store(address)
    run, paths = runfile.load(base / "run.toml"), Paths("train", base / "run.toml", base)
    setup = set_up.read(run, paths.out("convert"), paths.out("download"))
    seal = folder / f"{peers - 1:03}" / layout.PLANTED
    if lies:
        own = keys.public_text(keys.create(seal.with_name("key.pem")))
        write_json(seal, {"lies": {own: lies}, "word": "ab" * 32})
    opening.open_run(there, setup, lab, planted.read(seal)[2] if lies else None)
    for peer in (*range(peers), None):
        root = folder / ("follower" if peer is None else f"{peer:03}")
        shutil.copytree(base / "data", root / "data", ignore=shutil.ignore_patterns("trained"))
        found["runtime"]["store"] = by or address
        if peer is not None:
            file = root / "key.pem"
            key = keys.read(file) if file.exists() else keys.create(file)
            opening.admit(there, peer, keys.public_text(key), lab)
            found["runtime"]["volunteer_key"] = str(root / "key.pem")
        else:
            found["runtime"]["volunteer_key"] = ""
        tiny.write_run(root / "run.toml", found)
    if by:
        signing.sign_run(there, lab, 1)
    return address


def train(folder: Path, name: str, *python: object) -> subprocess.Popen:
    """Start stage train of a volunteer; its output goes to a file.

    `python` are arguments of Python in place of those that run the pipeline's commands.
    """
    root = folder / name
    python = python or ("-m", "pipeline")
    command = ["python", *python, "train", "--run", root / "run.toml", "--root", root]
    with open(folder / f"{name}.txt", "ab") as file:
        return subprocess.Popen(
            command,
            cwd=tiny.PROJECT,
            env=tiny.environment(tiny.PROJECT) | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def ended(processes: list[subprocess.Popen], seconds: float = 900) -> list[int]:
    """Wait for processes, and return their statuses; none outlives this."""
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()


def train_all(folder: Path, names: Sequence[str], seconds: float = 900) -> list[dict]:
    """Train until all have ended well; return the rounds, which all took alike."""
    started = [train(folder, name) for name in names]
    assert ended(started, seconds) == [0] * len(names), output(folder)
    return rounds(folder, *names)


def rounds(folder: Path, *names: str) -> list[dict]:
    """The rounds of some volunteers' transcripts, which are the same bytes."""
    (text,) = {(transcript(folder, name) / "rounds.jsonl").read_text() for name in names}
    return [*map(json.loads, text.splitlines())]


def finish(folder: Path) -> None:
    """Make a run of volunteers who are all in time, and of a follower; also the lab's alone.

    A store has room for the rows of fewer peers. So with one micro-batch a peer the lab's program
    would have no loop over them, and other last bits; with two, both programs have it.
    """
    opened(folder, len(FINISHED) - 1, alone=True, peers__micro_batch=1)
    train_all(folder, FINISHED)


def finish_with_a_lie(folder: Path) -> None:
    """Make a run of one window: peer 1 lies in round 2, and peer 2, which is planted, in 3.

    It would lie in round 4 too, which the run does not have.
    """
    lie = {"kind": "sign_flip", "peer": 1, "rounds": [2, 2]}
    opened(
        folder, 3, lies={3: "sign_flip", 4: "drift"}, config__total_steps=3, faults__schedule=[lie]
    )
    train_all(folder, FINISHED[:3])


def sign_anew(folder: Path, path: Path, at: float = 0.0, **changes: object) -> Path:
    """Put a changed link of a run in `folder` in its peer's slot, at its time or `at` another."""
    said = unsigned(RoundLink, path.read_bytes(), "").model_copy(update=changes)
    key, at = keys.read(folder / f"{said.peer:03}" / "key.pem"), at or path.stat().st_mtime
    slot = path.with_name(f"{said.peer:03}.closed")
    slot.write_bytes(sign(said, key, path.stat().st_size))  # links have one length
    os.utime(slot, (at, at))
    return slot


def transcript(folder: Path, name: str) -> Path:
    return folder / name / "data" / "trained" / "transcript"


def output(folder: Path) -> str:
    """The end of what each process printed."""
    files = sorted(folder.glob("*.txt"))
    return "\n".join(f"{file.name}: {file.read_text()[-1500:]}" for file in files)
