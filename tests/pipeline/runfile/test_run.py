"""A run file loads whole, or one line says what is wrong with it."""

import copy
import re
import subprocess
import sys
import tomllib
from decimal import ROUND_HALF_UP, Decimal

import pytest
from pydantic import ValidationError

from pipeline import runfile
from pipeline.errors import LockstepError
from pipeline.runfile.data import LocationNumberedFiles
from pipeline.runfile.explain import validate
from pipeline.runfile.fault_kinds import KINDS
from pipeline.runfile.optimizers.optimizer_table import OptimizerWorkload
from pipeline.runfile.serde_enum import Variant, variants_of
from pipeline.stage.keys import PROJECT
from tests import tiny

FIXTURES = PROJECT / "tests" / "fixtures"
OLDER = FIXTURES / "psyche_older_spelling.toml"  # a sample of Psyche's documentation, verbatim
DEFAULT = PROJECT / "params" / "run.toml"

BASE = tomllib.loads("""
[config]
warmup_time = 30
cooldown_time = 5
epoch_time = 60
max_round_train_time = 15
round_witness_time = 1
min_clients = 2
init_min_clients = 3
verification_percent = 0
witness_nodes = 1
global_batch_size_start = 4
global_batch_size_end = 8
global_batch_size_warmup_tokens = 1000
total_steps = 100
waiting_for_members_extra_time = 3

[model.LLM]
architecture = "HfLlama"
data_type = "Pretraining"
max_seq_len = 64
cold_start_warmup_steps = 0
data_location = "Dummy"

[model.LLM.checkpoint.Hub]
repo_id = "owner/name"

[model.LLM.lr_schedule.Cosine]
base_lr = 4.0e-4
warmup_steps = 25
warmup_init_lr = 0.0
total_steps = 100
final_lr = 4.0e-5

[model.LLM.optimizer.Distro]
clip_grad_norm = 1.0
compression_decay = 0.999
compression_chunk = 64
compression_topk = 8
quantize_1bit = true

[peers]
count = 4
""")
REMOVE = type("Remove", (), {"__repr__": lambda self: "REMOVE"})()


def edited(*edits: tuple[str, object]) -> dict:
    """BASE with each value put at its dotted key, or removed from there."""
    document = copy.deepcopy(BASE)
    for key, value in edits:
        *tables, last = key.split(".")
        table = document
        for name in tables:
            table = table.setdefault(name, {})
        if value is REMOVE:
            del table[last]
        else:
            table[last] = value
    return document


def load(*edits: tuple[str, object]) -> runfile.Run:
    return runfile.parse(edited(*edits), "run.toml")


def complaint(*edits: tuple[str, object]) -> str:
    with pytest.raises(LockstepError) as caught:
        load(*edits)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message.removeprefix("run.toml: ")


# ---- the files that are there ----


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
    assert isinstance(run.llm.lr_schedule, runfile.ScheduleCosine)
    assert isinstance(run.llm.optimizer, runfile.OptimizerDistro)
    assert run.llm.optimizer.weight_decay is None
    assert run.links == runfile.Links()
    assert run.runtime == runfile.Runtime()


def test_default_run_loads_and_has_every_table():
    assert set(tomllib.loads(DEFAULT.read_text())) == set(runfile.Run.model_fields)
    run = runfile.load(DEFAULT)
    assert run.peers.count == 4
    assert isinstance(run.llm.checkpoint, runfile.CheckpointInit)
    assert isinstance(run.llm.data_location, runfile.DataCorpus)


TWO_BYTES = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}


def http(location):
    return {"Http": TWO_BYTES | {"location": location}}


GCP = http({"Gcp": {"bucket_name": "nous-pretraining-public-us", "filter_directory": ""}})
COMPRESSING = {
    "compression_decay": 0.9,
    "compression_chunk": 32,
    "compression_topk": 4,
    "quantize_1bit": False,
}
CONSILIENCE = tomllib.loads((FIXTURES / "psyche" / "consilience.toml").read_text())
WSD_40B = CONSILIENCE["model"]["LLM"]["lr_schedule"]


# ---- spellings ----


def older(**config: object) -> runfile.Run:
    """The older sample with changes in [config]; a key that is None is removed."""
    document = tomllib.loads(OLDER.read_text())
    config = document["config"] | config
    document["config"] = {key: value for key, value in config.items() if value is not None}
    return runfile.parse(document, "run.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpointers": None}, r"config\.checkpointers: missing, expected it"),
        ({"rounds": 3}, "unknown key, expected one of .*rounds_per_epoch"),
        (
            {"checkpointers": ["owner/name", "12D3KooW"]},
            r'checkpointers\[1\] is "12D3KooW", expected owner/name on the hub or gs://bucket/pre',
        ),
    ],
)
def test_an_error_in_the_older_spelling_is_about_its_own_keys(changes, message):
    with pytest.raises(LockstepError, match=message):
        older(**changes)


@pytest.mark.parametrize("key", [f"config.{key}" for key in BASE["config"]])
def test_every_key_of_config_is_required(key):
    assert complaint((key, REMOVE)).startswith(f"{key}: missing, expected it (")


@pytest.mark.parametrize("key", [f"model.LLM.{key}" for key in BASE["model"]["LLM"]])
def test_every_key_of_llm_is_required_in_the_current_spelling(key):
    message = complaint((key, REMOVE))
    assert message.startswith(key)
    assert "expected it (" in message


def test_checkpointers_are_kept():
    names = ["owner/name", "gs://bucket", "gs://bucket/a/b"]
    assert older(checkpointers=names).config.checkpointers == tuple(names)


# ---- rules ----

SCHEDULE = "model.LLM.lr_schedule"
LINEAR = BASE["model"]["LLM"]["lr_schedule"]["Cosine"]
ADAMW = {"betas": [0.9, 0.95], "weight_decay": 0.1, "eps": 1e-8, "clip_grad_norm": 1.0}
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
LOCAL = {"inner_steps": 1, "inner": {"SGD": SGD}}
DILOCO = LOCAL | {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}
DISTRO = "model.LLM.optimizer.Distro"
DATA = "model.LLM.data_location"
HUB = "model.LLM.checkpoint.Hub"
NUMBERED = {
    "url_template": "https://example.org/{}.ds",
    "start_index": 0,
    "n_left_pad_zeros": 5,
    "num_files": 3,
}


def fault(**changed):
    return {"kind": "sign_flip", "peer": 2, "rounds": [20, 29]} | changed


def edits_and_errors() -> list[tuple[str, str]]:
    lines = (FIXTURES / "run_file_errors.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    return list(zip(lines[::2], map(str.strip, lines[1::2]), strict=True))


def parse_edit(text: str) -> tuple[str, object]:
    key, value = text.split(" = ", 1)
    return key, tomllib.loads(f"value = {value}")["value"]


@pytest.mark.parametrize(("edits", "error"), edits_and_errors(), ids=lambda text: text[:60])
def test_an_error_names_key_value_and_expectation(edits, error):
    pattern = ".*".join(map(re.escape, error.split("...")))
    message = complaint(*map(parse_edit, edits.split("; ")))
    assert re.fullmatch(pattern, message), message


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{HUB}.repo_id", "x" * 65, "at most 64 bytes"),
        (f"{HUB}.revision", "x" * 65, "at most 64 bytes; this has 65"),
        (f"{DATA}.Server", "é" * 33, "at most 64 bytes; this has 66"),
        (f"{DATA}.Local", "x" * 193, "at most 192 bytes; this has 193"),
        (f"{DATA}.Local.shuffle.Seeded", [1] * 31, "at least 32 items"),
        (f"{DATA}.Local.shuffle.Seeded", [1] * 33, "at most 32 items"),
        (f"{DATA}.Local.shuffle.Seeded[31]", [1] * 31 + [256], "less than or equal to 255"),
        ("witness.replay[0]", ["1" * 5000 + ":0"], "at most 20 characters"),
        ("witness.beacon", "drand quicknet 0 ab", "drand quicknet ROUND SIGNATURE, of 96 hexadec"),
    ],
)
def test_a_value_that_is_too_long_is_cut_in_the_error(key, value, expected):
    path = key.split("[")[0]
    at_data = [(DATA, {"Local": {"path": "folder"}})] if "shuffle" in path else []
    at_data += [(DATA, {})] if path in (f"{DATA}.Server", f"{DATA}.Local") else []
    message = complaint(*at_data, (path, value))
    assert message.startswith(f"{key} is ")
    assert expected in message.split(", expected ")[1]
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


VALUES = (f"{DISTRO}.quantize_1bit", False)
PLAIN = ("peers.wire", "psyche")
VERIFIED = ("config.verification_percent", 50)


def scheduled(kind: str, **changes) -> tuple[str, object]:
    return "faults.schedule", [fault(kind=kind) | changes]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_loads_in_a_run_that_has_what_it_needs(kind):
    needed = {"not_finite": [VALUES], "duplicated": [PLAIN], "false_verifier": [VERIFIED]}
    changes = {"collude": {"peer": [0, 2]}, "join": {"rounds": [1, 9]}}.get(kind, {})
    edits = [VALUES] if kind.startswith("scale_") else needed.get(kind, [])
    run = load(scheduled(kind, **changes), *edits)
    assert run.faults.schedule[0].kind == kind
    needs = {"values", "plain"} & {KINDS[kind].needs}
    assert bool(needs) == bool(edits) or kind == "false_verifier"


def test_gradients_have_a_size():
    load(scheduled("scale_up", size=3.0), ("model.LLM.optimizer", {"AdamW": ADAMW}))


def test_peers_of_a_fault_are_a_tuple_however_they_are_written():
    one, more = load(("faults.schedule", [fault(), fault(peer=[3, 0])])).faults.schedule
    assert (one.peers, more.peers) == ((2,), (3, 0))


def test_chosen_windows_are_pairs_of_window_and_peer():
    assert load(("witness.replay", ["0:3", "01:0"])).witness.chosen == ((0, 3), (1, 0))


def test_cold_start_of_the_older_spelling_fits_into_its_rounds():
    document = tomllib.loads(OLDER.read_text())
    document["model"]["LLM"]["cold_start_warmup_steps"] = 20
    runfile.parse(document, "run.toml")
    document["model"]["LLM"]["cold_start_warmup_steps"] = 21
    with pytest.raises(LockstepError, match="is 21, expected at most rounds_per_epoch = 20"):
        runfile.parse(document, "run.toml")


# ---- types and keys ----


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
    with pytest.raises(LockstepError, match=r'^run\.toml: peers\."a\\nb": unknown key'):
        runfile.parse(document, "run.toml")
    assert 'a table with "a\\nb"' in complaint(("links.upload_mbps", {"a\nb": 1}))


def test_name_of_thousands_of_characters_is_cut_in_the_error(tmp_path):
    long = "a" * 10_000
    cases = [("links.upload_mbps", {long: 1}), (f"peers.{long}", 1), (DATA, {long: 1})]
    for case in cases:
        message = complaint(case)
        assert "aaa..." in message and len(message) < 500
    path = tmp_path / "run.toml"
    path.write_text(f"x = {{{long} = 1, {long} = 2}}\n")
    with pytest.raises(LockstepError, match=r"aaa\.\.\., expected TOML$") as caught:
        runfile.load(path)
    assert len(str(caught.value)) < 500


def test_first_of_several_errors_is_reported_with_the_number_of_the_others():
    message = complaint(
        ("config.total_steps", 0), ("peers.micro_batch", 0), ("runtime.colour", "red")
    )
    assert message.startswith("config.total_steps is 0")
    assert message.endswith("(and 2 more)")
    assert "more)" not in complaint(("config.total_steps", 0))


@pytest.mark.parametrize("file", tiny.READY_RUNS, ids=lambda f: f.name)
def test_every_run_file_of_the_project_loads(file):
    assert runfile.load(file).config.total_steps > 0


def test_run_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        load().peers.count = 5


# ---- variants ----

INIT = {"config": {"model_type": "llama", "rope_scaling": {"factor": 2.0}}, "seed": 1}
HUB_REPO = {"repo_id": "owner/name", "revision": "main"}
SEEDED = {"Seeded": list(range(32))}
ADA_DISTRO = {
    "AdaDistro": {
        **COMPRESSING,
        "second_moment_decay": 0.95,
        "update": "orthogonal",
        "step_scale": {"lm_head": 2.0},
        "topk_of": {"norm": 64},
        "untransformed": ["embed"],
        "removed": 0.2,
    }
}
STREAMING = tiny.STREAMING["StreamingDiLoCo"] | {"inner_steps": 2, "delay": 0}
PLACES = {"share": 0.1, "seed": 0, "selector": "shuffled"}
SPARTA_DILOCO = {**DILOCO, **PLACES, "outer_every": 10}
HUB_DATA = {"repo_id": "owner/name", "patterns": ["*.ds"], **TWO_BYTES}
CORPUS = {"text_key": "text", "vocab_size": 4096, "held_out_percent": 5.0, "shuffle": "DontShuffle"}
DOCUMENTS = {
    "source": "owner/name",
    "revision": "v1",
    "subset": "some",
    "split": "test",
    "files": ["a/*"],
    "column": "body",
    "tokenizer": "owner/model",
    "tokenizer_revision": "v2",
    "held_out_percent": 5.0,
    "shuffle": "DontShuffle",
}
ONE_SOURCE = {
    key: DOCUMENTS[key] for key in ("source", "revision", "subset", "split", "files", "column")
}
WEIGHTED_DOCUMENTS = {
    "sources": [ONE_SOURCE | {"weight": 2.5}],
    **{key: value for key, value in DOCUMENTS.items() if key not in ONE_SOURCE},
}
VARIANTS = [  # all keys, with other values than their defaults; of the rest, the least they need
    ("optimizer", {"StreamingDiLoCo": STREAMING}, runfile.OptimizerStreamingDiLoCo),
    ("optimizer", {"SPARTADiLoCo": SPARTA_DILOCO}, runfile.OptimizerSPARTADiLoCo),
    ("optimizer", tiny.MUON, runfile.OptimizerMuon),
    ("optimizer", ADA_DISTRO, runfile.OptimizerAdaDistro),
    ("checkpoint", {"Hub": HUB_REPO}, runfile.CheckpointHub),
    ("checkpoint", {"Gcs": {"bucket": "b", "prefix": "p"}}, runfile.CheckpointGcs),
    ("checkpoint", {"Init": INIT}, runfile.CheckpointInit),
    (
        "data_location",
        {"Local": {"path": "d", "token_size_in_bytes": "FourBytes", "shuffle": SEEDED}},
        runfile.DataLocal,
    ),
    ("data_location", GCP, runfile.DataHttp),
    ("data_location", http({"SingleUrl": "https://example.org/a.ds"}), runfile.DataHttp),
    ("data_location", http({"NumberedFiles": NUMBERED}), runfile.DataHttp),
    ("data_location", {"Corpus": CORPUS}, runfile.DataCorpus),
    ("data_location", {"Text": DOCUMENTS}, runfile.DataText),
    ("data_location", {"WeightedText": WEIGHTED_DOCUMENTS}, runfile.DataWeightedText),
    ("data_location", {"Hub": {**HUB_DATA, "revision": "v1"}}, runfile.DataHub),
    ("data_location", {"Url": {"url": "s3://bucket/folder", **TWO_BYTES}}, runfile.DataUrl),
    ("lr_schedule", {"Linear": LINEAR}, runfile.ScheduleLinear),
    ("lr_schedule", {"Cosine": LINEAR}, runfile.ScheduleCosine),
    ("lr_schedule", WSD_40B, runfile.ScheduleWarmupStableDecay),
]


ENUMS = {
    "optimizer": runfile.OptimizerVariant,
    "checkpoint": runfile.CheckpointVariant,
    "data_location": runfile.Data,
    "lr_schedule": runfile.ScheduleVariant,
}


def least(kind: type[Variant]) -> object:
    """The least that a variant needs: its required keys, each with a value at its lower bound."""
    whole = kind.model_json_schema()

    def value(node: dict) -> object:
        node |= whole["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else {}
        if forms := node.get("anyOf") or node.get("oneOf"):
            return value(forms[0])
        if "const" in node or "enum" in node:
            return node.get("const") or node["enum"][0]
        match node["type"]:
            case "object":
                return {key: value(node["properties"][key]) for key in node.get("required", ())}
            case "array":
                return [value(node["items"])] * node.get("minItems", 0)
            case "integer" | "number" as type_:
                above = node.get("exclusiveMinimum", 0) + (1 if type_ == "integer" else 0.5)
                return node.get("minimum", above)
        return {"string": "x", "boolean": False}[node["type"]]

    fields = value(whole)
    return {kind.tag(): fields[kind.newtype] if kind.newtype else fields} if fields else kind.tag()


GIVEN = {kind for _, _, kind in VARIANTS}
DERIVED = [
    (enum, least(kind), kind)
    for enum, base in ENUMS.items()
    for kind in variants_of(base)
    if kind not in GIVEN and kind is not OptimizerWorkload  # an inner optimizer alone
]


@pytest.mark.parametrize(("enum", "value", "kind"), [*VARIANTS, *DERIVED], ids=str)
def test_every_variant_loads_and_is_written_back_as_it_was(enum, value, kind):
    edits = [(f"model.LLM.{enum}", value)]
    if kind is runfile.OptimizerDecoupledDiLoCo:  # whose smallest round is a step of each peer
        edits.append(("config.global_batch_size_end", 4))
    run = load(*edits)
    variant = getattr(run.llm, enum)
    assert type(variant) is kind
    written = run.llm.model_dump(mode="json", exclude_none=True)[enum]
    assert getattr(load(*edits, (f"model.LLM.{enum}", written)).llm, enum) == variant
    if kind in GIVEN:  # with every key that has a default
        assert written == value


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
    with pytest.raises(LockstepError, match="expected no user or password in it") as caught:
        validate(kind, fields, "run.toml")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["sftp://me@h/a", "s3://b/a@b:c", "s3://b?x=a:b@c"])
def test_an_address_without_a_password_is_as_it_is(url):
    assert runfile.DataUrl(url=url).url == url


def test_variant_name_is_where_a_user_finds_it():
    llm = load(("model.LLM.optimizer", "Dummy"), (DATA, GCP)).llm
    assert runfile.variant_name(llm.optimizer) == "model.LLM.optimizer.Dummy"
    assert runfile.variant_name(llm.lr_schedule) == "model.LLM.lr_schedule.Cosine"
    assert runfile.variant_name(llm.checkpoint) == "model.LLM.checkpoint.Hub"
    location = llm.data_location.location
    assert runfile.variant_name(location) == "model.LLM.data_location.Http.location.Gcp"


def test_local_folder_as_a_string_holds_two_byte_tokens_unshuffled():
    location = load((DATA, {"Local": "folder"})).llm.data_location
    assert (location.path, location.token_size_in_bytes) == ("folder", "TwoBytes")
    assert location.shuffle == runfile.ShuffleDontShuffle()


# ---- files ----


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[config]\nwarmup_time = \n", ":2: Invalid value, expected TOML"),
        (b"[config]\n\nwarmup_time 3\n", ":3: Expected '=' after a key"),
        (b"[config]\na = 1\na = 2\n", ":3: Cannot overwrite a value, expected TOML"),
        (b"a = '''\n\n", ":3: "),
        (b"[config]\n# \xff\n", ":2: byte 0xff, expected UTF-8"),
    ],
)
def test_file_that_is_no_toml_is_refused_with_its_line(tmp_path, content, message):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    with pytest.raises(LockstepError) as caught:
        runfile.load(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["a = " + "[" * 5000 + "]" * 5000, "a = " + "1" * 5000])
def test_file_beyond_the_parsers_limits_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "huge.toml"
    path.write_text(content)
    with pytest.raises(LockstepError, match=r"^\S+huge\.toml: .*, expected TOML$"):
        runfile.load(path)


@pytest.mark.parametrize(
    "content",
    [
        "# " + "x" * 2**20,
        ".".join("a" * 20_000) + " = 1",
        "[" + " . ".join(['"a"'] * 20_000) + "]",
        "a = {" + ".".join("a" * 20_000) + " = 1}",
    ],
    ids=["large", "deep key", "deep table", "deep inline"],
)
def test_file_that_would_take_long_to_parse_is_refused_before_that(tmp_path, content, monkeypatch):
    path = tmp_path / "huge.toml"
    path.write_text(content)
    monkeypatch.setattr(tomllib, "loads", lambda _: pytest.fail("is parsed"))
    with pytest.raises(
        LockstepError, match=r"huge\.toml(:1)?: (over|a key of over) \d+ .*expected"
    ):
        runfile.load(path)


def test_missing_file_and_folder_are_refused_by_name(tmp_path):
    with pytest.raises(LockstepError, match=r"none\.toml: No such file"):
        runfile.load(tmp_path / "none.toml")
    with pytest.raises(LockstepError, match="Is a directory"):
        runfile.load(tmp_path)


def test_reading_a_run_file_imports_nothing_heavy():
    heavy = ("jax", "numpy", "optax")
    code = f"import sys, pipeline.runfile; print([m for m in {heavy} if m in sys.modules])"
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=PROJECT)
    assert printed.strip() == "[]"


# ---- the batch ramp ----


def test_batch_ramp_gives_psyches_numbers():
    ramp = runfile.CurrentConfig.model_validate(CONSILIENCE["config"])
    tokens = (0, 2**37, 2**38, 2**39 - 1, 2**39, 2**62)
    sizes = [ramp.batch_size(count) for count in tokens]
    assert sizes == [12288, 17408, 22528, 32768, 32768, 32768]


def test_batch_ramp_rounds_half_away_from_zero():
    ramp = load().config  # 4 -> 8 over 1000 tokens
    assert [ramp.batch_size(tokens) for tokens in (124, 125, 374, 375, 624, 625)] == [
        4, 5, 5, 6, 6, 7,
    ]  # fmt: skip


def test_batch_ramp_agrees_with_exact_arithmetic():
    ramp = load(
        ("config.global_batch_size_start", 3),
        ("config.global_batch_size_end", 61),
        ("config.global_batch_size_warmup_tokens", 4096),
    ).config
    for tokens in range(0, 5000, 7):
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


def test_sequences_of_an_endless_run_are_counted_in_no_time():
    config = load(
        ("config.global_batch_size_end", 60_000),
        ("config.global_batch_size_warmup_tokens", 2**54),
        ("config.total_steps", 2**32 - 1),
    ).config
    assert 4 * (2**32 - 1) < config.last_index(2048) < 60_000 * (2**32 - 1)
