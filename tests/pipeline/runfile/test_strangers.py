"""What a stranger's run file may say: an answer for every key, and what is refused, by its name."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import pytest

from lockstep.errors import RequestError
from lockstep.tables.table import Table
from lockstep.tables.variant import Variant, variants_of
from pipeline.runfile import Run, Runtime, strangers, strangers_values
from pipeline.runfile.schema import json_schema
from pipeline.runfile.strangers import ANSWERS, answer_to
from pipeline.runfile.strangers_values import KeyAnswer, Use
from tests.errors import refused
from tests.offered import offered
from tests.pipeline.runfile.edited_run import edited

DATA, CHECKPOINT, OPTIMIZER = (
    f"model.LLM.{name}" for name in ("data_location", "checkpoint", "optimizer")
)
CHUNK, LIE = "compression_chunk", {"kind": "sign_flip", "peer": 0, "rounds": [1, 2]}
SIDE = f"{OPTIMIZER}.Distro.{CHUNK}"
NUMBERED = f"{DATA}.Http.location.NumberedFiles.url_template"
# Every key of which a stranger's value does not count everywhere, and where it is taken.
ANSWERED = {
    **dict.fromkeys(("peers.micro_batch", "evaluate.batch_size"), "BOUNDED"),
    **dict.fromkeys(("evaluate.tasks", "evaluate.sample_tasks"), "OWN_TASKS"),
    **dict.fromkeys(("evaluate.trust_task_code", "export.every_epoch", "download.stream"), "SAID"),
    "config.checkpointers": "NOWHERE",
    **{f"faults.schedule{key}": "LIE" for key in ("", ".kind", ".peer", ".rounds", ".size")},
    **{f"{OPTIMIZER}.{name}.{CHUNK}": "SIDE" for name in ("Distro", "SparseLoCo")},
    **{
        f"{table}.{key}": answer
        for table, answer, keys in (
            (CHECKPOINT, "SAID", "Dummy Dummy.repo_id Dummy.revision"),
            (CHECKPOINT, "HUB_NAME", "Hub.repo_id P2P.repo_id"),
            (DATA, "SAID", "Server Server.address Local Local.path Url Url.url Corpus.packages"),
            (DATA, "SAID", "WeightedHttp WeightedHttp.url"),
            (DATA, "HUB_NAME", "Preprocessed.source Hub.repo_id"),
            (DATA, "HUB_NAME", "Corpus.tokenizer Text.tokenizer WeightedText.tokenizer"),
            (DATA, "SOURCE", "Text.source WeightedText.sources.source"),
            (f"{DATA}.Http.location", "HTTPS", "SingleUrl.url NumberedFiles.url_template"),
        )
        for key in keys.split()
    },
}
for _part in offered("strangers"):
    ANSWERED |= _part.ANSWERED
BY_KIND = f"{OPTIMIZER}.", "model.LLM.lr_schedule.", "runtime."  # answered at once


def every_key(table: type[Table], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each key that a run file can have, kinds of enums too, with its type."""
    for name, field in table.model_fields.items():
        key = f"{path}{name}"
        models = tables_in(field.annotation)
        if not models or {tuple, NoneType} & {*map(kind, parts_of(field.annotation))}:
            yield key, field.annotation
        for model in models:
            inner = f"{key}.{model.tag()}" if issubclass(model, Variant) else key
            if inner != key:
                yield inner, model
            yield from every_key(model, f"{inner}.")


def parts_of(annotation: Any) -> list[Any]:
    """A type and all types in it, but not the words of a Literal."""
    if get_origin(annotation) is Literal:
        return [annotation]
    return [annotation, *(part for inner in get_args(annotation) for part in parts_of(inner))]


def kind(annotation: Any) -> Any:
    return get_origin(annotation) or annotation


def tables_in(annotation: Any) -> list[type[Table]]:
    tables = [p for p in parts_of(annotation) if isinstance(p, type) and issubclass(p, Table)]
    kinds = [variants_of(table) if issubclass(table, Variant) else [] for table in tables]
    return [one for table, found in zip(tables, kinds, strict=True) for one in found or [table]]


KEYS = dict(every_key(Run))


def test_each_key_of_the_run_file_has_its_answer():
    kinds = vars(strangers_values).items()
    names = {one: name for name, one in kinds if isinstance(one, KeyAnswer)}
    found = {key: names.get(answer_to(key)) for key in KEYS if key != "runtime"}
    assert {key for key, word in found.items() if word is None} == set()  # a new key
    assert {key: word for key, word in found.items() if word != "FREE"} == ANSWERED


def test_each_key_of_the_schema_is_among_them():
    """The walk over types, on which the other tests rest, misses none that an editor knows."""
    names = {part for key in KEYS for part in key.split(".")}
    whole = json.loads(json_schema())
    tables = [whole, *whole["$defs"].values()]
    assert {key for table in tables for key in table.get("properties", ())} - {"base"} <= names


def test_no_answer_is_to_a_key_that_there_is_not():
    used = {(pattern, name) for pattern, names, _ in ANSWERS for name in names.split()}
    for key in KEYS:
        table, _, last = key.rpartition(".")
        row = next(
            (pattern, names)
            for pattern, names, _ in ANSWERS
            if strangers.fnmatchcase(table, pattern) and (names == "*" or last in names.split())
        )
        used -= {(row[0], "*" if row[1] == "*" else last)}
    assert used == set()


def test_what_is_answered_at_once_has_numbers_and_words_of_a_list_alone():
    """A new method needs no answer of its own; one whose table takes any text does."""
    closed = {int, float, bool, NoneType, tuple, dict, Literal}
    for key, annotation in KEYS.items():
        if key.startswith(BY_KIND[:2]) and not (
            isinstance(annotation, type) and issubclass(annotation, Variant)
        ):
            leaves = [part for part in parts_of(annotation) if not get_args(part)]
            # a dict is a number for each group of params, by its name
            assert kind(annotation) is dict or str not in leaves, key
            assert closed & {*map(kind, parts_of(annotation))}, key


# ---- What is refused ----

HTTPS = "https://data.example.org/a.ds"
TOKENS = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}
TEXT = {"held_out_percent": 5.0, "vocab_size": 300, "shuffle": "DontShuffle"}
PIN = "ab" * 32
PINNED = ("pins", {"data": PIN, "checkpoint": PIN})
OLDER = {"rounds_per_epoch": 10, "global_batch_size": 4}
CONFIG = {
    **{"warmup_time": 30, "cooldown_time": 5, "max_round_train_time": 15, "round_witness_time": 1},
    **{"min_clients": 2, "verification_percent": 0, "witness_nodes": 1, "total_steps": 10},
    **OLDER,
}


def http(**location: Any) -> dict:
    return {"Http": {**TOKENS, "location": location}}


def numbered(template: str) -> dict:
    found = {"url_template": template, "start_index": 0, "n_left_pad_zeros": 1, "num_files": 2}
    return {"NumberedFiles": found}


def sources(source: str) -> dict:
    return {"WeightedText": {**TEXT, "sources": [{"source": source, "weight": 1.0}]}}


# A dotted key; its value; how errors name it; the last use in which it is taken.
REFUSED = [
    (DATA, {"Local": "/home/me/private"}, DATA, Use.REPEATED),
    (DATA, {"Url": {**TOKENS, "url": "s3://bucket/mine"}}, DATA, Use.REPEATED),
    (DATA, {"WeightedHttp": HTTPS}, DATA, Use.REPEATED),
    (DATA, {"Server": "10.0.0.1:80"}, DATA, Use.REPEATED),
    *(
        (DATA, value, f"{DATA}.{key}", Use.REPEATED)
        for place in (
            *("/etc", "~/texts", "../texts", "pipeline/runfile", "file:///etc/passwd"),
            *("s3://bucket/mine", "http://data.example.org/a.txt", "https://localhost/a.txt"),
            *("https://127.0.0.1/a.txt", "https://2130706433/a.txt", "https://0x7f.1/a.txt"),
            *("https://[::1]/a.txt", "https://a.localhost/a.txt", "https://server/a.txt"),
            *("https://localhost.localdomain/a", "https://router.lan/a", "https://a.home.arpa:1/a"),
            *("https://data.example.org\t/a", "https://data.example.org/a\r\nHost: b"),
            *("https://a.LAN", "https://127.0.0.1\\.data.example.org/a"),
        )
        for key, value in (
            ("Text.source", {"Text": {**TEXT, "source": place}}),
            ("WeightedText.sources.source", sources(place)),
        )
    ),
    (DATA, {"Preprocessed": "/data"}, f"{DATA}.Preprocessed.source", Use.REPEATED),
    (DATA, {"Preprocessed": "pipeline/runfile"}, f"{DATA}.Preprocessed.source", Use.REPEATED),
    (
        DATA,
        {"Corpus": {"held_out_percent": 5.0, "tokenizer": "/mine", "shuffle": "DontShuffle"}},
        f"{DATA}.Corpus.tokenizer",
        Use.REPEATED,
    ),
    *(
        (DATA, http(SingleUrl=url), f"{DATA}.Http.location.SingleUrl.url", Use.REPEATED)
        for url in ("http://169.254.169.254/latest", "https://10.0.0.7/a.ds", "file:///a.ds")
    ),
    (DATA, http(**numbered("http://host.example.org/{}.ds")), NUMBERED, Use.REPEATED),
    (CHECKPOINT, {"Hub": {"repo_id": "/home/me/model"}}, f"{CHECKPOINT}.Hub.repo_id", Use.REPEATED),
    (CHECKPOINT, {"Hub": {"repo_id": "tests/tiny.py"}}, f"{CHECKPOINT}.Hub.repo_id", Use.REPEATED),
    (CHECKPOINT, {"P2P": {"repo_id": "./model"}}, f"{CHECKPOINT}.P2P.repo_id", Use.REPEATED),
    (CHECKPOINT, {"Dummy": {"repo_id": "a"}}, CHECKPOINT, Use.REPEATED),
    ("config", CONFIG | {"checkpointers": ["mallory/loot"]}, "config.checkpointers", Use.REPEATED),
    ("evaluate.trust_task_code", True, "evaluate.trust_task_code", Use.REPEATED),
    ("evaluate.tasks", ["next_line", "/tmp/mine.yaml"], "evaluate.tasks", Use.REPEATED),
    ("evaluate.sample_tasks", ["hellaswag"], "evaluate.sample_tasks", Use.REPEATED),
    ("evaluate.batch_size", 10**9, "evaluate.batch_size", None),
    ("peers.micro_batch", 10**9, "peers.micro_batch", None),
    (SIDE, 2**16 - 1, SIDE, None),
    ("download.stream", True, "download.stream", Use.REPEATED),
    ("faults.schedule", [LIE], "faults.schedule", Use.FOLLOWED),
]


for _part in offered("strangers"):
    REFUSED += [(key, value, key, Use.REPEATED) for key, value in _part.REFUSED]


def taken(use: Use, *edits: tuple[str, Any], **more: Any) -> Run:
    return strangers.read(edited(*edits), "run.json", use, more.pop("runtime", Runtime()), **more)


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize(("key", "value", "named", "until"), REFUSED)
def test_what_a_stranger_may_not_set_is_refused_by_its_name(key, value, named, until, use):
    edits = (PINNED, (DATA, "Dummy"), (key, value))
    if until is not None and use <= until:
        taken(use, *edits)
        return
    with refused(f"run.json: {named} is", ", expected", error=RequestError):
        taken(use, *edits)


@pytest.mark.parametrize("use", [Use.FOLLOWED, Use.JOINED])
@pytest.mark.parametrize(
    ("edits", "pin"),
    [
        (((DATA, {"Hub": {"repo_id": "owner/tokens"}}),), "data"),
        (((DATA, {"Corpus": TEXT}),), "data"),
        (((DATA, http(SingleUrl=HTTPS)),), "data"),
        (((CHECKPOINT, {"Hub": {"repo_id": "owner/model"}}),), "checkpoint"),
        (((CHECKPOINT, {"Run": "0123456789ab"}),), "checkpoint"),
    ],
)
def test_what_is_fetched_for_a_stranger_is_pinned(edits, pin, use):
    made_here = ((DATA, "Dummy"), (CHECKPOINT, {"Init": {"config": {}, "seed": 0}}))
    assert taken(use, PINNED, *made_here, *edits).pins.data == PIN
    assert taken(use, *made_here).pins.data == ""
    with refused("run.json", f"pins.{pin}", '""', error=RequestError):
        taken(use, *made_here, *edits)


@pytest.mark.parametrize("use", Use)
@pytest.mark.parametrize(
    "location",
    [
        {"Hub": {"repo_id": "owner/tokens"}},
        {"Preprocessed": "owner/rows"},
        {"Text": {**TEXT, "source": "owner/texts"}},
        {"Text": {**TEXT, "source": "https://data.example.org/a.txt"}},
        sources("owner/texts"),
        http(SingleUrl=HTTPS),
        http(**numbered("https://host.example.org/{}.ds")),
        http(Gcp={"bucket_name": "bucket", "filter_directory": ""}),
    ],
)
def test_pinned_data_of_the_hub_and_by_https_are_taken(location, use):
    assert taken(use, PINNED, (DATA, location)).llm.data_location.tag() in location


def test_an_address_for_which_the_reader_has_a_password_is_refused(tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine data.example.org login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with refused("SingleUrl.url", "password", error=RequestError):
        taken(Use.JOINED, PINNED, (DATA, http(SingleUrl=HTTPS)))


@pytest.mark.parametrize("use", Use)
def test_runtime_is_the_readers_own(use):
    theirs = {"sink_dir": "/tmp/evil", "of_another_release": 1}
    mine = Runtime(answer_seconds=7.0)
    run = taken(use, PINNED, ("runtime", theirs), (DATA, "Dummy"), runtime=mine)
    assert run.runtime == mine


@pytest.mark.parametrize("use", Use)
def test_more_snapshots_than_a_reader_can_list_are_refused(use):
    edits = PINNED, (DATA, "Dummy"), ("config.total_steps", 2**32 - 1)
    assert taken(use, *edits, ("witness", {"snapshot_every": 2**12}))
    with refused("witness.snapshot_every", 1, 4096, error=RequestError):
        taken(use, *edits, ("witness", {"snapshot_every": 1}))


def test_a_name_that_is_a_folder_here_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    edits = PINNED, (DATA, {"Preprocessed": "owner/rows"})
    assert taken(Use.FOLLOWED, *edits)
    Path("owner/rows").mkdir(parents=True)
    with refused("Preprocessed.source", error=RequestError):
        taken(Use.FOLLOWED, *edits)
