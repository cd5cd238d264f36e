"""Stores whose run.json would command a reader's machine: nothing of it is run, read or fetched."""

import json
from pathlib import Path

import pytest

from lockstep.errors import RequestError
from parts.volunteers import joining, keys, layout
from parts.volunteers.bodies import RunDocument
from parts.volunteers.chain import statements
from parts.volunteers.lab import opening
from parts.volunteers.signed import sign
from parts.volunteers.store.schemes import open_store
from parts.volunteers.training.process import Onlooker
from pipeline import runfile
from pipeline.__main__ import app
from pipeline.runfile import as_text
from pipeline.runfile.strangers_values import Use
from tests import tiny
from tests.errors import refused
from tests.parts.publication.published_run import print_of
from tests.parts.volunteers import volunteering
from tests.servers.hub import Repo, running_hub

CANARY = "CANARY"  # stands for a file that nothing may touch
# What the door for strangers' run files refuses has its own tests: these show that it is asked.
ATTACKS = {
    "a command": (
        {
            "model__LLM__architecture": "HfAuto",
            "model__LLM__checkpoint": "Ephemeral",
            "model__LLM__data_location": "Dummy",
            "model__LLM__optimizer": {"DiLoCo": tiny.DILOCO["DiLoCo"] | {"inner": "Workload"}},
            "download": {},
            "pins__data": "",
            "workload": {
                "factory": "torch_classifier:Classifier",
                "config": {"hidden": 8},
                "inner": "command",
                "command": ["touch", CANARY],
            },
        },
        "workload.factory",
    ),
    "a folder of tokens": ({"model__LLM__data_location": {"Local": "HERE"}}, "data_location"),
    "data without a hash": ({"pins__data": ""}, "pins.data"),
}


def put(folder: Path, changes: dict) -> Path:
    """A store with such a run, of a lab that signs it."""
    here = tiny.write_data(folder / "private")
    found = volunteering.document(2, **{"pins__data": "ab" * 32, **changes}).unwrap()
    text = json.dumps(found).replace("HERE", str(here))
    tables = json.loads(text.replace(CANARY, str(folder / CANARY)))
    run = runfile.parse(tables, "run.toml").model_dump(mode="json", exclude={"runtime"})
    lab = keys.create(folder / "lab.pem")
    document = RunDocument(
        release=opening.release(), run=run, pins={"data": run["pins"]["data"]}, start="ab" * 32,
        slots=2, payload_bytes=1, own_bytes=1, self_test=None, state_bytes=0,
        lab=keys.public_text(lab),
    )  # fmt: skip
    store = folder / "store"
    store.mkdir()
    (store / layout.RUN).write_bytes(sign(document, lab))
    return store


@pytest.mark.parametrize("case", ATTACKS)
def test_what_a_strangers_run_would_do_here_is_refused_before_anything(case, tmp_path, monkeypatch):
    changes, key = ATTACKS[case]
    store, root = put(tmp_path, changes), tmp_path / "reader"
    root.mkdir()
    monkeypatch.chdir(root)
    status, out = print_of("verify", f"file://{store}", "--root", str(root))
    assert status == 2 and f"{key} is " in out
    keys.create(tmp_path / "me.pem")
    with tiny.like_a_process(), pytest.raises(RequestError, match=f"{key} is "):
        join = ["volunteer", "join", f"file://{store}", "--root", str(root)]
        app([*join, "--key", str(tmp_path / "me.pem")])
    assert not [*root.iterdir()]  # nothing was fetched, or computed with
    assert not (tmp_path / CANARY).exists()


def test_data_that_are_more_than_the_reader_wants_are_not_fetched(tmp_path, monkeypatch):
    keys.create(tmp_path / "me.pem")
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        hub.datasets["ours/data"] = Repo()
        hub.datasets["ours/data"].commit({"train.ds": bytes(2**16)})
        tokens = {"Hub": {"repo_id": "ours/data", "token_size_in_bytes": "TwoBytes"}}
        tokens["Hub"]["shuffle"] = "DontShuffle"
        address = f"file://{put(tmp_path, {'model__LLM__data_location': tokens})}"
        asks = (tmp_path / "reader", tmp_path / "me.pem", 0)
        with tiny.like_a_process(), refused("65,536", "at most 0", "--max-gb"):
            joining.join(address, *asks, from_state=False)
        with tiny.like_a_process(), refused("65,536", "at most 0", "--max-gb"):
            joining.follow(address, tmp_path / "reader", Onlooker(False, bool), max_gb=0)
        assert not hub.elsewhere  # where its large files are


def test_fresh_weights_that_are_more_than_the_reader_wants_are_not_made(tmp_path):
    keys.create(tmp_path / "me.pem")
    data = {"model__LLM__data_location": "Dummy", "download": {}, "pins__data": ""}
    address, count = f"file://{put(tmp_path, data)}", "bytes of files, expected at most 0"
    with tiny.like_a_process(), refused("checkpoint.Init.config", count, "--max-gb"):
        joining.join(address, tmp_path / "reader", tmp_path / "me.pem", 0, from_state=False)
    assert not [*(tmp_path / "reader").rglob("*.safetensors")]


@pytest.mark.parametrize("value", [None, [None], {"a": None}, 2**70])
def test_what_no_run_file_can_hold_is_said_of_the_strangers(value, tmp_path):
    store = put(tmp_path, {})
    document = statements.read_run(open_store(f"file://{store}"))[0]
    document.run["model"]["LLM"]["checkpoint"]["Init"]["config"]["odd"] = value
    (store / layout.RUN).write_bytes(sign(document, keys.read(tmp_path / "lab.pem")))
    with refused(f"file://{store}/run.json", "model.LLM.checkpoint.Init.config.odd"):
        joining.follow(f"file://{store}", tmp_path / "reader", Onlooker(False, bool))
    assert not (tmp_path / "reader").exists()


def test_a_run_file_that_the_reader_has_is_not_replaced(tmp_path):
    store, mine = put(tmp_path, {}), tmp_path / "run.toml"
    mine.write_text("mine")
    document = statements.read_run(open_store(f"file://{store}"))[0]
    _, written = joining._write_run(document, "", tmp_path, Use.JOINED, runfile.Runtime())
    assert mine.read_text() == "mine"
    assert runfile.load(written).links.clock == "store"


@pytest.mark.parametrize("case", ATTACKS)
def test_a_lab_learns_that_nobody_could_join_before_it_opens(case, tmp_path):
    changes, key = ATTACKS[case]
    there = put(tmp_path, changes)
    tables = statements.read_run(open_store(f"file://{there}"))[0].run
    run_file = tmp_path / "run.toml"
    run_file.write_text(as_text.run_file(runfile.parse(tables, "run.json")))
    with pytest.raises(RequestError, match=f"{key} is "):
        new = f"file://{tmp_path / 'new'}"
        joining.open_run(new, run_file, tmp_path, tmp_path / "lab.pem", None)
    assert not (tmp_path / "new").exists()
