"""The stage convert on a checkpoint, and a model for it to read."""

import json
from pathlib import Path

import numpy as np

from lockstep.transcript.trees import load_nested
from models.llama import llama
from pipeline import convert, runfile
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths
from pipeline.weights import hf
from tests import tiny
from tests.pipeline.sources.options import refusal


def start(
    folder: Path, checkpoint: dict | str, architecture: str = "HfLlama", **changes: object
) -> Path:
    """A run file in `folder` with this checkpoint; `changes` as in `tiny.run_document`."""
    given = {"model__LLM__checkpoint": checkpoint, "model__LLM__architecture": architecture}
    changes |= given | {"runtime__attempts": 1}
    tiny.write_run(folder / "run.toml", tiny.run_document(folder / "tokens", **changes))
    return folder / "run.toml"


def convert_in(folder: Path, checkpoint: dict | str, architecture: str = "HfLlama") -> Path:
    """Runs the stage; returns data/init."""
    run_file = start(folder, checkpoint, architecture)
    paths = Paths("convert", run_file, folder)
    convert.run(runfile.load(run_file), paths)
    artifacts.verify(folder / paths.keys.made("convert"))
    return paths.out("convert")


def refused(folder: Path, checkpoint: dict | str, architecture: str = "HfLlama") -> str:
    """What the stage says; it leaves nothing that looks like a result."""
    said = refusal(convert_in, folder, checkpoint, architecture)
    assert not (folder / "data" / "init").exists()
    return said


def same_params(out: Path, model: Path) -> bool:
    """Whether data/init holds the params of a Hugging Face folder."""
    found, (_, expected) = load_nested(out / "params.safetensors"), hf.read_folder(model)
    return np.array_equal(found["lm_head"]["kernel"], expected["lm_head"]["kernel"])


def check_silence(token: str, folder: Path, error: str, capfd, caplog) -> None:
    """A token is in no output, log, error or file."""
    printed = capfd.readouterr()
    assert token not in error + printed.out + printed.err + caplog.text
    for path in folder.rglob("*"):
        assert not path.is_file() or token.encode() not in path.read_bytes(), path


def write_model(folder: Path, dtype: str = "bfloat16", seed: int = 3, **kwargs: int) -> Path:
    """A Hugging Face folder with a tokenizer's files, and others that nobody asked for."""
    folder.mkdir(parents=True)
    model = llama.Config.from_hf(tiny.MODEL)
    hf.write_folder(folder, model.to_hf(), llama.init(model, seed), dtype, **kwargs)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"name": name}))
    for name in ("modeling.py", "pytorch_model.bin", "notes.json"):
        (folder / name).write_text("not ours")
    return folder


def rename_shards(model: Path) -> None:
    """Give a model's shards, which its index names, the names of PyTorch's."""
    for shard in hf.weight_files(model):
        shard.rename(shard.with_name(f"pytorch_{shard.name}"))
    index = model / hf.INDEX
    index.write_text(index.read_text().replace('"model-', '"pytorch_model-'))
