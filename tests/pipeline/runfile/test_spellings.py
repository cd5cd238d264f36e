"""Psyche's two spellings of a run file, older and current, and the keys that each needs."""

import tomllib

import pytest

from lockstep.methods.distro import OptimizerDistro
from lockstep.methods.schedule import ScheduleCosine
from lockstep.tables.links import Links
from pipeline import runfile
from tests.errors import check_names, refused
from tests.pipeline.runfile.edited_run import BASE, OLDER, REMOVE, complaint


def test_older_sample_loads_verbatim_without_any_table_of_ours():
    run = runfile.load(OLDER)
    assert run.peers.count == run.config.init_min_clients == run.config.min_clients == 1
    assert (run.config.rounds_per_epoch, run.config.epoch_time) == (20, None)
    assert run.config.global_batch_size_start == run.config.global_batch_size_end == 8
    assert run.config.batch_size(0) == run.config.batch_size(10**12) == 8
    assert run.config.checkpointers == ()
    assert run.config.waiting_for_members_extra_time == 10
    assert run.llm.cold_start_warmup_steps == 0
    assert run.llm.checkpoint.repo_id == "emozilla/llama2-20m-init"
    assert isinstance(run.llm.data_location.location, runfile.LocationGcp)
    assert isinstance(run.llm.lr_schedule, ScheduleCosine)
    assert isinstance(run.llm.optimizer, OptimizerDistro)
    assert run.llm.optimizer.weight_decay is None
    assert run.links == Links()
    assert run.runtime == runfile.Runtime()


def older(**config: object) -> runfile.Run:
    """The older sample with changes in [config]; a key that is None is removed."""
    document = tomllib.loads(OLDER.read_text())
    config = document["config"] | config
    document["config"] = {key: value for key, value in config.items() if value is not None}
    return runfile.parse(document, "run.toml")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"checkpointers": None}, ["config.checkpointers"]),
        ({"rounds": 3}, ["config.rounds", "rounds_per_epoch"]),
        ({"checkpointers": ["owner/name", "12D3KooW"]}, ["config.checkpointers[1]", "12D3KooW"]),
    ],
)
def test_an_error_in_the_older_spelling_is_about_its_own_keys(changes, named):
    with refused(*named):
        older(**changes)


@pytest.mark.parametrize("key", [f"config.{key}" for key in BASE["config"]])
def test_every_key_of_config_is_required(key):
    check_names(complaint((key, REMOVE)), key)


@pytest.mark.parametrize("key", [f"model.LLM.{key}" for key in BASE["model"]["LLM"]])
def test_every_key_of_llm_is_required_in_the_current_spelling(key):
    check_names(complaint((key, REMOVE)), key)


def test_checkpointers_are_kept():
    names = ["owner/name", "gs://bucket", "gs://bucket/a/b"]
    assert older(checkpointers=names).config.checkpointers == tuple(names)


def test_cold_start_of_the_older_spelling_fits_into_its_rounds():
    document = tomllib.loads(OLDER.read_text())
    document["model"]["LLM"]["cold_start_warmup_steps"] = 20
    runfile.parse(document, "run.toml")
    document["model"]["LLM"]["cold_start_warmup_steps"] = 21
    with refused("model.LLM.cold_start_warmup_steps", 21, "rounds_per_epoch", 20):
        runfile.parse(document, "run.toml")
