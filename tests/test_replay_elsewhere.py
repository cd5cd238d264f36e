"""A lone process with one device reproduces what peers on several devices did, bit for bit."""

import os
from pathlib import Path

import pytest

from lockstep.files import read_json
from tests import tiny

# Wide enough that XLA splits its sums over the threads of a pool.
MODEL = tiny.MODEL | {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


def train(folder: Path, data: Path, devices: int) -> tuple[Path, Path]:
    folder.mkdir()
    run_file, root = folder / "run.toml", folder / "root"
    document = tiny.run_document(
        data,
        config__total_steps=16,  # honest peers that differ in a bit do so within 13
        config__init_min_clients=4,
        config__global_batch_size_start=4,
        model__LLM__max_seq_len=128,
        model__LLM__checkpoint={"Init": {"seed": 0, "config": MODEL}},
        peers__count=4,
        peers__micro_batch=1,
        witness__snapshot_every=8,
        held_out__sequences=1,
        held_out__every=16,
        runtime__checkpoint_every=16,
    )
    tiny.write_run(run_file, document)
    tiny.make(run_file, root, "download", "convert")
    tiny.by_hand(run_file, root, "train", devices=devices)
    return run_file, root


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("two")
    return train(folder / "run", tiny.write_data(folder / "tokens"), devices=2)


@pytest.mark.release
def test_rounds_of_four_peers_replay_bit_for_bit_on_one_device(two_devices):
    run_file, root = two_devices
    tiny.by_hand(run_file, root, "witness", devices=1)
    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["accepted"], verdict["findings"]
    assert verdict["not_comparable"] is None
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 8


@pytest.mark.release
def test_training_on_one_device_gives_the_same_folder(two_devices, tmp_path):
    run_file, root = two_devices
    _, other = train(tmp_path / "one", run_file.parent.parent / "tokens", devices=1)
    found, expected = (tiny.contents(folder / "data/trained") for folder in (other, root))
    assert found == expected


@pytest.mark.long
def test_peers_on_two_devices_each_replay_bit_for_bit_where_there_are_but_two(tmp_path):
    settings = {"peers__fsdp": 2, "peers__threads": 8}
    settings |= {"config__total_steps": 2, "witness__snapshot_every": 1}
    run_file, root = tiny.start(tmp_path, **settings)
    tiny.make(run_file, root, "download", "convert")
    said = tiny.by_hand(run_file, root, "train", devices=4)
    assert "peer 1 runs on cpu:2, cpu:3" in said
    tiny.by_hand(run_file, root, "witness", devices=2)
    verdict = read_json(root / "data/verdict/verdict.json")
    assert (verdict["accepted"], verdict["not_comparable"]) == (True, None), verdict["findings"]
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 4


@pytest.mark.long
def test_with_other_instructions_nothing_is_compared_and_nobody_accused(tmp_path, monkeypatch):
    lie = {"kind": "sign_flip", "peer": 1, "rounds": [1, 2]}
    changes = {"config__total_steps": 2, "witness__snapshot_every": 2, "faults__schedule": [lie]}
    run_file, root = tiny.start(tmp_path, model__LLM__optimizer=tiny.ADAMW, **changes)
    tiny.make(run_file, root, "download", "convert", "train")
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} --xla_cpu_max_isa=AVX")
    said = tiny.by_hand(run_file, root, "witness")
    verdict = read_json(root / "data/verdict/verdict.json")
    assert (verdict["accepted"], verdict["findings"], verdict["replayed_windows"]) == (True, [], [])
    assert "xla_flags is" in verdict["not_comparable"]
    assert '[peers] bits = "everywhere"' in verdict["not_comparable"]  # what would make it so
    assert "witness: NOT COMPARABLE HERE" in said
