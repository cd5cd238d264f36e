"""A key changes with what a stage depends on, and with nothing else."""

from pathlib import Path

import pytest

from pipeline.stage import keys
from pipeline.stage.keys import PROJECT, RUN_FILE, STAGES, Keys
from tests.errors import refused

RUN = (PROJECT / RUN_FILE).read_text()


def keys_of(folder: Path, text: str) -> dict[str, str]:
    run = folder / "run.toml"
    run.write_text(text)
    found = Keys(run)
    return {stage: found.key(stage) for stage in STAGES}


def changed(folder: Path, old: str, new: str) -> set[str]:
    assert RUN.count(old) == 1
    before, after = keys_of(folder, RUN), keys_of(folder, RUN.replace(old, new))
    return {stage for stage in STAGES if before[stage] != after[stage]}


DOWNSTREAM_OF_TRAIN = {"train", "witness", "export", "evaluate", "report"}


@pytest.mark.parametrize(
    "old, new, stages",
    [
        ("compression_topk = 32", "compression_topk = 16", DOWNSTREAM_OF_TRAIN),
        ("held_out_percent = 9.0", "held_out_percent = 8.0", DOWNSTREAM_OF_TRAIN | {"download"}),
        ("rms_norm_eps = 1e-5", "rms_norm_eps = 1e-6", DOWNSTREAM_OF_TRAIN | {"convert"}),
        ("replay_percent = 25", "replay_percent = 50", DOWNSTREAM_OF_TRAIN - {"train"}),
        ("snapshot_every = 50", "snapshot_every = 40", DOWNSTREAM_OF_TRAIN),
        ('dtype = "float32"', 'dtype = "bfloat16"', {"export", "evaluate", "report"}),
        ('prompt = "def "', 'prompt = "class "', {"evaluate", "report"}),
        ("keep_steps = 2", "keep_steps = 3", set()),
        ("# ---- Psyche", "# ---- another comment", set()),
    ],
)
def test_a_value_changes_the_keys_of_just_the_stages_that_depend_on_it(tmp_path, old, new, stages):
    assert changed(tmp_path, old, new) == stages


def test_what_a_key_digests_is_recorded_as_it_was_though_source_is_edited_meanwhile(monkeypatch):
    found = keys.Keys(PROJECT / RUN_FILE)
    key = found.key("train")
    monkeypatch.setattr(keys, "digest_of_source", lambda path: f"edited {path}")
    assert keys.digest(found.content("train"))[:12] == key
    assert keys.Keys(PROJECT / RUN_FILE).key("train") != key


def test_any_run_file_has_a_key_or_one_line_says_why_not(tmp_path):
    assert keys_of(tmp_path, RUN.replace("compression_topk = 32", "compression_topk = 1979-05-27"))
    for text in ("a = " + "1" * 5000, "a = " + "[" * 5000, ".".join("a" * 9000) + " = 1"):
        with refused(tmp_path / "run.toml"):
            keys_of(tmp_path, text)


def test_a_missing_table_is_named(tmp_path):
    with refused(tmp_path / "run.toml", "links", "lockstep import"):
        keys_of(tmp_path, RUN.replace("[links]", "[links_]"))


def test_a_folder_is_digested_by_name_and_content_without_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "PROJECT", tmp_path)
    folder = tmp_path / "code"
    (folder / "__pycache__").mkdir(parents=True)
    (folder / "a.py").write_text("1")
    first = keys.digest_of_source(folder)
    (folder / "__pycache__" / "a.pyc").write_text("compiled")
    assert keys.digest_of_source(folder) == first
    (folder / "a.py").rename(folder / "b.py")
    assert keys.digest_of_source(folder) != first
