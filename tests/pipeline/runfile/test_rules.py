"""Rules of values and keys: an error names key, value and expectation; the edges load."""

import tomllib
from decimal import ROUND_HALF_UP, Decimal

import pytest
from pydantic import ValidationError

from lockstep.methods.distro import OptimizerDistro
from lockstep.methods.schedule import ScheduleCosine
from lockstep.tables.faults import KINDS
from lockstep.tables.links import Links
from lockstep.tables.validation import validate
from pipeline import runfile
from pipeline.runfile.data import LocationNumberedFiles
from pipeline.stage.keys import PROJECT
from tests.errors import check_names, refused
from tests.pipeline.runfile.edited_run import (
    BASE,
    CONSILIENCE,
    DATA,
    DISTRO,
    FIXTURES,
    LOCAL,
    OLDER,
    REMOVE,
    complaint,
    edited,
    fault,
    load,
)

# ---- Rules of values and keys: an error names key, value and expectation; the edges load ----

SCHEDULE = "model.LLM.lr_schedule"
HUB = "model.LLM.checkpoint.Hub"
ROOM_OF_PARTS = PROJECT / "tests" / "parts"


def edits_and_names() -> list[list[str]]:
    """The edits of valid run files, those of tables that parts add too."""
    files = [FIXTURES / "run_file_errors.txt", *ROOM_OF_PARTS.glob("*/run_file_errors.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
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


# ---- Psyche's two spellings of a run file, older and current, and the keys that each needs ----


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


@pytest.mark.parametrize(
    "key",
    [f"config.{key}" for key in BASE["config"]]
    + [f"model.LLM.{key}" for key in BASE["model"]["LLM"]],
)
def test_every_key_of_config_and_llm_is_required_in_the_current_spelling(key):
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


# ---- Scheduled faults: every kind loads in a run that has what it needs ----

ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-8, "clip_grad_norm": 1.0}
VALUES = (f"{DISTRO}.quantize_1bit", False)
PLAIN = ("peers.wire", "psyche")
VERIFIED = ("config.verification_percent", 50)


def scheduled(kind: str, **changes) -> tuple[str, object]:
    return "faults.schedule", [fault(kind=kind) | changes]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_loads_in_a_run_that_has_what_it_needs(kind):
    needed = {"not_finite": [VALUES], "duplicated": [PLAIN], "false_verifier": [VERIFIED]}
    needed["bit_flip"] = [("peers.bits", "everywhere")]
    changes = {"collude": {"peer": [0, 2]}, "join": {"rounds": [1, 9]}}.get(kind, {})
    edits = [VALUES] if kind.startswith("scale_") else needed.get(kind, [])
    run = load(scheduled(kind, **changes), *edits)
    assert run.faults.schedule[0].kind == kind
    needs = {"values", "plain", "rules"} & {KINDS[kind].needs}
    assert bool(needs) == bool(edits) or kind == "false_verifier"


def test_gradients_have_a_size():
    load(scheduled("scale_up", size=3.0), ("model.LLM.optimizer", {"AdamW": ADAMW}))


def test_peers_of_a_fault_are_a_tuple_however_they_are_written():
    one, more = load(("faults.schedule", [fault(), fault(peer=[3, 0])])).faults.schedule
    assert (one.peers, more.peers) == ((2,), (3, 0))


# ---- The batch ramp: Psyche's numbers, and the sequences of a whole run ----


def test_batch_ramp_gives_psyches_numbers():
    ramp = runfile.CurrentConfig.model_validate(CONSILIENCE["config"])
    tokens = (0, 2**37, 2**38, 2**39 - 1, 2**39, 2**62)
    sizes = [ramp.batch_size(count) for count in tokens]
    assert sizes == [12288, 17408, 22528, 32768, 32768, 32768]


def test_batch_ramp_agrees_with_exact_arithmetic():
    ramp = load(
        ("config.global_batch_size_start", 3),
        ("config.global_batch_size_end", 61),
        ("config.global_batch_size_warmup_tokens", 4096),
    ).config
    for tokens in range(0, 5000, 8):  # 1024 and 3072 among them: halves, away from zero
        exact = 3 + Decimal(58 * min(tokens, 4096)) / 4096
        assert ramp.batch_size(tokens) == int(exact.to_integral_value(ROUND_HALF_UP))


def test_no_ramp_is_the_end_from_the_start():
    assert load(("config.global_batch_size_warmup_tokens", 0)).config.batch_size(0) == 8


@pytest.mark.parametrize(("warmup", "first", "index"), [(0, 0, 0), (3_000, 0, 0), (90_000, 7, 33)])
def test_sequences_of_a_run_are_those_of_its_rounds_one_by_one(warmup, first, index):
    config = load(
        ("config.global_batch_size_start", 3),
        ("config.global_batch_size_end", 61),
        ("config.global_batch_size_warmup_tokens", warmup),
        ("config.total_steps", 200),
    ).config
    counted = index
    for _ in range(first, 200):
        counted += config.batch_size(counted * 16)
    assert config.last_index(16, first, index) == counted


@pytest.mark.long
def test_sequences_of_an_endless_run_are_counted_in_no_time():
    config = load(
        ("config.global_batch_size_end", 60_000),
        ("config.global_batch_size_warmup_tokens", 2**54),
        ("config.total_steps", 2**32 - 1),
    ).config
    assert 4 * (2**32 - 1) < config.last_index(2048) < 60_000 * (2**32 - 1)
