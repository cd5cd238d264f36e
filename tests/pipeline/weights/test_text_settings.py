"""What a folder says of its texts: as transformers reads it, and what its tokenizer adds."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from lockstep.files import read_json, write_json
from pipeline.language_model.continuations import Continuations
from pipeline.language_model.sampling import GREEDY
from pipeline.weights import text_settings
from tests.pipeline.exported import END, HF_CONFIG, make_tokenizer, write

PROMPT, LENGTH = "def f(x", 24
NO_END = {"eos_token_id": None}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(tmp_path_factory.mktemp("exported") / "export")


@pytest.fixture(scope="module")
def path(plain, tmp_path_factory):
    """The likeliest tokens where nothing ends them."""
    folder = changed(plain, tmp_path_factory.mktemp("endless"), NO_END, None, {})
    return ours(folder)["tokens"]


def changed(plain, place, config, generation, tokenizer):
    """The folder with other keys in config.json, this generation_config.json, and this end."""
    folder = place / "export"
    shutil.copytree(plain, folder)
    write_json(folder / "config.json", read_json(folder / "config.json") | config)
    write_json(folder / "tokenizer_config.json", tokenizer)
    if generation is not None:
        write_json(folder / "generation_config.json", generation)
    return folder


def ours(folder):
    return Continuations(folder, LENGTH, GREEDY, 0).generate([PROMPT])[0]


def theirs(folder):
    import torch

    ids = torch.tensor([make_tokenizer().encode(PROMPT).ids])
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(ids, max_new_tokens=LENGTH, do_sample=False, pad_token_id=END)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("config", "generation"),
    [
        ({}, {"eos_token_id": [END, "x"]}),
        ({}, {"eos_token_id": "x"}),
        ({"eos_token_id": "x"}, {"eos_token_id": END}),  # it comes before config.json
        ({"eos_token_id": "x"}, None),
        ({"eos_token_id": [END, "x"]}, None),
        (NO_END, {"bos_token_id": END}),
    ],
    ids=str,
)
def test_a_text_ends_where_it_ends_with_transformers(plain, path, tmp_path, config, generation):
    end = path[4]

    def given(said):
        return said and json.loads(json.dumps(said).replace('"x"', str(end)))

    folder = changed(plain, tmp_path, given(config), given(generation), {})
    found = ours(folder)
    assert found["tokens"] == theirs(folder)
    assert found["ended"] == (len(found["tokens"]) < LENGTH)


@pytest.mark.parametrize("generation", [None, {"eos_token_id": END}])
def test_the_tokenizers_end_ends_a_text_whatever_else_does(plain, path, tmp_path, generation):
    token = next(token for token in path if make_tokenizer().decode([token]).isalpha())
    said = {"eos_token": make_tokenizer().id_to_token(token)}
    found = ours(changed(plain, tmp_path, {}, generation, said))
    assert found["tokens"] == path[: path.index(token) + 1] and found["ended"]


def test_a_classs_default_counts_where_nothing_else_is_said(tmp_path):
    config = {key: x for key, x in HF_CONFIG.items() if key not in ("bos_token_id", "eos_token_id")}
    read = text_settings.read
    assert read(tmp_path, config, None)[:2] == (1, (2,))  # as LlamaConfig
    assert read(tmp_path, config, None, {"eos_token_id": 7})[:2] == (7, (7,))
    assert read(tmp_path, config | {"eos_token_id": [5, 7]}, None)[:2] == (5, (5, 7))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    assert read(tmp_path, config, make_tokenizer())[:2] == (END, (END,))


def test_a_setting_that_transformers_follows_and_this_does_not_is_said(plain, tmp_path, capsys):
    said = {"eos_token_id": END, "repetition_penalty": 1.7, "num_beams": 1, "min_p": 0.1}
    folder = changed(plain, tmp_path, {}, said | {"max_window_size": 6144}, {})
    ours(folder)
    told = capsys.readouterr().err
    assert "repetition_penalty = 1.7" in told
    assert not any(key in told for key in ("num_beams", "min_p", "max_window_size"))
    assert "min_p = 0.1" in text_settings.read(folder, HF_CONFIG, None).not_done(drawn=True)
