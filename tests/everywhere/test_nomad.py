"""A training by rules that is killed on one machine and goes on from its checkpoint on another."""

import shutil
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomlkit

from lockstep.files import read_json
from pipeline.stage.artifacts import Paths
from pipeline.stage.devices import FLAGS
from pipeline.stage.keys import PROJECT, RUN_FILE
from tests import tiny

# Stage train, which dies when a certain checkpoint is about to take its place.
KILLED = """
import os, runpy, signal, sys
deadly = sys.argv.pop(1)
def hook(event, arguments):
    if event == "os.rename" and os.fspath(arguments[1]).endswith(deadly):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
runpy.run_module("pipeline", run_name="__main__", alter_sys=True)
"""
NO_AVX512 = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX512CD,-AVX512DQ"
GLIBC = {"": "", "AVX2": NO_AVX512, "SSE4_2": f"{NO_AVX512},-AVX2,-AVX,-FMA,-BMI2"}
# Two devices of one program leave threads to spare.
FUSED, ALONE = {"layout": "shard_map", "threads": 5}, {"threads": 1}


class Part(NamedTuple):
    """A part of a training."""

    last: int  # its last round that is kept
    most: str = ""  # the widest instructions that XLA and glibc may use; "": all that there are
    devices: int = 1
    peers: dict[str, Any] = {}  # keys of [peers]; none in the first part, nor in the last


def travel(run_file: Path, root: Path, parts: list[Part]) -> None:
    """Train in parts, each in a process of its own, which is killed but for the last."""
    document, first = tomlkit.parse(run_file.read_text()), 0
    own, every = document["peers"], document["runtime"]["checkpoint_every"]
    for part in parts:
        work = Paths("train", run_file, root).scratch
        document["peers"] = own | part.peers
        tiny.write_run(run_file, document)
        if work.is_dir():  # layout and threads are in its key, although they change no bit
            work.rename(Paths("train", run_file, root).scratch)
        flags = f"--xla_cpu_max_isa={part.most}" if part.most else ""
        done = tiny.python(
            *("-c", KILLED, f"/checkpoints/{part.last + every}"),
            *("train", "--run", run_file, "--root", root),
            JAX_NUM_CPU_DEVICES=str(part.devices),
            XLA_FLAGS=f"{tiny.environment(PROJECT)['XLA_FLAGS']} {flags}".strip(),
            GLIBC_TUNABLES=GLIBC[part.most],
        )
        said = done.stdout + done.stderr
        assert done.returncode == (0 if part is parts[-1] else -signal.SIGKILL), said
        assert not first or f"resumes after round {first}\n" in said, said
        first = part.last


def expect_the_same_bytes(run_file: Path, document: tomlkit.TOMLDocument, *journeys: list[Part]):
    """Train without a move and on each journey; compare all bytes, and audit the last one."""
    tiny.write_run(run_file, document)
    tiny.make(run_file, start := run_file.parent / "start", "download", "convert")
    expected, last = None, journeys[0][-1].last
    for number, parts in enumerate(([Part(last)], *journeys)):
        shutil.copytree(start, root := start.with_name(str(number)))
        travel(run_file, root, parts)
        made = tiny.contents(root / "data/trained")
        assert made == (expected := expected or made)
    print(*journeys, made[f"transcript/snapshots/{last:05}/state.json"].decode(), sep="\n")
    tiny.by_hand(run_file, root, "witness")
    found = read_json(root / "metrics/witness.json")
    assert found["accepted"] and found["comparable"] and found["replayed_windows"], found


QWEN3 = tiny.MODEL | {"model_type": "qwen3"}
DISTRO = {"Distro": tiny.run_document("")["model"]["LLM"]["optimizer"]["Distro"]}
OPTIMIZERS = (DISTRO, tiny.ADAMW, tiny.MUON, tiny.DILOCO)
SIX = [Part(3), Part(6, "SSE4_2")]
TWENTY = [Part(7, "SSE4_2"), Part(14, "", 2, FUSED), Part(20, "AVX2")]
FIFTY = [Part(17), Part(34, "AVX2", 2, FUSED), Part(50, "SSE4_2")]
LONG, SOAK = pytest.mark.long, pytest.mark.soak
CASES = [pytest.param(tiny.MODEL | {"num_hidden_layers": 1}, DISTRO, SIX, marks=LONG)]
CASES += [pytest.param(tiny.DEEPSEEK, DISTRO, TWENTY, marks=SOAK)]
CASES += [pytest.param(m, o, FIFTY, marks=SOAK) for m in (tiny.MODEL, QWEN3) for o in OPTIMIZERS]


@pytest.mark.parametrize("model, optimizer, parts", CASES)
def test_a_run_that_moves_leaves_every_byte_of_one_that_does_not(model, optimizer, parts, tmp_path):
    document = tiny.run_document(
        tiny.write_data(tmp_path / "tokens"),
        model__LLM__architecture="HfAuto",
        model__LLM__checkpoint={"Init": {"seed": 0, "config": model}},
        model__LLM__optimizer=optimizer,
        peers__bits="everywhere",
        peers__product_bits=8,
        config__total_steps=parts[-1].last,
        witness__snapshot_every=parts[0].last,
    )
    expect_the_same_bytes(tmp_path / "run.toml", document, parts)


@SOAK
def test_the_default_run_moves_from_each_instruction_set_to_each_other(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", FLAGS)  # compiled as a user's is
    document = tomlkit.parse((PROJECT / RUN_FILE).read_text())
    document["runtime"]["checkpoint_every"] = 5
    there = [Part(50), Part(100, "AVX2", 1, ALONE), Part(150, "SSE4_2", 2, FUSED), Part(200)]
    back = [Part(50, "AVX2", 2), Part(100, "", 2, FUSED), Part(150, "SSE4_2"), Part(200, "AVX2")]
    expect_the_same_bytes(tmp_path / "run.toml", document, there, back)
