"""Rules of values and keys: an error names key, value and expectation; the edges load."""

import tomllib

import pytest
from pydantic import ValidationError

from lockstep.tables.explain import validate
from pipeline import runfile
from pipeline.runfile.data import LocationNumberedFiles
from tests.errors import check_names, refused
from tests.pipeline.runfile.edited_run import (
    DATA,
    DISTRO,
    FIXTURES,
    LOCAL,
    REMOVE,
    complaint,
    edited,
    fault,
    load,
)

SCHEDULE = "model.LLM.lr_schedule"
HUB = "model.LLM.checkpoint.Hub"


def edits_and_names() -> list[list[str]]:
    lines = (FIXTURES / "run_file_errors.txt").read_text().splitlines()
    return [line.split(" -> ") for line in lines if not line.startswith("#")]


def parse_edit(text: str) -> tuple[str, object]:
    key, value = text.split(" = ", 1)
    return key, tomllib.loads(f"value = {value}")["value"]


@pytest.mark.parametrize(("edits", "names"), edits_and_names(), ids=lambda text: text[:60])
def test_an_error_names_key_value_and_bound(edits, names):
    check_names(complaint(*map(parse_edit, edits.split("; "))), *names.split("  "))


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        (f"{HUB}.repo_id", "x" * 65, 64),
        (f"{HUB}.revision", "x" * 65, 65),
        (f"{DATA}.Server", "é" * 33, 66),
        (f"{DATA}.Local", "x" * 193, 193),
        (f"{DATA}.Local.shuffle.Seeded", [1] * 31, 32),
        (f"{DATA}.Local.shuffle.Seeded", [1] * 33, 32),
        (f"{DATA}.Local.shuffle.Seeded[31]", [1] * 31 + [256], 255),
        ("witness.replay[0]", ["1" * 5000 + ":0"], 20),
        ("witness.beacon", "drand quicknet 0 ab", 96),
        ("witness.beacon", "Drand quicknet 1 ab", 96),
        ("witness.beacon", " DRAND-round 1", 96),
        ("witness.beacon", "the Quick_net 1", 96),
    ],
)
def test_a_value_that_is_too_long_is_cut_in_the_error(key, value, bound):
    path = key.split("[")[0]
    at_data = [(DATA, {"Local": {"path": "folder"}})] if "shuffle" in path else []
    at_data += [(DATA, {})] if path in (f"{DATA}.Server", f"{DATA}.Local") else []
    message = complaint(*at_data, (path, value))
    check_names(message, key, bound)
    assert len(message) < 300


@pytest.mark.parametrize(
    "edit",
    [
        ("config.warmup_time", 0),
        ("config.warmup_time", 59),
        ("config.max_round_train_time", 59),
        ("config.witness_nodes", 0),
        ("config.witness_nodes", 2),
        ("config.init_min_clients", 2),
        ("config.init_min_clients", 4),
        ("config.global_batch_size_end", 4),
        ("config.verification_percent", 99),
        ("config.waiting_for_members_extra_time", 255),
        ("model.LLM.cold_start_warmup_steps", 2),
        (f"{SCHEDULE}.Cosine.total_steps", 26),
        (f"{DISTRO}.compression_decay", 0),
        (f"{DISTRO}.compression_decay", 1),
        (f"{DISTRO}.clip_grad_norm", REMOVE),
        (f"{HUB}.repo_id", "x" * 64),
        (f"{HUB}.repo_id", "/" + "x" * 300),
        (DATA, {"Local": "x" * 192}),
        ("links.latency_seconds", 0),
        ("links.upload_mbps", [20, 20, 5, 100]),
        ("faults.schedule", [fault(), fault(rounds=[30, 100]), fault(peer=0)]),
        ("faults.schedule", [fault(peer=[0, 1]), fault(peer=[2, 3])]),
        ("faults.schedule", [fault(kind="join", peer=2, rounds=[1, 100])]),
        ("faults.schedule", [fault(kind="collude", peer=[3, 0])]),
        ("faults.schedule", [fault(kind="wrong_precision", size=None)]),
        ("witness.replay", ["0:0", "1:3"]),
        ("witness.replay_percent", 0),
        ("witness.seed", "any text"),
        ("witness.beacon", "any text"),
        ("witness.beacon", f"drand quicknet 1 {'ab' * 48}"),
    ],
    ids=str,
)
def test_value_at_the_edge_of_a_rule_loads(edit):
    load(edit)


def test_local_steps_divide_the_batch_at_both_ends_of_a_ramp_without_sizes_between():
    ramp = [("config.global_batch_size_start", 8), ("config.global_batch_size_end", 16)]
    ramp += [("config.global_batch_size_warmup_tokens", 8 * 64)]
    run = load(*ramp, ("model.LLM.optimizer", {"FedAvg": LOCAL | {"inner_steps": 2}}))
    assert run.llm.inner_steps == 2
    assert [size for size, _ in run.config.sizes(64)] == [8, 16]


def test_chosen_windows_are_pairs_of_window_and_peer():
    assert load(("witness.replay", ["0:3", "01:0"])).witness.chosen == ((0, 3), (1, 0))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (runfile.DataWeightedHttp, {"url": "https://me:secret@h/mix.json"}),
        (runfile.DataUrl, {"url": "sftp://me:secret@h/a"}),
        (runfile.LocationSingleUrl, {"url": "http://secret@h/0.ds"}),
        (LocationNumberedFiles, {"url_template": "http://me:secret@h/{}.ds"}),
    ],
)
def test_an_address_with_a_password_is_refused_without_showing_it(kind, fields):
    """It would be in dvc.lock, DVC's cache, the report and the transcript."""
    with refused(*fields) as caught:
        validate(kind, fields, "run.toml")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["sftp://me@h/a", "s3://b/a@b:c", "s3://b?x=a:b@c"])
def test_an_address_without_a_password_is_as_it_is(url):
    assert runfile.DataUrl(url=url).url == url


def test_an_alias_is_shown_with_what_it_stands_for():
    assert load(("peers.layout", "pmap")).peers.named_layout == "pmap (shard_map)"
    assert load(("peers.layout", "vmap")).peers.named_layout == "vmap"


def test_integer_is_a_number():
    run = load((f"{DISTRO}.clip_grad_norm", 1), ("links.upload_mbps", 20))
    assert (run.llm.optimizer.clip_grad_norm, run.links.upload_mbps) == (1.0, 20.0)
    assert isinstance(run.llm.optimizer.clip_grad_norm, float)


def test_key_with_a_line_break_is_still_one_line():
    document = edited()
    document["peers"]["a\nb"] = 1
    with refused("run.toml", r'peers."a\nb"'):
        runfile.parse(document, "run.toml")
    check_names(complaint(("links.upload_mbps", {"a\nb": 1})), "links.upload_mbps", r'"a\nb"')


def test_name_of_thousands_of_characters_is_cut_in_the_error(tmp_path):
    long = "a" * 10_000
    cases = [("links.upload_mbps", {long: 1}), (f"peers.{long}", 1), (DATA, {long: 1})]
    for case in cases:
        message = complaint(case)
        assert "aaa..." in message and len(message) < 500
    path = tmp_path / "run.toml"
    path.write_text(f"x = {{{long} = 1, {long} = 2}}\n")
    with refused("run.toml") as caught:
        runfile.load(path)
    assert "aaa..." in str(caught.value) and len(str(caught.value)) < 500


def test_first_of_several_errors_is_reported_with_the_number_of_the_others():
    message = complaint(
        ("config.total_steps", 0), ("peers.micro_batch", 0), ("runtime.colour", "red")
    )
    check_names(message, "config.total_steps", 0, 2)
    assert "peers" not in message and "2" not in complaint(("config.total_steps", 0))


def test_run_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load().peers.count = 5
