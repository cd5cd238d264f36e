"""Variants of a table: each loads, and is written back as it was."""

import pytest

from lockstep.methods.card import OptimizerVariant
from lockstep.methods.decoupled import OptimizerDecoupledDiLoCo
from lockstep.methods.dense import OptimizerMuon
from lockstep.methods.schedule import ScheduleCosine, ScheduleLinear, ScheduleVariant
from lockstep.tables.variant import Variant, variants_of
from pipeline import runfile
from tests import tiny
from tests.pipeline.runfile.edited_run import BASE, DATA, load

TWO_BYTES = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}


def http(location):
    return {"Http": TWO_BYTES | {"location": location}}


GCP = http({"Gcp": {"bucket_name": "nous-pretraining-public-us", "filter_directory": ""}})
LINEAR = BASE["model"]["LLM"]["lr_schedule"]["Cosine"]
NUMBERED = {
    "url_template": "https://example.org/{}.ds",
    "start_index": 0,
    "n_left_pad_zeros": 5,
    "num_files": 3,
}
INIT = {"config": {"model_type": "llama", "rope_scaling": {"factor": 2.0}}, "seed": 1}
SEEDED = {"Seeded": list(range(32))}
CORPUS = {"vocab_size": 4096, "held_out_percent": 5.0, "shuffle": "DontShuffle"}
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
VARIANTS = [  # each form, with values that are no defaults, and what needs more than its keys
    ("optimizer", tiny.MUON, OptimizerMuon),
    ("checkpoint", {"Init": INIT}, runfile.CheckpointInit),
    (
        "data_location",
        {"Local": {"path": "d", "token_size_in_bytes": "FourBytes", "shuffle": SEEDED}},
        runfile.DataLocal,
    ),
    ("data_location", http({"NumberedFiles": NUMBERED}), runfile.DataHttp),
    ("data_location", {"Corpus": CORPUS}, runfile.DataCorpus),
    ("data_location", {"Text": DOCUMENTS}, runfile.DataText),
    ("data_location", {"WeightedText": WEIGHTED_DOCUMENTS}, runfile.DataWeightedText),
    ("lr_schedule", {"Linear": LINEAR}, ScheduleLinear),
    ("lr_schedule", {"Cosine": LINEAR}, ScheduleCosine),
]

ENUMS = {
    "optimizer": OptimizerVariant,
    "checkpoint": runfile.CheckpointVariant,
    "data_location": runfile.Data,
    "lr_schedule": ScheduleVariant,
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
    # an optimizer of a part is an inner one alone
    if kind not in GIVEN and (enum != "optimizer" or kind.__module__.startswith("lockstep."))
]


@pytest.mark.parametrize(("enum", "value", "kind"), [*VARIANTS, *DERIVED], ids=str)
def test_every_variant_loads_and_is_written_back_as_it_was(enum, value, kind):
    edits = [(f"model.LLM.{enum}", value)]
    if kind is OptimizerDecoupledDiLoCo:  # whose smallest round is a step of each peer
        edits.append(("config.global_batch_size_end", 4))
    run = load(*edits)
    variant = getattr(run.llm, enum)
    assert type(variant) is kind
    written = run.llm.model_dump(mode="json", exclude_none=True)[enum]
    assert getattr(load(*edits, (f"model.LLM.{enum}", written)).llm, enum) == variant
    if kind in GIVEN:  # with every key that has a default
        assert written == value


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
