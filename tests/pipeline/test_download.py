"""The stage, with each provider: what is true of the shards whichever of them made these."""

import contextlib
import hashlib
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.tables.variant import variants_of
from pipeline import download, runfile, sources
from pipeline.runfile.data import DataLocal, Limit
from pipeline.sources import dry_run, source_sha256
from pipeline.sources.provider import PROVIDERS, SOURCES, Provider, opened_options
from pipeline.stage.artifacts import Paths, verify
from pipeline.stage.keys import PROJECT
from pipeline.tokens.ids import check_ids
from pipeline.tokens.shards import read_shards
from pipeline.toml_file import read_toml
from tests import tiny
from tests.errors import refused
from tests.offered import offered
from tests.pipeline.sources import places
from tests.pipeline.sources.places import LENGTH, TRUTH, Place
from tests.pipeline.tokens.shards_folder import open_shards

RUN = PROJECT / "params" / "run.toml"
PLACES = places.PLACES.copy()  # and those of parts
for _part in offered("places"):
    PLACES |= _part.PLACES
LISTED = ("local", "single_url", "numbered", "gcp", "hub", "url", "weighted_by_length", "weighted")


@contextlib.contextmanager
def opened(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    folder.mkdir()
    with PLACES[name](folder, monkeypatch) as place:
        yield place


@pytest.fixture(params=PLACES)
def place(request, tmp_path, monkeypatch) -> Iterator[Place]:
    """Each location that has a provider."""
    with opened(request.param, tmp_path / "source", monkeypatch) as found:
        yield found


listed_only = pytest.mark.parametrize("place", LISTED, indirect=True)  # token files as they stand


def settings(location: dict | str, **table: object) -> runfile.Run:
    document = read_toml(RUN)
    document["model"]["LLM"]["data_location"] = location
    document["download"] |= table
    document["pins"]["data"] = ""
    return runfile.parse(document, "a test")


def run(location: dict | str, root: Path, **table: object) -> Path:
    paths = Paths("download", RUN, root)
    download.run(settings(location, **table), paths)
    return paths.out("download")


def taken(folder: Path, split: str = "train", count: int | None = None) -> np.ndarray:
    sequences = open_shards(folder, split, LENGTH)
    return sequences.take(np.arange(len(sequences) if count is None else count))


def mix_bytes(place: Place) -> int:
    """The length of the document that says what is mixed, where there is one."""
    return len(place.servers[0].files["mix.json"]) if "WeightedHttp" in place.location else 0


# ---- What holds for all ----


def test_two_runs_give_identical_bytes(place, tmp_path):
    one, other = run(place.location, tmp_path / "a"), run(place.location, tmp_path / "b")
    assert tiny.contents(one) == tiny.contents(other)


def test_shards_json_tells_each_file_and_the_made_file_verifies(place, tmp_path):
    folder = run(place.location, tmp_path / "run")
    (made,) = folder.glob("made-*.json")
    verify(made)
    said = json.loads((folder / "shards.json").read_text())
    assert said["format"] == 2
    assert len(said["source"]["sha256"]) == 64
    here = [file for file in said["files"] if file["origin"] is None]
    on_disk = {path.relative_to(folder).as_posix() for path in folder.rglob("*.ds")}
    assert {file["path"] for file in here} == on_disk
    for file in here:
        data = (folder / file["path"]).read_bytes()
        assert len(data) == file["tokens"] * said["token_size_in_bytes"] > 0
        assert hashlib.sha256(data).hexdigest() == file["sha256"]


def test_every_sequence_comes_once_and_lies_in_the_vocabulary(place, tmp_path):
    folder = run(place.location, tmp_path / "run")
    shards = read_shards(folder)
    if shards.vocab_size is not None:
        check_ids(folder, shards.vocab_size, LENGTH)
        assert (folder / "tokenizer" / "tokenizer.json").is_file()
    if not place.sure:
        return
    for split in ("train", "held_out"):
        files = [(folder / file.path).read_bytes() for file in shards.split(split)]
        whole = [np.frombuffer(data, f"<u{shards.token_size_in_bytes}") for data in files]
        rows = [tokens_T[: len(tokens_T) // LENGTH * LENGTH] for tokens_T in whole]
        in_file_order = [tuple(row) for some in rows for row in some.reshape(-1, LENGTH)]
        found = list(map(tuple, taken(folder, split)))
        assert sorted(found) == sorted(in_file_order)
        if split == "held_out":
            assert found == in_file_order
        else:
            assert len(found) > 3


def test_what_was_read_is_said_in_two_lines(place, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run(place.location, tmp_path / "run")
    *warnings, read, found = [m for m in caplog.messages if m.startswith("download: ")]
    assert read.startswith("download: read ") and read.endswith("not pinned)")
    assert re.search(" train (tokens|rows) in .* held_out (tokens|rows) in ", found)
    assert all(line.startswith("download: warning: ") for line in warnings)


def test_a_dry_run_says_what_there_is_and_how_fast_a_tenth_of_a_file_came(place, tmp_path):
    paths = Paths("download", RUN, tmp_path / "dry")
    lines = list(dry_run.lines(settings(place.location), paths))
    assert not list((tmp_path / "dry").rglob("*.ds"))
    tried = place.sent() - mix_bytes(place)  # which says where the files are
    folder = run(place.location, tmp_path / "run")
    train = read_shards(folder).split("train")
    said = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    if "time" in said:
        assert re.match(r"about \d+ seconds over one connection at .* a second, ", said["time"])
    assert bool(place.servers) == ("time" in said)
    # the end of a parquet file, which says how much text is in it, is most of so small a one
    assert tried <= place.sent() / (3 if "Text" in str(place.location) else 5)
    if place.listed:
        assert said["files"].startswith(f"{len(train)} to train on, ")
        assert said["tokens"] == f"{sum(file.tokens for file in train):,} to train on"
    assert any(re.search("3,200 (sequences|rows)", line) for line in lines)  # what the run needs


def own_text(folder: Path, size: int) -> runfile.Run:
    """The default run, without its pins, on a text of that many bytes."""
    folder.mkdir()
    (folder / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog.\n" * (size // 45)
    )
    how = {"vocab_size": 4096, "held_out_percent": 5.0, "shuffle": "DontShuffle"}
    return settings({"Text": {"source": str(folder), **how}})


@pytest.mark.parametrize(
    ("size", "said"), [(300_000, "too few"), (3_500_000, "perhaps too few"), (4_500_000, "enough")]
)
def test_a_dry_run_of_a_text_estimates_its_tokens_and_says_whether_they_are_enough(
    tmp_path, size, said
):
    run = own_text(tmp_path / "text", size)
    lines = [*dry_run.lines(run, Paths("download", RUN, tmp_path))]
    low, high = int(0.95 * size // 5), int(0.95 * size // 3)
    (found,) = [line for line in lines if line.startswith("  tokens ")]
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", found)][:2]
    assert numbers == pytest.approx([low, high], rel=0.01) and "an estimate" in found
    assert f"819,200 tokens, for which there are {said}, by that estimate" in lines[-1]
    amount = dry_run.look(run, Paths("download", RUN, tmp_path)).amount
    assert amount.is_too_little == (said == "too few")


def test_the_pin_of_other_data_is_named_before_what_these_data_lack(tmp_path, monkeypatch):
    """The default run's pin, left in: this text has too few words for its vocabulary as well."""
    with opened("corpus", tmp_path / "source", monkeypatch):
        run = runfile.load(RUN)
        expected = rf"\[pins\] data = {run.pins.data}, but .* expected what was pinned"
        with pytest.raises(LockstepError, match=expected):
            download.run(run, Paths("download", RUN, tmp_path))
        with pytest.raises(LockstepError, match=expected):
            list(dry_run.lines(run, Paths("download", RUN, tmp_path)))


def test_a_dry_run_says_whether_it_has_compared_the_pin(tmp_path, monkeypatch):
    with opened("corpus", tmp_path / "source", monkeypatch) as place:
        read, paths = settings(place.location), Paths("download", RUN, tmp_path)
        with opened_options(read, paths) as options:
            known = source_sha256(read.llm.data_location, options)
        pinned = read.pins.model_copy(update={"data": known})
        run = read.model_copy(update={"pins": pinned})
        assert any("it is these data" in line for line in dry_run.lines(run, paths))
        download.run(run, paths)  # it is the hash that the stage records
        limited = run.download.model_copy(update={"limit": Limit(tokens=9)})
        later = dry_run.lines(run.model_copy(update={"download": limited}), paths)
        assert any("compared once they are read" in line for line in later)


# ---- What holds for token files as they stand ----


@listed_only
def test_what_was_fetched_once_is_not_fetched_again(place, tmp_path):
    run(place.location, tmp_path / "run")
    sent = place.sent()
    run(place.location, tmp_path / "run")
    assert place.sent() - sent <= mix_bytes(place)


@listed_only
def test_offline_what_was_fetched_is_there_and_nobody_is_asked(place, tmp_path, monkeypatch):
    folder = run(place.location, tmp_path / "run")
    before, asked = tiny.contents(folder), [len(server.seen) for server in place.servers]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "Url" in place.location:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert tiny.contents(run(place.location, tmp_path / "run")) == before
    assert [len(server.seen) for server in place.servers] == asked
    if place.servers:
        with refused("HF_HUB_OFFLINE"):
            run(place.location, tmp_path / "other")


@listed_only
def test_read_while_training_the_sequences_are_the_same(place, tmp_path):
    fetched = run(place.location, tmp_path / "a")
    streamed = run(place.location, tmp_path / "b", stream=True)
    assert not list(streamed.rglob("*.ds"))
    for split in ("train", "held_out"):
        assert np.array_equal(taken(fetched, split), taken(streamed, split))


@pytest.mark.parametrize("source", sorted({*PLACES} - {*LISTED, "dummy", "weighted_documents"}))
def test_what_is_made_here_cannot_be_read_while_training(source, tmp_path, monkeypatch):
    with (
        opened(source, tmp_path / "source", monkeypatch) as place,
        refused("download.stream", True, False),
    ):
        run(place.location, tmp_path / "run", stream=True)


@pytest.mark.parametrize(
    ("limit", "count"),
    [
        ({"files": 1}, 700),
        ({"tokens": 1000}, 1000),
        ({"tokens": 10**9}, 700 + 710 + 720),
        ({"steps": 200, "batch": 16, "max_seq_len": 256}, None),  # more than there is
    ],
)
@pytest.mark.parametrize("source", ["local", "numbered", "gcp", "hub", "url"])
def test_a_limit_takes_the_first_of_the_train_split(source, limit, count, tmp_path, monkeypatch):
    with opened(source, tmp_path / "source", monkeypatch) as place:
        folder = run(place.location, tmp_path / "run", limit=limit)
        shards = read_shards(folder)
        train = b"".join((folder / file.path).read_bytes() for file in shards.split("train"))
        whole = b"".join(list(TRUTH.values())[:3])
        assert train == whole[: None if count is None else 2 * count]
        if place.servers:
            sent = sum(n for s in place.servers for name, n in s.sent.items() if ".ds" in name)
            assert sent <= len(train) + len(TRUTH["3.ds"])


def test_a_limit_by_weight_gives_each_location_its_share(tmp_path, monkeypatch):
    with opened("weighted", tmp_path / "source", monkeypatch) as place:
        folder = run(place.location, tmp_path / "run", limit={"tokens": 600})
        counts = [0, 0]
        for file in read_shards(folder).split("train"):
            counts[file.part] += file.tokens
    assert 420 <= counts[0] <= 422
    assert 180 <= counts[1] <= 182


def test_a_file_that_is_there_twice_is_warned_of_with_both_names(tmp_path, monkeypatch, caplog):
    with opened("local", tmp_path / "source", monkeypatch) as place:
        (tmp_path / "source" / "2.ds").write_bytes(TRUTH["0.ds"])
        run(place.location, tmp_path / "run")
    assert "download: warning: 0.ds and 2.ds are the same file" in caplog.messages


# ---- The table of providers ----


def test_a_data_server_is_refused_before_any_work(tmp_path):
    with refused("model.LLM.data_location.Server: would need"):
        run({"Server": "localhost:1234"}, tmp_path)
    assert not (tmp_path / "data").exists()


def test_every_location_but_a_data_server_has_a_provider():
    locations = [*PROVIDERS, *(kind for p in SOURCES for kind in p.PROVIDERS)]
    for location in locations:
        assert isinstance(sources.provider_of(location.model_construct()), Provider)
    known = {location.tag() for location in locations} | {"Server"}
    assert known == {kind.tag() for kind in variants_of(runfile.Data)}


def test_one_provider_does_not_import_another(monkeypatch):
    for name in PROVIDERS.values():
        monkeypatch.delitem(sys.modules, f"pipeline.sources.{name}", raising=False)
    assert sources.provider_of(DataLocal(path="x")).streams
    assert "pipeline.sources.text.corpus" not in sys.modules
