"""A Hugging Face folder as params and back: the same bytes, or one line that says what is wrong."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from models.llama import llama
from pipeline.weights import hf
from tests import tiny
from tests.errors import check_names
from tests.models.reference import BASE, GROUPS, LATENT
from tests.pipeline.sources.options import refusal

MODEL = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
HEAD, EMBED, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
KEY = "model.layers.1.self_attn.k_proj.weight"


def save_model(folder: Path, dtype: str = "float32", shards: str = "5GB", **changes) -> Path:
    """A model as transformers writes it, with random weights and norms."""
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **changes}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.3, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shards)
    return folder


def tensors_of(folder: Path) -> dict[str, tuple]:
    """Dtype, shape and bytes of every tensor in a folder's safetensors files."""
    return {
        name: (tensor.dtype, tensor.shape, tensor.tobytes())
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def change(folder: Path, changes: dict[str, np.ndarray | None]) -> None:
    """Sets tensors of model.safetensors; those set to None are removed."""
    tensors = load_file(folder / hf.WEIGHTS) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / hf.WEIGHTS)


def edit_json(file: Path, edit) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def refused(folder: Path) -> str:
    return refusal(hf.read_folder, folder)


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_model(tmp_path / "model")


# ---- There and back ----


@pytest.mark.parametrize("shards", ["5GB", "5KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reading_and_writing_gives_back_every_tensor_byte_for_byte(tmp_path, dtype, shards):
    source = save_model(tmp_path / "source", dtype, shards)
    assert (source / hf.INDEX).exists() == (shards == "5KB")
    hf_config, params = hf.read_folder(source)
    assert hf_config["dtype"] == dtype
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    hf.write_folder(tmp_path / "one", hf_config, params, dtype)
    hf.write_folder(tmp_path / "many", hf_config, params, dtype, max_shard_bytes=5000)
    assert tensors_of(tmp_path / "one") == tensors_of(source)
    assert tensors_of(tmp_path / "many") == tensors_of(source)
    files = list((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2
    for tensors in map(load_file, files):
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= 5000
    for file in files:
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}  # older transformers ask for it
    _, again = hf.read_folder(tmp_path / "many")
    np.testing.assert_array_equal(again["lm_head"]["kernel"], params["lm_head"]["kernel"])


@pytest.mark.parametrize("most", [5 * 2**30, 5000])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_what_we_write_and_computes_the_same(tmp_path, tied, most):
    config = llama.Config.from_hf(MODEL | {"tie_word_embeddings": tied})
    params = llama.init(config, 0)
    hf.write_folder(tmp_path, config.to_hf(), params, "float32", most)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    tokens = np.random.default_rng(0).integers(0, 40, (2, 9))
    expected = loaded(torch.from_numpy(tokens)).logits.detach().numpy()
    found = llama.apply(config, params, tokens, scan=True, dtype=jnp.float32)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_equal_params_are_equal_files(tmp_path, folder):
    hf_config, params = hf.read_folder(folder)
    for name, ordered in (("a", hf_config), ("b", dict(reversed(hf_config.items())))):
        (tmp_path / name).mkdir()
        hf.write_folder(tmp_path / name, ordered, params, "bfloat16", 999)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) > 5
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tensors_of_several_dtypes_are_read_and_called_float32(folder):
    change(folder, {NORM: np.ones(16, jnp.bfloat16)})
    hf_config, params = hf.read_folder(folder)
    assert hf_config["dtype"] == hf_config["torch_dtype"] == "float32"
    assert params["norm"]["scale"].dtype == np.float32


def test_config_keeps_the_keys_that_we_do_not_know_but_no_remote_code(tmp_path, folder):
    edit_json(folder / hf.CONFIG, lambda c: c.update(mine=[1], auto_map={"AutoConfig": "x.Y"}))
    hf_config, params = hf.read_folder(folder)
    hf.write_folder(tmp_path, hf_config, params, "float16")
    written = hf.read_config(tmp_path)
    assert written["mine"] == [1]
    assert "auto_map" not in written
    assert written["dtype"] == written["torch_dtype"] == "float16"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5


# ---- Tensors that are not as they should be ----


def test_missing_extra_and_misshapen_tensors_are_named_all_at_once(folder):
    changes = {NORM: None, KEY: np.zeros((3, 16), np.float32), EMBED: np.zeros((40, 16), np.int32)}
    change(folder, changes | {"extra": np.zeros(5, np.float32)})
    said = ("extra", "[5]", EMBED, "I32", "BF16", KEY, "[3, 16]", "[8, 16]", NORM, "[16]")
    check_names(refused(folder), folder, *said)


def test_the_buffer_of_old_files_is_ignored_and_nothing_like_it(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, {name: np.ones(2, np.float32)})
    hf.read_folder(folder)
    change(folder, {f"{name}_": np.ones(2, np.float32)})
    check_names(refused(folder), f"{name}_", "[2]")


def test_a_tied_head_may_be_stored_only_if_it_is_the_embedding(tmp_path):
    folder = save_model(tmp_path / "tied", tie_word_embeddings=True)
    embedding = load_file(folder / hf.WEIGHTS)[EMBED]
    change(folder, {HEAD: embedding})
    _, params = hf.read_folder(folder)
    assert "lm_head" not in params
    change(folder, {HEAD: embedding + 1})
    check_names(refused(folder), folder / hf.WEIGHTS, HEAD, EMBED)


def test_params_that_do_not_fit_the_config_are_not_written(tmp_path, folder):
    hf_config, params = hf.read_folder(folder)
    params["mine"] = params.pop("norm")
    params["lm_head"]["kernel"] = np.zeros((16, 41), np.float32)
    said = refusal(hf.write_folder, tmp_path, hf_config, params, "float32")
    check_names(said, "norm/scale", "mine/scale", "lm_head/kernel", "[16, 41]", "[16, 40]")
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_value_that_the_dtype_cannot_hold_is_refused_with_its_tensor(tmp_path, folder):
    hf_config, params = hf.read_folder(folder)
    params["layers"]["attention"]["key"]["kernel"][1, 3, 4] = -70000
    hf.write_folder(tmp_path, hf_config, params, "bfloat16")
    said = refusal(hf.write_folder, tmp_path, hf_config, params, "float16")
    check_names(said, KEY, 70000, "float16")


# ---- Experts, and layers that are not all alike ----


@pytest.fixture
def with_experts(tmp_path) -> Path:
    """A dense layer, then two with experts."""
    torch.manual_seed(0)
    folder = tmp_path / "experts"
    DeepseekV3ForCausalLM(DeepseekV3Config(**BASE | LATENT | GROUPS)).save_pretrained(folder)
    return folder


def test_an_expert_that_is_missing_extra_or_in_a_dense_layer_is_named(with_experts):
    last = "model.layers.2.mlp.experts.7.down_proj.weight"
    extra = last.replace("experts.7", "experts.8")
    early = last.replace("layers.2", "layers.0")
    whole = load_file(with_experts / hf.WEIGHTS)[last]
    change(with_experts, {last: None, extra: whole, early: whole})
    check_names(refused(with_experts), with_experts, early, last, extra, "[32, 24]")


def test_layers_beyond_the_models_own_are_ignored_where_a_model_may_have_them(with_experts, folder):
    for number, expected in (("3", True), ("12", True), ("2", False)):
        change(with_experts, {f"model.layers.{number}.eh_proj.weight": np.ones((2, 2), np.float32)})
        if expected:
            _, params = hf.read_folder(with_experts)
            assert params["layers"]["mlp"]["experts"]["up"].shape[0] == 2
        else:
            check_names(refused(with_experts), "model.layers.2.eh_proj.weight", "[2, 2]")
    change(folder, {"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)})
    check_names(refused(folder), "model.layers.2.eh_proj.weight", "[2, 2]")  # a Llama


# ---- Files that are not as they should be ----


def test_a_truncated_file_is_refused_with_its_name(tmp_path):
    folder = save_model(tmp_path / "model", shards="5KB")
    file = sorted(folder.glob("*.safetensors"))[1]
    whole = file.read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        check_names(refused(folder), file)
    file.unlink()
    check_names(refused(folder), file)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/a.safetensors", "..", "a/b.safetensors", "x.bin", 7, ""]
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path, name):
    folder = save_model(tmp_path / "model", shards="5KB")
    edit_json(folder / hf.INDEX, lambda index: index["weight_map"].update({NORM: name}))
    check_names(refused(folder), folder / hf.INDEX, NORM, repr(name))


def test_an_index_that_does_not_agree_with_its_files_is_refused(tmp_path):
    folder = save_model(tmp_path / "model", shards="5KB")
    index = json.loads((folder / hf.INDEX).read_text())["weight_map"]
    right, wrong = index[NORM], next(file for file in index.values() if file != index[NORM])
    edit_json(folder / hf.INDEX, lambda index: index["weight_map"].update({NORM: wrong}))
    check_names(refused(folder), folder / hf.INDEX, NORM, right, wrong)
    edit_json(folder / hf.INDEX, lambda index: index["weight_map"].update({NORM: right}))
    hf.read_folder(folder)
    (folder / wrong).write_bytes((folder / right).read_bytes())
    check_names(refused(folder), right, wrong)
    edit_json(folder / hf.INDEX, lambda index: index.update(weight_map=[]))
    check_names(refused(folder), folder / hf.INDEX, "weight_map")


def test_a_folder_without_weights_or_config_is_refused(tmp_path, folder):
    (folder / hf.WEIGHTS).rename(folder / "pytorch_model.bin")
    check_names(refused(folder), folder, hf.WEIGHTS, hf.INDEX)
    (folder / hf.CONFIG).unlink()
    check_names(refused(folder), folder / hf.CONFIG)
    check_names(refused(tmp_path / "nothing"), tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"model_type": "llama", ', ["JSON"]),
        ("[1]", ["list"]),
        ('{"model_type": "gpt2"}', ["model_type", "'gpt2'", "deepseek_v3", "llama"]),
        ('{"model_type": "llama"}', ["vocab_size"]),
    ],
)
def test_a_config_that_is_none_is_refused_with_its_name(folder, content, named):
    (folder / hf.CONFIG).write_text(content)
    check_names(refused(folder), folder / hf.CONFIG, *named)


def test_tensors_without_end_are_refused_before_they_are_listed(folder):
    """So is anything in a config that would be looped over."""
    (folder / hf.CONFIG).write_text(json.dumps(tiny.DEEPSEEK | {"n_routed_experts": 2**30}))
    check_names(refused(folder), "layers/mlp/experts/down", "1,073,741,824", "1,000,000")
