import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from lockstep.errors import LockstepError
from pipeline import runfile, sources
from pipeline.net import remote
from pipeline.net.transfers import store
from pipeline.runfile import Network
from pipeline.runfile.data import DataLocal, Limit
from pipeline.sources import dry_run
from pipeline.sources.provider import opened_options
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT
from pipeline.start import set_up
from pipeline.tokens.shards import write_shards
from tests import tiny
from tests.errors import check_names
from tests.pipeline.sources.options import fetch_into, refusal
from tests.pipeline.trained_run import make_tokenizer


def put(path: Path, *ids: int) -> None:
    path.parent.mkdir(exist_ok=True)
    np.array(ids, "<u2").tofile(path)


def put_tokenizer(path: Path, vocab_size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    vocab = {f"t{number}": number for number in range(vocab_size - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(path))


def fetch(root: Path | str, folder: Path):
    return fetch_into(folder, DataLocal(path=str(root)))


def read(folder: Path) -> dict[str, list[int]]:
    return {
        path.relative_to(folder).as_posix(): np.fromfile(path, "<u2").tolist()
        for path in sorted(folder.rglob("*.ds"))
    }


def test_files_are_copied_in_the_order_of_their_names_whatever_that_on_disk(
    root, tmp_path, monkeypatch
):
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: reversed(sorted(iterdir(path))))
    for number, name in enumerate(["c.ds", "a.npy", "b.bin"]):
        put(root / name, number, 7)
    put(root / "held_out" / "z.ds", 8)
    put(root / "held_out" / "y.ds", 9)
    fetched = fetch(root, tmp_path / "out")
    expected = {f"train/0000{n}.ds": [one, 7] for n, one in enumerate((1, 2, 0))}
    expected |= {f"held_out/0000{n}.ds": [one] for n, one in enumerate((9, 8))}
    assert read(tmp_path / "out") == expected
    assert fetched.warnings == ()
    assert fetched.source["files"] == {
        "train": ["a.npy", "b.bin", "c.ds"],
        "held_out": ["held_out/y.ds", "held_out/z.ds"],
    }


def test_only_token_files_of_the_folder_itself_are_read(root, tmp_path):
    put(root / "a.ds", 1)
    put(root / "held_out" / "b.ds", 2)
    put(root / ".hidden.ds", 3)
    put(root / "notes.txt", 4)
    put(root / "below" / "c.ds", 5)
    (root / "d.ds").mkdir()
    fetch(root, tmp_path / "out")
    assert read(tmp_path / "out") == {"train/00000.ds": [1], "held_out/00000.ds": [2]}


@pytest.mark.parametrize(
    ("names", "held_out", "warning"),
    [
        (["a.ds", "b.ds", "c.ds"], ["c.ds"], "so the last file, c.ds, is held out"),
        (["a.ds"], [], "nothing is held out"),
        (["a.ds", "b.ds", "held_out/none"], [], None),
    ],
)
def test_without_a_held_out_folder_the_last_file_is_held_out_and_a_warning_says_so(
    root, tmp_path, names, held_out, warning
):
    for number, name in enumerate(names):
        put(root / name, number)
    fetched = fetch(root, tmp_path / "out")
    train = [name for name in names if name.endswith(".ds") and name not in held_out]
    assert fetched.source["files"] == {"train": train, "held_out": held_out}
    assert len(read(tmp_path / "out")) == len(train) + len(held_out)
    assert len(fetched.warnings) == (warning is not None)
    assert warning is None or (str(root) in fetched.warnings[0] and warning in fetched.warnings[0])


@pytest.mark.parametrize("measured", [64, 0])
@pytest.mark.parametrize("named", [True, False])
def test_a_run_that_measures_nothing_trains_on_what_is_held_out_only_by_default(
    root, tmp_path, monkeypatch, measured, named
):
    for number in range(3):
        folder = root / "held_out" if named and number == 2 else root
        put(folder / f"{number}.ds", *[number] * 16)
    write_shards(tmp_path / "out", fetch(root, tmp_path / "out"))
    (tmp_path / "init" / "hf").mkdir(parents=True)
    (tmp_path / "init" / "hf" / "config.json").write_text('{"vocab_size": 9}')
    run = runfile.parse(tiny.run_document(root, held_out__sequences=measured).unwrap(), "a test")
    programs = SimpleNamespace(steps=SimpleNamespace(by=SimpleNamespace()))
    monkeypatch.setattr(set_up, "programs_of", lambda *_: programs)
    monkeypatch.setattr(set_up, "_read_start", lambda *_: None)
    data = set_up.read(run, tmp_path / "init", tmp_path / "out").data
    trained = [0, 1] if measured or named else [0, 1, 2]
    assert data.take(np.arange(len(data)))[:, 0].tolist() == trained
    paths = Paths("download", tmp_path / "run.toml", tmp_path)
    lines = list(dry_run.lines(run, paths))
    assert f"  files      {len(trained)} to train on, {3 - len(trained)} held out" in lines
    warnings = [line for line in lines if "warning" in line]
    assert len(warnings) == (measured > 0 and not named)
    (tmp_path / "again").mkdir()
    with opened_options(run, paths) as options:
        fetched = sources.fetch(run.llm.data_location, tmp_path / "again", options)
    assert [f"download: warning: {warning}" for warning in fetched.warnings] == warnings


def test_what_a_limit_leaves_is_what_a_run_trains_on(root, tmp_path):
    for number in range(3):
        put(root / f"{number}.ds", number)
    fetched = fetch_into(tmp_path / "out", DataLocal(path=str(root)), Limit(files=1))
    assert not fetched.held_out_by_default


@pytest.mark.parametrize("below", [True, False])
def test_tokenizer_is_copied_and_gives_the_vocabulary(root, tmp_path, below):
    put(root / "a.ds", 1, 49)
    folder = root / "tokenizer" if below else root
    put_tokenizer(folder / "tokenizer.json", 50)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "code.py").write_text("raise SystemExit")
    fetched = fetch(root, tmp_path / "out")
    assert fetched.vocab_size == 50
    copied = {path.name for path in (tmp_path / "out" / "tokenizer").iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json"}


def test_a_tokenizer_in_an_older_form_is_converted(root, tmp_path):
    put(root / "a.ds", 1, 49)
    (folder := root / "tokenizer").mkdir()
    before = make_tokenizer()
    before.model.save(str(folder))
    assert "the tokenizer of " in refusal(fetch, root, tmp_path / "other")  # of which class?
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    given = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert fetch(root, tmp_path / "out").vocab_size == before.get_vocab_size()
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    assert made.encode("a text").ids == before.encode("a text").ids
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == given


def test_home_and_relative_folders_are_found(root, tmp_path, monkeypatch):
    put(root / "a.ds", 1)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch("~/tokens", tmp_path / "home").source["read"] == "~/tokens"
    monkeypatch.chdir(tmp_path)
    fetch("tokens", tmp_path / "relative")
    assert read(tmp_path / "home") == read(tmp_path / "relative") == {"train/00000.ds": [1]}


def test_another_content_or_name_is_another_source_hash(root, tmp_path):
    put(root / "a.ds", 1)
    put(root / "b.ds", 2)
    hashes = [fetch(root, tmp_path / "0").source["sha256"]]
    put(root / "b.ds", 3)
    hashes.append(fetch(root, tmp_path / "1").source["sha256"])
    os.rename(root / "b.ds", root / "c.ds")
    hashes.append(fetch(root, tmp_path / "2").source["sha256"])
    assert len(set(hashes)) == 3


def test_a_file_that_changes_while_it_is_read_in_place_is_refused(root, tmp_path):
    put(root / "a.ds", *range(9))
    put(root / "b.ds", *range(9))
    fetched = fetch_into(tmp_path / "out", DataLocal(path=str(root)), stream=True)
    origin, network = fetched.files[0].origin, Network()
    assert b"".join(remote.read(origin, 2, 6, network)) == bytes([1, 0, 2, 0])
    put(root / "a.ds", *range(8, -1, -1))
    with pytest.raises(LockstepError, match="changed since it was listed"):
        list(remote.read(origin, 2, 6, network))


def test_the_hash_is_that_of_what_was_copied(root, tmp_path, monkeypatch):
    put(root / "a.ds", 1)
    fetch_all = store.fetch

    def fetch_then_change(*arguments):
        done = fetch_all(*arguments)
        put(root / "a.ds", 2)
        return done

    monkeypatch.setattr(store, "fetch", fetch_then_change)
    (file,) = fetch(root, tmp_path / "out").files
    copied = (tmp_path / "out" / file.path).read_bytes()
    assert copied == b"\2\0"
    assert file.sha256 == hashlib.sha256(copied).hexdigest()


def test_a_folder_that_is_missing_or_has_no_token_files_is_refused_with_its_name(root, tmp_path):
    (root / "readme.md").touch()
    check_names(refusal(fetch, root, tmp_path / "out"), root, ".ds, .bin, .npy")
    missing = refusal(fetch, tmp_path / "nowhere", tmp_path / "other")
    check_names(missing, "model.LLM.data_location.Local", tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"123"])
@pytest.mark.parametrize("split", ["", "held_out/"])
def test_empty_file_or_one_of_odd_length_is_refused_with_its_name(root, tmp_path, split, content):
    put(root / "a.ds", 1)
    (root / "held_out").mkdir()
    (root / f"{split}b.ds").write_bytes(content)
    message = refusal(fetch, root, tmp_path / "out")
    assert f"{root / split / 'b.ds'}: found {len(content)} bytes" in message
    assert "2 bytes" in message


def test_id_beyond_the_tokenizer_is_refused_with_the_name_the_user_knows(root, tmp_path):
    put(root / "a.ds", 1, 2)
    put(root / "b.ds", 3, 4, 50)
    put_tokenizer(root / "tokenizer.json", 50)
    message = refusal(fetch, root, tmp_path / "out")
    assert f"{root / 'b.ds'}: found token id 50 at token 2, expected ids below 50" in message


def test_tokenizer_that_is_missing_or_cannot_be_read_is_refused_with_its_name(root, tmp_path):
    put(root / "a.ds", 1)
    (root / "tokenizer").mkdir()
    assert str(root / "tokenizer") in refusal(fetch, root, tmp_path / "out")
    (root / "tokenizer").rmdir()
    (root / "tokenizer.json").write_text('{\n"version": 3')
    assert str(root / "tokenizer.json") in refusal(fetch, root, tmp_path / "out2")


def test_shards_json_of_tokens_is_what_it_was_before_there_were_other_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tok").mkdir()
    put(tmp_path / "tok" / "a.ds", *range(6))
    put(tmp_path / "tok" / "held_out" / "b.ds", *range(6, 10))
    write_shards(tmp_path / "out", fetch("tok", tmp_path / "out"))
    golden = PROJECT / "tests" / "golden" / "shards.json"
    assert (tmp_path / "out" / "shards.json").read_text() == golden.read_text()
