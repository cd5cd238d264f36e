"""A model twice as large as the memory that convert and export may take."""

import filecmp
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from lockstep.transcript.tensorfile import TensorFile
from models.llama import llama
from pipeline.weights import hf
from tests import tiny

SOURCE = "source"
ALLOWANCE = 200 * 2**20  # bytes beside twice the largest tensor
CONFIG = {  # of 500 MB in float32
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "tie_word_embeddings": False,
}
# In a process of its own, so that nothing else's memory stands beside it. The call is named.
MEASURE = """
import json, sys
from pathlib import Path
from benchmarks.measuring import peak
from pipeline import convert, runfile
from pipeline.weights import hf
from pipeline.stage.artifacts import Paths
from lockstep.transcript.tensorfile import TensorFile

root = Path(sys.argv[2])

def stage():
    run_file = root / "run.toml"
    convert.run(runfile.load(run_file), Paths("convert", run_file, root))

def export():
    (root / "export").mkdir()
    params = TensorFile(root / "data" / "init" / "params.safetensors")
    hf.write_folder(root / "export", hf.read_config(root / "source"), params, "float32")

def whole():
    hf.read_folder(root / "source")

print(json.dumps(peak({"convert": stage, "export": export, "whole": whole}[sys.argv[1]])))
"""


def peak_of(call: str, root: Path) -> int:
    command = [sys.executable, "-c", MEASURE, call, str(root)]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


@pytest.fixture
def root(tmp_path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)  # pytest would keep it for days


@pytest.mark.soak
def test_convert_and_export_of_a_large_model_hold_a_tensor_or_two(root):
    config = llama.Config.from_hf(CONFIG)
    (root / SOURCE).mkdir()
    hf.write_folder(root / SOURCE, config.to_hf(), jax.device_get(llama.init(config, 0)), "float32")
    file = root / SOURCE / hf.WEIGHTS
    bound = 2 * max(spec.nbytes for spec in TensorFile(file).specs.values()) + ALLOWANCE
    assert file.stat().st_size > 2 * bound

    document = tiny.run_document(root / "tokens")
    document["model"]["LLM"]["checkpoint"] = {"Hub": {"repo_id": str(root / SOURCE)}}
    tiny.write_run(root / "run.toml", document)
    assert peak_of("convert", root) <= bound
    params = TensorFile(root / "data" / "init" / "params.safetensors")
    source = TensorFile(file)
    for path in params:
        name, transposed = llama.names[path]
        stacked = params[path] if "{layer}" in name else params[path][None]
        for layer, values in enumerate(stacked):
            expected = source[name.format(layer=layer)]
            assert np.array_equal(values, expected.T if transposed else expected), name

    assert peak_of("export", root) <= bound
    assert filecmp.cmp(root / "export" / hf.WEIGHTS, file, shallow=False)

    # what is held whole is seen, though pages of mapped files are part of it
    assert peak_of("whole", root) > file.stat().st_size
