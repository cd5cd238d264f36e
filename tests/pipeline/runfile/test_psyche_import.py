"""A Psyche file becomes a whole run file with the same meaning."""

import tomllib

import pytest

from lockstep.tables.faults import Fault
from pipeline import runfile
from pipeline.runfile import as_text, psyche_import
from pipeline.stage.keys import PROJECT
from tests.errors import refused

OLDER = PROJECT / "tests" / "fixtures" / "psyche_older_spelling.toml"
DEFAULT = PROJECT / "params" / "run.toml"

STATE = (PROJECT / "tests/fixtures/psyche/test.toml").read_text() + "[progress]\nstep = 7\n"
LOCATIONS = [
    'data_location = "Dummy"',
    'data_location = { Server = "127.0.0.1:20001" }',
    'data_location = { Local = "C:\\\\a \\"folder\\"\\u007f" }',
    'data_location = { Preprocessed = "ünïcode" }',
    """data_location.Http.token_size_in_bytes = "FourBytes"
data_location.Http.shuffle.Seeded = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, \
1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 255]
data_location.Http.location.NumberedFiles = { url_template = "a{}", start_index = 0, \
n_left_pad_zeros = 5, num_files = 3 }""",
]


def imported(tmp_path, text: str) -> tuple[str, runfile.Run]:
    source, target = tmp_path / "source.toml", tmp_path / "run.toml"
    source.write_text(text)
    whole = psyche_import.import_psyche(source)
    target.write_text(whole)
    return whole, runfile.load(target)


def tables(run: runfile.Run) -> dict:
    return run.model_dump(mode="json", exclude_none=True)


def test_older_sample_becomes_a_whole_run_that_means_the_same(tmp_path):
    text, run = imported(tmp_path, OLDER.read_text())
    assert tables(run) == tables(runfile.load(OLDER))
    assert run.config.rounds_per_epoch == 20


@pytest.mark.parametrize("location", LOCATIONS)
def test_state_file_becomes_a_run_without_its_state(tmp_path, location):
    text, run = imported(tmp_path, STATE.replace(LOCATIONS[0], location))
    told = next(line for line in text.splitlines() if "Left out" in line)
    assert told.endswith("run_id, run_state, progress.")
    psyche = tomllib.loads(STATE.replace(LOCATIONS[0], location))
    dump = tables(run)
    if "Local" in location:  # written as a table, in which the string's meaning is spelled out
        folder = psyche["model"]["LLM"]["data_location"]["Local"]
        assert dump["model"]["LLM"]["data_location"]["Local"]["path"] == folder
        del dump["model"]["LLM"]["data_location"], psyche["model"]["LLM"]["data_location"]
    assert dump["config"] == psyche["config"]
    assert dump["model"] == psyche["model"]


def test_every_table_and_key_is_written_with_its_default_and_its_meaning(tmp_path):
    text, run = imported(tmp_path, OLDER.read_text())
    document = tomllib.loads(text)
    assert set(document) == set(runfile.Run.model_fields)
    # Keys that a transcript has only where their values are others.
    assert document["peers"].pop("passes") == 1
    assert document["peers"].pop("bits") == "machine"
    assert document["peers"].pop("product_bits") == 20
    assert document.get("workload", {}).pop("repeats", True) is True
    assert document["held_out"].pop("rows") == "all"
    for name in runfile.Run.model_fields:
        if name != "model":
            assert document[name] == tables(run)[name]
    # dvc.yaml tracks it by its own name
    assert document["model"]["LLM"]["cold_start_warmup_steps"] == 0
    lines = text.splitlines()
    assert lines[0] == "#:schema ./run.schema.json"
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), line


def test_absent_keys_are_told_of(tmp_path):
    text, _ = imported(tmp_path, OLDER.read_text())
    for key in ("revision", "weight_decay", "seed"):
        assert f"\n# {key} is absent.\n" in text


def test_own_tables_of_the_source_are_kept(tmp_path):
    own = "[peers]\ncount = 3\nlayout = 'pmap'\n[faults]\nschedule = [{kind = 'sign_flip', peer = 2, rounds = [2, 9]}]\n"  # noqa: E501
    text, run = imported(tmp_path, f"{OLDER.read_text()}\n{own}[links]\nupload_mbps = [1, 2.5, 3]")
    assert (run.peers.count, run.peers.named_layout) == (3, "pmap (shard_map)")
    assert run.links.upload_mbps == (1.0, 2.5, 3.0)
    assert run.faults.schedule == (Fault(kind="sign_flip", peer=2, rounds=(2, 9)),)


def test_nothing_that_steers_a_terminal_is_printed_and_values_stay(tmp_path):
    prompt = "é\u202e\ufeff\x7f\x1b[31m\U000e0001\n😀"
    own = f"[evaluate]\nprompt = {as_text.toml(prompt)}\n"
    text, run = imported(tmp_path, f"{OLDER.read_text()}\n{own}")
    assert run.evaluate.prompt == prompt
    assert text.replace("\n", "").isprintable() and "é" in text and "😀" in text


def test_default_run_survives_its_own_import(tmp_path):
    _, run = imported(tmp_path, DEFAULT.read_text())
    assert run == runfile.load(DEFAULT)


def test_importing_twice_changes_nothing_more(tmp_path):
    once, _ = imported(tmp_path, OLDER.read_text())
    twice, _ = imported(tmp_path, once)
    assert twice == once


def test_unknown_key_in_the_source_is_refused(tmp_path):
    with refused("source.toml", "colour"):
        imported(tmp_path, 'colour = "red"\n' + OLDER.read_text())
