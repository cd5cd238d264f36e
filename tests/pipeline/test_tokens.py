import json
import os
from pathlib import Path

import numpy as np
import pytest

from pipeline import tokens
from pipeline.errors import LockstepError
from pipeline.locations import ShuffleDontShuffle, ShuffleSeeded
from pipeline.permutation import permute

SEED = tuple(range(1, 33))


def shards_folder(folder: Path, train=(), held_out=(), *, size=2, vocab=1000, shuffle=None) -> Path:
    """A shards folder with these token arrays, one for each file."""
    for split, arrays in (("train", train), ("held_out", held_out)):
        (folder / split).mkdir(parents=True)
        for number, array in enumerate(arrays):
            np.asarray(array).astype(f"<u{size}").tofile(folder / split / f"{number:05}.ds")
    shuffle = shuffle or ShuffleDontShuffle()
    tokens.write_shards(folder, size, vocab, shuffle, {"read": "a test"})
    return folder


def edit(folder: Path, change) -> None:
    path = folder / "shards.json"
    said = json.loads(path.read_text())
    change(said)
    path.write_text(json.dumps(said))


def refusal(call, *arguments) -> str:
    with pytest.raises(LockstepError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("size", [2, 4])
def test_sequences_are_the_whole_ones_of_each_file_in_turn(tmp_path, size):
    # 10, 8 and 3 tokens, in sequences of 4: two, two and none.
    train = [np.arange(10), 100 + np.arange(8), 200 + np.arange(3), 300 + np.arange(4)]
    sequences = tokens.open_shards(shards_folder(tmp_path, train, size=size), "train", 4)
    assert len(sequences) == 5
    batch = sequences.take(np.arange(5))
    assert batch.dtype == np.int32
    assert batch.tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [300, 301, 302, 303],
    ]


def test_a_file_that_divides_evenly_keeps_its_last_sequence(tmp_path):
    """Psyche's fixture has 3 x 2048 tokens, of which it makes two samples."""
    folder = shards_folder(tmp_path, [np.arange(6144) % 1000])
    assert len(tokens.open_shards(folder, "train", 2048)) == 3


def test_indices_may_come_in_any_order_and_repeat(tmp_path):
    train = [np.arange(0, 40), np.arange(40, 60), np.arange(60, 100)]
    sequences = tokens.open_shards(shards_folder(tmp_path, train), "train", 4)
    indices = np.array([24, 0, 11, 11, 3, 24, 10, 0])
    expected = indices[:, None] * 4 + np.arange(4)
    np.testing.assert_array_equal(sequences.take(indices), expected)
    assert sequences.take(np.array([], np.int64)).shape == (0, 4)


def test_many_files_agree_with_plain_slices(tmp_path):
    rng = np.random.default_rng(0)
    train = [rng.integers(0, 1000, rng.integers(1, 50)) for _ in range(40)]
    sequences = tokens.open_shards(shards_folder(tmp_path, train), "train", 7)
    expected = [a[i : i + 7] for a in train for i in range(0, len(a) - 6, 7)]
    order = rng.permutation(len(expected))
    np.testing.assert_array_equal(sequences.take(order), np.array(expected)[order])


def test_files_are_mapped_only_when_touched(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(8)])
    sequences = tokens.open_shards(folder, "train", 4)
    (folder / "train" / "00001.ds").unlink()
    assert sequences.take(np.array([0, 1])).shape == (2, 4)
    with pytest.raises(FileNotFoundError):
        sequences.take(np.array([2]))


def test_more_files_than_may_stay_open_can_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "OPEN_FILES", 3)
    train = [np.full(4, number) for number in range(20)]
    sequences = tokens.open_shards(shards_folder(tmp_path, train), "train", 4)
    open_before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    assert sequences.take(np.arange(20))[:, 0].tolist() == list(range(20))
    if open_before:
        assert len(os.listdir("/proc/self/fd")) <= open_before + 4


def test_seeded_train_split_is_permuted_and_held_out_is_not(tmp_path):
    data = np.arange(400)
    shuffle = ShuffleSeeded(seed=SEED)
    folder = shards_folder(tmp_path, [data[:240], data[240:]], [data], shuffle=shuffle)
    positions = np.arange(100)
    train = tokens.open_shards(folder, "train", 4).take(positions)[:, 0] // 4
    np.testing.assert_array_equal(train, permute(bytes(SEED), positions, 100))
    assert train.tolist() != positions.tolist()
    held_out = tokens.open_shards(folder, "held_out", 4).take(positions)[:, 0] // 4
    np.testing.assert_array_equal(held_out, positions)


def test_a_batch_does_not_depend_on_what_was_taken_before(tmp_path):
    shuffle = ShuffleSeeded(seed=SEED)
    folder = shards_folder(tmp_path, [np.arange(900)], shuffle=shuffle)
    used = tokens.open_shards(folder, "train", 9)
    for position in range(0, 100, 10):
        used.take(np.arange(position, position + 10))
    fresh = tokens.open_shards(folder, "train", 9)
    np.testing.assert_array_equal(used.take(np.array([7, 50])), fresh.take(np.array([7, 50])))


def test_a_split_without_files_has_no_sequences(tmp_path):
    sequences = tokens.open_shards(shards_folder(tmp_path, [np.arange(8)]), "held_out", 4)
    assert len(sequences) == 0
    assert "expected one of the 0 held_out sequences" in refusal(sequences.take, np.array([0]))


def test_shards_json_lists_files_by_name_with_length_and_hash(tmp_path):
    shards_folder(tmp_path, [np.arange(8)] * 2, [np.arange(4)])
    said = json.loads((tmp_path / "shards.json").read_text())
    assert [(f["path"], f["split"], f["tokens"]) for f in said["files"]] == [
        ("train/00000.ds", "train", 8),
        ("train/00001.ds", "train", 8),
        ("held_out/00000.ds", "held_out", 4),
    ]
    # SHA-256 of 00 00 01 00 02 00 03 00
    assert said["files"][2]["sha256"] == (
        "245bbd9d484dcf27c714e2690cd6544973de5d54aa9cd82eab23d6046a65faa8"
    )
    assert said["shuffle"] == "DontShuffle"
    assert tokens.read_shards(tmp_path).split("held_out")[0].tokens == 4


def test_truncated_shard_is_refused_with_its_name(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(8)])
    with open(folder / "train" / "00001.ds", "r+b") as file:
        file.truncate(14)
    message = refusal(tokens.open_shards, folder, "train", 4)
    assert str(folder / "train" / "00001.ds") in message
    assert "found 14 bytes, expected 16" in message


def test_missing_shard_is_refused_with_its_name(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8)])
    (folder / "train" / "00000.ds").unlink()
    message = refusal(tokens.open_shards, folder, "train", 4)
    assert str(folder / "train" / "00000.ds") in message


def test_odd_length_is_refused_with_the_file_and_the_token_size(tmp_path):
    path = tmp_path / "a.ds"
    path.write_bytes(b"12345")
    message = refusal(tokens.count_tokens, path, 2)
    assert str(path) in message
    assert "found 5 bytes, expected a multiple of the token size, 2 bytes" in message
    path.write_bytes(b"123456")
    assert tokens.count_tokens(path, 2) == 3
    assert "found 6 bytes" in refusal(tokens.count_tokens, path, 4)


def test_empty_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "a.ds").touch()
    assert f"{tmp_path / 'a.ds'}: found 0 bytes" in refusal(
        tokens.count_tokens, tmp_path / "a.ds", 2
    )


@pytest.mark.parametrize("at", [0, 9, 10, 15])
def test_id_beyond_the_vocabulary_is_refused_with_file_and_offset_where_read(tmp_path, at):
    data = np.arange(16)
    data[at] = 5000
    folder = shards_folder(tmp_path, [np.arange(16), data], vocab=5000)
    sequences = tokens.open_shards(folder, "train", 4)
    sequences.take(np.arange(4))
    message = refusal(sequences.take, np.array([7, 6, 5, 4, 0]))
    assert str(folder / "train" / "00001.ds") in message
    assert f"found token id 5000 at token {at}, expected ids below 5000" in message


def test_full_pass_finds_the_first_id_beyond_a_vocabulary_in_any_split(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SCAN_TOKENS", 3)
    folder = shards_folder(tmp_path, [np.arange(8)], [np.array([1, 2, 3, 4, 777, 6, 888])])
    tokens.check_ids(folder, 889)
    message = refusal(tokens.check_ids, folder, 777)
    assert str(folder / "held_out" / "00000.ds") in message
    assert "found token id 777 at token 4, expected ids below 777" in message


def test_four_byte_id_that_int32_cannot_hold_is_refused_without_a_vocabulary(tmp_path):
    data = np.array([1, 2**31 - 1, 2**31, 4])
    folder = shards_folder(tmp_path, [data], size=4, vocab=None)
    sequences = tokens.open_shards(folder, "train", 2)
    assert sequences.take(np.array([0])).tolist() == [[1, 2**31 - 1]]
    assert "found token id 2147483648 at token 2" in refusal(sequences.take, np.array([1]))


def test_sequences_longer_than_every_file_are_refused_naming_both_lengths(tmp_path):
    folder = shards_folder(tmp_path, [np.arange(8), np.arange(11)])
    message = refusal(tokens.open_shards, folder, "train", 12)
    assert "max_seq_len = 12" in message
    assert "11 tokens" in message
    assert str(folder / "train" / "00001.ds") in message
    assert len(tokens.open_shards(folder, "train", 11)) == 1


@pytest.mark.parametrize("index", [-1, 4, 10**12])
def test_index_beyond_the_end_is_refused_naming_it_and_the_number(tmp_path, index):
    folder = shards_folder(tmp_path, [np.arange(16)], shuffle=ShuffleSeeded(seed=SEED))
    sequences = tokens.open_shards(folder, "train", 4)
    message = refusal(sequences.take, np.array([0, index]))
    assert f"sequence {index} asked for" in message
    assert "the 4 train sequences" in message


def test_missing_shards_json_is_refused(tmp_path):
    assert str(tmp_path / "shards.json") in refusal(tokens.open_shards, tmp_path, "train", 4)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("format", lambda said: said.update(format=2)),
        ("token_size_in_bytes", lambda said: said.update(token_size_in_bytes=3)),
        ("files.0.tokens", lambda said: said["files"][0].update(tokens=0)),
        ("files.0.path", lambda said: said["files"][0].update(path="../outside.ds")),
        ("files.0.path", lambda said: said["files"][0].update(path="/train/00000.ds")),
        ("files.0.path", lambda said: said["files"][0].update(path="train/../../x.ds")),
        ("files.0.extra", lambda said: said["files"][0].update(extra=1)),
        ("shuffle", lambda said: said.update(shuffle={"Seeded": [1, 2]})),
        ("vocab_size", lambda said: said.pop("vocab_size")),
    ],
)
def test_malformed_shards_json_is_refused_naming_the_key(tmp_path, key, change):
    folder = shards_folder(tmp_path, [np.arange(8)])
    edit(folder, change)
    message = refusal(tokens.open_shards, folder, "train", 4)
    assert f"{folder / 'shards.json'}: {key}" in message


def test_shards_json_that_is_no_json_is_refused(tmp_path):
    (tmp_path / "shards.json").write_text("{")
    assert str(tmp_path / "shards.json") in refusal(tokens.open_shards, tmp_path, "train", 4)
