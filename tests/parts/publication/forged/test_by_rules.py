"""A publication whose bits no machine changes: what its author says of one excuses nothing."""

import shutil
from pathlib import Path

import pytest

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


SAID = {
    "threads": {"threads": "3"},
    "xla_flags": {"xla_flags": "--xla_cpu_enable_fast_math=true"},
    "platform": {"platform": "gpu", "device_kind": "H100"},
    "jax_threefry_partitionable": {"jax_threefry_partitionable": "False"},
}


@pytest.mark.parametrize("name", SAID)
def test_a_machine_that_the_header_names_is_a_contradiction(folder, name):
    change_json(HEADER, lambda header: header["environment"].update(SAID[name]))(folder)
    forge(folder)
    assert "header.json: environment." in refusal(folder)


def test_a_header_without_an_environment_is_a_contradiction(folder):
    change_json(HEADER, lambda header: header.update(environment={}))(folder)
    forge(folder)
    assert "header.json: environment.operations is None, expected " in refusal(folder)


def test_a_header_whose_machine_repeats_no_step_is_a_contradiction(folder):
    change_json(HEADER, lambda header: header.update(bitwise=False))(folder)
    forge(folder)
    assert "header.json: bitwise is false, expected true" in refusal(folder)


def test_other_operations_are_refused(folder):
    change_json(HEADER, lambda header: header["environment"].update(operations="0" * 12))(folder)
    forge(folder)
    assert f"environment.operations is '{'0' * 12}', expected " in refusal(folder)


def test_a_machine_that_a_message_names_is_compared_bit_for_bit_all_the_same(folder):
    for number in (1, 2, 3):
        change_round(folder, number, in_its_messages)
    new_transcript_hash(folder)
    forge(folder)
    assert verify(folder).bitwise


def in_its_messages(said: dict) -> None:
    for message in said["evidence"]["messages"].values():
        message["environment"] = "ab" * 32
