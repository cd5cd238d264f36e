"""The exported folder: what transformers reads from it, and how it then generates."""

import json
import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lockstep.files import read_json, write_json
from lockstep.transcript.transcript import Transcript
from models.llama import llama
from pipeline.tokens.tokenizer_files import load_tokenizer
from pipeline.weights import model_folder, text_settings
from tests.errors import refused
from tests.pipeline.trained_run import END, LENGTH, PAD, make, write_tokenizer

SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
GENERATION = "generation_config.json"
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 8},
}


def generation_of(paths) -> dict:
    return read_json(paths.out("export") / GENERATION)


@pytest.fixture
def warned():
    """What transformers warns of, as it warns of it."""
    said, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.Logger.warning_once.cache_clear()  # it says a thing once in a process
    logging.getLogger("transformers").addHandler(handler)
    yield said
    logging.getLogger("transformers").removeHandler(handler)


def generate(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7]])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4)


# ---- generation_config.json ----


def test_without_the_checkpoints_own_it_says_what_config_json_says(tmp_path, warned):
    paths = make(tmp_path)
    assert generation_of(paths) == {
        "_from_model_config": True,
        "bos_token_id": END,
        "eos_token_id": END,
    }
    loaded = GenerationConfig.from_pretrained(paths.out("export"))
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (END, END, None)
    assert generate(paths.out("export")).shape[1] <= 7
    assert warned == []


@pytest.mark.parametrize("tokenizer", [None, SPECIAL])
def test_the_checkpoints_settings_are_kept_with_the_datas_tokenizer_too(
    tmp_path, tokenizer, warned
):
    own = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "eos_token_id": [7, 9],
        "pad_token_id": 9,
        "transformers_version": "4.40.0",
    }
    paths = make(tmp_path, companions={GENERATION: own}, tokenizer=tokenizer)
    assert generation_of(paths) == {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "bos_token_id": END,
        "eos_token_id": [7, 9, END] if tokenizer else [7, 9],
        "pad_token_id": PAD if tokenizer else 9,
    }
    generate(paths.out("export"))
    assert warned == []


def test_settings_without_effect_are_left_out_and_so_is_the_warning(tmp_path, warned):
    own = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 5, "eos_token_id": END}
    paths = make(tmp_path, companions={GENERATION: own})
    folder = paths.out("export")
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "again")
    assert warned == []
    said = generation_of(paths)
    assert said == {"max_new_tokens": 5, "bos_token_id": END, "eos_token_id": END}
    write_json(tmp_path / "again" / GENERATION, said | own)
    GenerationConfig.from_pretrained(tmp_path / "again")
    assert "temperature" in "".join(warned)  # the warning that this is about


@pytest.mark.parametrize(
    "own, special, model, expected",
    [
        ({}, {}, {}, {}),
        # Qwen3: padding and a second end that config.json does not have
        (
            {"bos_token_id": 3, "eos_token_id": [5, 3], "pad_token_id": 3},
            {"eos_token_id": 5, "pad_token_id": 3},
            {"bos_token_id": 3, "eos_token_id": 5, "pad_token_id": None},
            {"bos_token_id": 3, "eos_token_id": [5, 3], "pad_token_id": 3},
        ),
        # a config.json that kept the ids of the model it was made of
        (
            {"bos_token_id": 4, "eos_token_id": 3},
            {"bos_token_id": 4, "eos_token_id": 3},
            {"bos_token_id": 3, "eos_token_id": 3},
            {"bos_token_id": 4, "eos_token_id": 3},
        ),
        # the data's tokenizer ends a text with a token that the checkpoint does not know as an end
        ({"eos_token_id": 2}, {"eos_token_id": 7}, {}, {"eos_token_id": [2, 7]}),
        ({}, {}, {"eos_token_id": [2, 7]}, {"eos_token_id": [2, 7]}),
        # no tokens of a vocabulary of ten
        ({"eos_token_id": [10, "2", True, -1], "pad_token_id": 10}, {}, {}, {}),
    ],
)
def test_ids_are_those_of_tokenizer_checkpoint_and_config(
    tmp_path, monkeypatch, own, special, model, expected
):
    write_json(tmp_path / GENERATION, own)
    monkeypatch.setattr(model_folder, "special_tokens", lambda *_: special)
    assert (
        model_folder.generation_config(tmp_path, {"vocab_size": 10} | model, tmp_path) == expected
    )


@pytest.mark.parametrize("form", [str, lambda token: {"content": token, "lstrip": False}])
def test_special_tokens_are_found_as_text_and_as_tables(tmp_path, form):
    write_tokenizer(tmp_path, eos_token=form("<|endoftext|>"), pad_token=form("<|no such|>"))
    write_json(tmp_path / "special_tokens_map.json", {"bos_token": form("<|pad|>")})
    found = text_settings.special_tokens(tmp_path, load_tokenizer(tmp_path / "tokenizer.json"))
    assert found == {"eos_token_id": END, "bos_token_id": PAD}


def test_what_a_checkpoint_brought_and_is_none_is_named(tmp_path):
    with refused("generation_config.json", "list"):
        make(tmp_path, companions={GENERATION: []})
    with refused("tokenizer.json"):
        make(tmp_path, companions={"tokenizer.json": {}})


# ---- The rest of the folder ----


@pytest.mark.parametrize("kind", ROPES)
def test_the_context_grows_to_what_was_trained_unless_that_changed_the_model(tmp_path, kind):
    model = {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4} | ROPES[kind]}
    paths = make(tmp_path, model=model)
    exported = read_json(paths.out("export") / "config.json")
    grows = kind in ("default", "linear")
    assert exported["max_position_embeddings"] == (LENGTH if grows else 16)

    header = Transcript(paths.out("train") / "transcript").header
    tokens = np.arange(LENGTH, dtype=np.int32)[None]
    trained, left = (llama.Config.from_hf(found) for found in (header.model, exported))
    params = llama.init(trained, 1)
    logits = [
        jax.jit(partial(llama.apply, one, scan=False, dtype=jnp.float32))(params, tokens)
        for one in (trained, left)
    ]
    assert np.array_equal(*logits)


def test_a_refused_export_has_no_card_and_no_weights(tmp_path):
    finding = {"round": 2, "peer": 1, "kind": "message", "detail": "another"}
    paths = make(tmp_path, verdict={"accepted": False, "findings": [finding]})
    folder = paths.out("export")
    assert {file.name for file in folder.iterdir()} == {"refused.json", f"made-{paths.key}.json"}
    assert read_json(folder / "refused.json") == {
        "why": "peer 1 in round 2 (message)",
        "findings": [finding],
    }


def test_files_of_the_folder(tmp_path):
    paths = make(tmp_path, tokenizer=SPECIAL)
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json", f"made-{paths.key}.json"}
    assert {file.name for file in paths.out("export").iterdir()} == names
    assert json.loads((paths.out("export") / GENERATION).read_text())["eos_token_id"] == END
