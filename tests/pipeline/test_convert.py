"""Stage convert: fresh weights, a folder; each read whole or refused in one line."""

import jax
import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from lockstep.transcript.trees import load_nested
from models.llama import llama
from pipeline import convert, runfile
from pipeline.stage.artifacts import Paths
from pipeline.tokens.tokenizer_files import load_tokenizer
from pipeline.weights import hf
from tests import tiny
from tests.pipeline.conversion import convert_in, refused, same_params, start, write_model
from tests.pipeline.trained_run import make_tokenizer

pytestmark = pytest.mark.long


def init(seed: int = 0, **changes: object) -> dict:
    return {"Init": {"seed": seed, "config": tiny.MODEL | changes}}


# ---- Fresh weights ----


def test_fresh_weights_are_a_hugging_face_folder_that_is_read_like_any_other(tmp_path):
    out = convert_in(tmp_path, init(seed=7))
    params = load_nested(out / "params.safetensors")
    expected = llama.init(llama.Config.from_hf(tiny.MODEL), 7)
    drawn, jaxs = params["embed"]["embedding"], expected["embed"]["embedding"]
    np.testing.assert_allclose(drawn, jaxs, rtol=1e-5, atol=1e-9)  # by rules, and as compiled
    hf_config, read = hf.read_folder(out / "hf")
    np.testing.assert_array_equal(read["embed"]["embedding"], params["embed"]["embedding"])
    assert hf_config["vocab_size"] == tiny.VOCABULARY
    source = read_json(out / "source.json")
    assert source["checkpoint"] == "Init"
    assert source["seed"] == 7
    weights = sha256_file(out / "hf" / hf.WEIGHTS)
    assert source["files"][hf.WEIGHTS] == weights


def test_another_seed_is_another_model_and_the_same_seed_the_same_bytes(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        convert_in(tmp_path / name, init(seed))
    a, b, c = (tiny.contents(tmp_path / name / "data" / "init") for name in "abc")
    assert a == b
    assert a["params.safetensors"] != c["params.safetensors"]


# What changed fresh weights, with a value that says how; and of what stays, a valid one.
VARIABLES = {
    "JAX_ENABLE_X64": "1",
    "JAX_THREEFRY_PARTITIONABLE": "0",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_RANDOM_SEED_OFFSET": "1",
    "JAX_CPU_GET_LOCAL_TOPOLOGY_TIMEOUT_MINUTES": "3",
    "JAX_CPU_GET_GLOBAL_TOPOLOGY_TIMEOUT_MINUTES": "3",
    "JAX_DEFAULT_MATMUL_PRECISION": "bfloat16",
    "JAX_DUMP_IR_TO": "",
    "JAX_LOGGING_LEVEL": "ERROR",
    "JAX_NUM_CPU_DEVICES": "2",
    "JAX_PLATFORMS": "cpu",
    "JAX_PLATFORM_NAME": "cpu",
    "JAX_TRACEBACK_FILTERING": "off",
}


def test_no_variable_that_jax_reads_changes_a_byte_of_fresh_weights(tmp_path):
    (tmp_path / "plain").mkdir()
    out = convert_in(tmp_path / "plain", init())
    names = [name.upper() for name in jax.config.meta]
    switched = {name: str(int(not jax.config.values[name.lower()])) for name in names}
    numbers = [name for name in names if name.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))]
    asked = ("-m", "pipeline", "convert", "--root", tmp_path, "--run", start(tmp_path, init()))
    done = tiny.python(*asked, **{**switched, **dict.fromkeys(numbers, "0"), **VARIABLES})
    assert done.returncode == 0, done.stderr
    assert tiny.contents(tmp_path / "data" / "init") == tiny.contents(out)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hiden_act": "silu"}, "config.hiden_act: unknown key, expected one of architectures, "),
        ({"dtype": "bfloat16"}, "config.dtype is 'bfloat16', expected 'float32'"),
        ({"hidden_size": 15}, "config: hidden_size is 15, expected a multiple of"),
        ({"model_type": "gpt2"}, "config: model_type is 'gpt2', expected 'llama' as"),
    ],
)
def test_a_key_of_the_fresh_config_that_would_do_nothing_is_refused(tmp_path, changes, said):
    assert f"model.LLM.checkpoint.Init.{said}" in refused(tmp_path, init(**changes))


def test_a_model_larger_than_the_memory_is_refused_before_it_is_drawn(tmp_path):
    said = refused(tmp_path, init(vocab_size=2**31 - 1, hidden_size=2**30))
    assert "model.LLM.checkpoint.Init.config: 11,529," in said and " GB of memory here" in said


def test_the_run_file_may_set_the_memory_that_a_model_fits_into(tmp_path):
    run_file = start(tmp_path, init(), runtime__memory_gb=1e-6)
    with pytest.raises(LockstepError, match="numbers take .* of .runtime. memory_gb"):
        convert.run(runfile.load(run_file), Paths("convert", run_file, tmp_path))


# ---- A folder ----


@pytest.mark.parametrize(("kind", "shard_bytes"), [("Hub", 5 * 2**30), ("P2P", 3000)])
def test_a_folder_is_read_and_its_tokenizer_kept_without_weights_or_code(
    tmp_path, kind, shard_bytes, caplog
):
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    (model / convert.TEMPLATES).mkdir()
    out = convert_in(tmp_path, {kind: {"repo_id": str(model)}}, "HfAuto")
    assert same_params(out, model)
    assert f"{model / convert.TEMPLATES}: " in caplog.text
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (out / "hf").iterdir()} == kept
    source = read_json(out / "source.json")
    assert source["repo_id"] == str(model)
    assert source["commit"] is None
    assert source["dtype"] == "bfloat16"
    (model / convert.TEMPLATES).rmdir()
    asked = {"modeling.py", "pytorch_model.bin", "notes.json"}
    assert source["files"] == {
        path.name: sha256_file(path) for path in model.iterdir() if path.name not in asked
    }


def test_a_tokenizer_in_an_older_form_is_converted_before_the_weights(tmp_path):
    model = write_model(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    before = make_tokenizer()
    before.model.save(str(model))
    checkpoint = {"Hub": {"repo_id": str(model)}}
    said = refused(tmp_path, checkpoint)  # of a Llama's class, which has no vocab.json
    assert said.startswith(f"{model}: found vocab.json without tokenizer.json, expected ")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    out = convert_in(tmp_path, checkpoint)
    made, text = load_tokenizer(out / "hf" / "tokenizer.json"), "the cat  sat\n"
    assert made.encode(text).ids == before.encode(text).ids
    assert hf.read_config(out / "hf")["dtype"] == "bfloat16"
    files = read_json(out / "source.json")["files"]
    assert "vocab.json" in files and "tokenizer.json" not in files


def test_a_model_of_another_type_than_the_architecture_is_refused(tmp_path):
    model = write_model(tmp_path / "model")
    file = model / hf.CONFIG
    file.write_text(file.read_text().replace('"llama"', '"gpt2"'))
    for architecture, expected in (
        ("HfLlama", "'llama' as model.LLM.arch"),
        ("HfDeepseek", "'deepseek_v2' or 'deepseek_v3'"),
        ("HfAuto", "one of: deepseek_v2, "),
    ):
        said = refused(tmp_path, {"Hub": {"repo_id": str(model)}}, architecture)
        assert said.startswith(f"{file}: model_type is 'gpt2', expected {expected}")


def test_a_link_to_nothing_is_refused_and_not_left_out(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "vocab.txt").symlink_to("not there")
    said = refused(tmp_path, {"Hub": {"repo_id": str(model)}})
    assert said == f"{model}/vocab.txt: No such file or directory, expected a readable file"


def test_a_folder_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model")
    save = hf.HfFolder.save

    def save_then_change(*arguments):
        save(*arguments)
        (model / "tokenizer.json").write_text("{}")

    monkeypatch.setattr(hf.HfFolder, "save", save_then_change)
    said = refused(tmp_path, {"Hub": {"repo_id": str(model)}})
    assert said.startswith(f"{model / 'tokenizer.json'}: changed while it was read")


# ---- What there is no reader for ----


def test_an_architecture_without_a_model_is_refused_by_name(tmp_path):
    said = refused(tmp_path, init(), "Torchtitan")
    assert said.startswith("model.LLM.architecture is Torchtitan: this release cannot train")


@pytest.mark.parametrize("checkpoint", ["Ephemeral", {"Dummy": {"repo_id": ""}}], ids=str)
def test_a_checkpoint_without_a_reader_is_refused_by_name(tmp_path, checkpoint):
    name = checkpoint if isinstance(checkpoint, str) else next(iter(checkpoint))
    assert refused(tmp_path, checkpoint) == (
        f"model.LLM.checkpoint.{name}: this release cannot read it, "
        "expected Hub or P2P or Gcs or P2PGcs or Init or Run"
    )
