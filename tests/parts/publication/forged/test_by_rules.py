"""A publication whose bits no machine changes: what its author says of one excuses nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.transcript.trees import load_arrays
from parts.publication import publish
from tests import tiny
from tests.parts.publication.forged.changes import HEADER, new_transcript_hash
from tests.parts.publication.published_run import (
    STAGES,
    change_json,
    change_round,
    forge,
    refusal,
    verify,
)

pytestmark = pytest.mark.long


def make(folder: Path) -> None:
    changes = {"peers__bits": "everywhere", "config__total_steps": 3}
    run_file, root = tiny.start(folder, **changes)
    tiny.make(run_file, root, *STAGES)
    publish.write(folder / "published", run_file, root, 2, None)


@pytest.fixture(scope="session")
def by_rules(tmp_path_factory) -> Path:
    return tiny.in_common(tmp_path_factory, "published-by-rules", make) / "published"


@pytest.fixture
def folder(by_rules, tmp_path) -> Path:
    return shutil.copytree(by_rules, tmp_path / "folder")


def on(**machine: str) -> Callable[[dict], None]:
    return lambda header: header["environment"].update(machine)


SAID = {
    "other threads": (on(threads="3"), "environment."),
    "other flags": (on(xla_flags="--xla_cpu_enable_fast_math=true"), "environment."),
    "another platform": (on(platform="gpu", device_kind="H100"), "environment."),
    "other draws": (on(jax_threefry_partitionable="False"), "environment."),
    "other operations": (on(operations="0" * 12), f"environment.operations is '{'0' * 12}'"),
    "no machine": (lambda h: h.update(environment={}), "environment.operations is None, expected "),
    "one that repeats no step": (
        lambda header: header.update(bitwise=False), "bitwise is false, expected true"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_machine_that_the_header_names_is_a_contradiction(folder, name):
    change, said = SAID[name]
    change_json(HEADER, change)(folder)
    forge(folder)
    assert f"header.json: {said}" in refusal(folder)


def test_a_machine_that_a_message_names_is_compared_bit_for_bit_all_the_same(folder):
    for number in (1, 2, 3):
        change_round(folder, number, in_its_messages)
    new_transcript_hash(folder)
    forge(folder)
    assert verify(folder).bitwise


def in_its_messages(said: dict) -> None:
    for message in said["evidence"]["messages"].values():
        message["environment"] = "ab" * 32


def test_a_process_of_its_own_knows_the_operations_without_the_first_row(folder):
    rows = [load_arrays(path)["indices"] for path in (folder / "proof/rows").iterdir()]
    assert any(0 not in indices for indices in rows)
    program = "import os; os.environ.pop('JAX_DEFAULT_MATMUL_PRECISION', 0); {}; main()"
    program = program.format("from pipeline.__main__ import main")  # as nobody has set it
    for seed in ("9f3c1b7ad5e2486089b1c4d7", "d5e2486089b1c4d79f3c1b7a"):
        done = tiny.python("-c", program, "verify", folder, "--seed", seed)
        assert "repeats bit for bit" in done.stdout, done.stdout + done.stderr
