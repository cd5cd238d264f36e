"""Seven public kinds of model: trained, killed, audited, exported, and loaded by their own library.

Each trains by DisTrO, by DiLoCo, and by DiLoCo with its own inner loop. `make soak` runs them all.
"""

import importlib
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lockstep.files import read_json
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.parts.workload import finished_run
from tests.parts.workload.finished_run import OWN_STEPS
from tests.parts.workload.worker_host import WORKLOADS
from tests.test_resume import kill_at_write, rounds_of

HERE = Path(__file__).parent
FORMS = {
    "distro": {},
    "diloco": {"model__LLM__optimizer": tiny.DILOCO_IN_4_BITS},
    "own loop": {"workload__inner": "worker", "model__LLM__optimizer": OWN_STEPS},
}
TOKENS = 16
OF_ALL = {"model_type": "", "vocab_size": tiny.VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = OF_ALL | {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
QWEN = OF_ALL | tiny.MODEL | {"model_type": "qwen2", "tie_word_embeddings": True}
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


class Kind(NamedTuple):
    """A class, its config, the words of a row of its own data (0: tokens), how it is loaded."""

    factory: str
    config: dict = {}
    words: int = 0
    library: str = "torch"


KINDS = {
    "resnet": Kind("public_kinds:ResNet", words=66),
    "nanogpt": Kind("public_kinds:NanoGPT"),
    "gpt2": Kind(
        "hf_trainer:WithTrainer",
        {"model": GPT2, "arguments": {"learning_rate": 5e-3}},
        library="transformers",
    ),
    "lora": Kind(
        "hf_causal_lm:CausalLM",
        {"model": "qwen", "lora": LORA, "learning_rate": 1e-2},
        library="peft",
    ),
    "unet": Kind("public_kinds:UNet", words=64),
    "fno": Kind("public_kinds:FNO", words=64),
    "numpy": Kind("public_kinds:Regression", {"learning_rate": 0.02}, words=7, library="numpy"),
}


@pytest.fixture
def models(tmp_path, monkeypatch, module):
    """A folder workloads/ with all of them; the classes are found here too."""
    folder = tmp_path / "workloads"
    shutil.copytree(WORKLOADS, folder)
    shutil.copy(HERE / "public_kinds.py", folder)
    for name in ("description", "worker"):
        monkeypatch.setattr(f"parts.workload.{name}.SOURCE", folder)
    module("public_kinds", HERE)


def a_run(folder: Path, kind: Kind, form: str, python: str) -> tuple[Path, Path]:
    own = {"Workload": {"shuffle": "DontShuffle"}}
    location = own if kind.words else {"Local": str(tiny.write_data(folder / "tokens"))}
    base = 0.02 if form == "distro" else 0.005
    rate = {"base_lr": base, "warmup_init_lr": base, "warmup_steps": 1, "total_steps": 4}
    given = {
        "workload__factory": kind.factory,
        "workload__config": kind.config,
        "runtime__worker_python": python,
        "model__LLM__data_location": location,
        "model__LLM__max_seq_len": kind.words or TOKENS,
        "model__LLM__lr_schedule": {"Cosine": rate | {"final_lr": 0.4 * base}},
        "config__total_steps": 4,
        "config__global_batch_size_start": 24,
        "config__global_batch_size_end": 24,
        "peers__count": 3,
        "peers__threads": 1,
        "witness__snapshot_every": 2,
        "held_out__sequences": 64 if kind.words else 12,
        "held_out__every": 4,
    }
    return finished_run.a_run(folder, **given | FORMS[form])


@pytest.mark.soak
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_it_is_trained_killed_audited_exported_and_loaded_with_its_loss(
    name, form, request, models, tmp_path, monkeypatch
):
    kind = with_base(KINDS[name], tmp_path)
    of_hub = kind.library in ("transformers", "peft")
    python = request.getfixturevalue("hugging_face_python" if of_hub else "python")
    run_file, root = a_run(tmp_path, kind, form, python)
    tiny.make(run_file, root, "download", "convert")
    kill_at_write("train", run_file, root, "00002/.own-001.safetensors")
    assert rounds_of(root) == 2
    tiny.make(run_file, root, "train", "witness", "export", "evaluate")

    verdict = read_json(root / "data/verdict/verdict.json")
    assert verdict["accepted"] and verdict["not_comparable"] is None
    assert len(verdict["replayed_windows"]) == verdict["windows"] == 3 * 2
    trained = read_json(root / "metrics/train.json")
    loss = read_json(root / "metrics/evaluate.json")["held_out_loss"]
    before = trained["held_out_loss_before"]
    found = LOADED[kind.library](kind, root / "data/export", tokens_of(tmp_path, kind))
    print(f"{name} by {form}: {before:.4f} -> {loss:.6f}, loaded {found:.6f}")
    assert loss == pytest.approx(trained["held_out_loss"], rel=1e-6)
    assert loss < before
    if name == "unet":
        monkeypatch.chdir(root)
        check_average(kind)
    assert found == pytest.approx(loss, rel=1e-5)


def check_average(kind: Kind) -> None:
    """The page's example gives the moving average of the agreed params, as torch's own does."""
    page = (PROJECT / "docs/reference/workloads.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"model": importlib.import_module("public_kinds").UNet(kind.config).model()}
    exec(example, names)
    snapshots = sorted(Path("data/trained/transcript/snapshots").glob("*/params.safetensors"))
    values = [load_file(path)["final_conv/weight"] for path in snapshots]
    expected = values[0]
    for value in values[1:]:
        expected = 0.9 * expected + 0.1 * value
    assert len(values) == 3 and not torch.equal(values[0], values[2])
    torch.testing.assert_close(names["model"].final_conv.weight.detach(), expected)


def with_base(kind: Kind, folder: Path) -> Kind:
    """The kind with a folder of trained weights, where adapters alone are trained."""
    if kind.library != "peft":
        return kind
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = AutoConfig.for_model(**QWEN)
    AutoModelForCausalLM.from_config(known).save_pretrained(folder / "qwen")
    return kind._replace(config=kind.config | {"model": str(folder / "qwen")})


def tokens_of(folder: Path, kind: Kind) -> torch.Tensor | None:
    """The held-out rows, where rows are tokens: int64 [N, T]."""
    if kind.words:
        return None
    tokens = np.fromfile(folder / "tokens/held_out/a.ds", "<u2")
    return torch.from_numpy(tokens[: len(tokens) // TOKENS * TOKENS].reshape(-1, TOKENS)).long()


def by_torch(kind: Kind, export: Path, tokens: torch.Tensor | None) -> float:
    """By what peers agreed on, in a new model, and what the class saved is the same."""
    module, _, name = kind.factory.partition(":")
    workload = getattr(importlib.import_module(module), name)(kind.config)
    torch.manual_seed(0)
    values, model = load_file(export / "params.safetensors"), workload.model()
    if (export / "statistics.safetensors").exists():
        values |= load_file(export / "statistics.safetensors")
    saved = torch.load(export / "model.pt", weights_only=True)
    for key, value in values.items():
        values[key] = torch.view_as_complex(value) if saved[key].is_complex() else value
    assert not model.load_state_dict(values, strict=False).unexpected_keys
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key
    model.load_state_dict(saved)
    rows = tokens
    if tokens is None:
        rows = {key: torch.from_numpy(part) for key, part in workload.dataset("held_out").items()}
    with torch.no_grad():
        return workload.row_losses(model.eval(), rows).double().mean().item()


def by_hugging_face(kind: Kind, export: Path, tokens: torch.Tensor) -> float:
    import peft
    import transformers

    of_peft = kind.library == "peft"
    auto = peft.AutoPeftModelForCausalLM if of_peft else transformers.AutoModelForCausalLM
    with torch.no_grad():
        return auto.from_pretrained(export).eval()(input_ids=tokens, labels=tokens).loss.item()


def by_numpy(kind: Kind, export: Path, tokens: None) -> float:
    params = np.load(export / "model.npz")
    rows = importlib.import_module("public_kinds").Regression(kind.config).dataset("held_out")
    return ((rows["x"] @ params["w"] + params["b"] - rows["y"]) ** 2).mean().item()


LOADED = {"torch": by_torch, "numpy": by_numpy}
LOADED |= dict.fromkeys(("transformers", "peft"), by_hugging_face)
