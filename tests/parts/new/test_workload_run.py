"""`lockstep new --workload`: a class of the user is asked for its data, its rows and its batch."""

import re
import shlex
from contextlib import suppress

import numpy as np
import pytest
from safetensors.numpy import save_file

from lockstep.errors import LockstepError
from lockstep.files import read_json
from pipeline import runfile
from pipeline.joints import Joint
from pipeline.sources import dry_run
from pipeline.stage.artifacts import Paths
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.errors import refused
from tests.pairwise import flags, pairwise
from tests.parts.new.test_new import lockstep_new, unlooked  # noqa: F401 - a fixture for all

pytestmark = [
    pytest.mark.skipif(not Joint("new_run").parts(), reason="parts/workload is not here"),
    pytest.mark.usefixtures("quick_workers"),
]
OWN = "--workload", "torch_classifier:Classifier", "--config", '{"hidden": 8}'


def test_a_class_is_asked_for_its_data_rows_and_batch(tmp_path):
    file = tmp_path / "run.toml"
    said = lockstep_new(file, *OWN, "--seed", 7, "--root", tmp_path)
    run = runfile.load(file)
    assert run.workload.factory == OWN[1] and run.workload.config == {"hidden": 8}
    assert run.llm.max_seq_len == 12 * 12 + 2  # floats of a picture, and its label of 8 bytes
    assert run.llm.data_location.held_out_percent is None  # it holds 512 out
    assert run.peers.passes == 10 and run.peers.seed == run.workload.seed == 7
    needed = run.config.last_index(run.llm.max_seq_len)
    assert 9 * 2048 < needed <= 10 * 2048 and run.config.total_steps >= 20
    assert run.peers.micro_batch * run.peers.count * 10 == run.config.global_batch_size_end
    assert "base_lr = 0.0015: for fresh weights: stated for 1.85 M params" in said
    once = run.model_copy(update={"peers": run.peers.model_copy(update={"passes": 1})})
    amount = dry_run.look(once, Paths("download", file, tmp_path)).amount
    assert amount.is_too_little and "[peers] passes = 10" in amount.remedy


def test_arrays_and_a_rate_are_those_that_were_given(tmp_path):
    file, data = tmp_path / "run.toml", tmp_path / "arrays.safetensors"
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 12, 12)).astype(np.float32)
    save_file({"x": x, "y": np.arange(200) % 10}, data)
    given = ("--data", f"arrays:{data}", "--optimizer", "distro", "--learning-rate", 3e-3)
    lockstep_new(file, *OWN, *given, "--passes", 3, "--batch", 16, "--root", tmp_path)
    run = runfile.load(file)
    assert (run.llm.data_location.path, run.llm.max_seq_len) == (str(data), 146)
    assert (run.peers.passes, run.config.total_steps) == (3, 3 * 190 // 16)  # 5 % held out
    assert run.llm.lr_schedule.base_lr == 3e-3


def test_text_is_in_the_tokens_that_its_config_has(tmp_path):
    file, text = tmp_path / "run.toml", tmp_path / "a.txt"
    text.write_text("peers train one model\n" * 500)
    given = ("--workload", "torch_language_model:GRU", "--data", text, "--optimizer", "adamw")
    config = '{"vocab_size": 300, "hidden_size": 8, "dropout": 0.1}'
    size = ("--length", 16, "--tokens", "1e4", "--peers", 2, "--passes", 2)
    lockstep_new(file, *given, "--config", config, *size, "--root", tmp_path)
    run = runfile.load(file)
    assert (run.llm.data_location.vocab_size, run.llm.max_seq_len) == (300, 16)
    assert 9000 < run.config.last_index(16) * 16 <= 1e4 and run.peers.passes == 2


def test_a_class_with_steps_of_its_own_takes_them_where_it_is_asked_to(tmp_path):
    asked = ("--workload", "torch_language_model:GRU", "--length", 16, "--tokens", "1e6")
    asked += ("--config", '{"vocab_size": 300, "hidden_size": 8, "dropout": 0.1}')
    (text := tmp_path / "a.txt").write_text("peers train one model\n" * 500)
    runs = {}
    for inner in ("gradient", "worker"):
        given = ("--inner", "worker") if inner == "worker" else ()
        file = tmp_path / f"{inner}.toml"
        said = lockstep_new(file, *asked, "--data", text, *given, "--root", tmp_path)
        runs[inner] = runfile.load(file)
        assert runs[inner].workload.inner == inner
        assert ("with --inner worker" in said) == (inner == "gradient")
    optimizers = {name: run.llm.optimizer.inner.tag() for name, run in runs.items()}
    assert optimizers == {"gradient": "AdamW", "worker": "Workload"}
    with refused("--optimizer distro", "local steps"):
        given = ("--inner", "worker", "--optimizer", "distro", "--data", text)
        lockstep_new(tmp_path / "no.toml", *asked, *given, "--root", tmp_path)


def test_a_class_that_gives_no_gradients_takes_its_own_steps(tmp_path):
    (shards := tmp_path / "shards").mkdir()
    for number in range(800):
        (shards / f"{number:05}.bin").write_bytes(bytes([number % 256, number // 256]))
    config = ("--config", '{"learning_rate": 0.05}')
    given = ("--workload", "burn_class:Workload", *config, "--data", f"files:{shards}")
    said = lockstep_new(tmp_path / "run.toml", *given, "--batch", 80, "--root", tmp_path)
    run = runfile.load(tmp_path / "run.toml")
    assert run.workload.inner == "worker" and "gives no gradients" in said
    assert run.llm.optimizer.inner.tag() == "Workload"


def test_options_in_all_combinations_of_two_make_a_run_or_one_line(tmp_path):
    file = tmp_path / "run.toml"
    options = {
        "--passes": (1, 3, None),
        "--optimizer": ("diloco", "sgd"),
        "--peers": (2, None),
        "--inner": ("gradient", "worker", None),
        "--batch": (40, None),
        "--seed": (0, None),
        "--learning-rate": (3e-4, None),
    }
    passes = set()
    for row in pairwise(options):
        with suppress(LockstepError):  # else a traceback
            lockstep_new(file, *OWN, *flags(row), "--root", tmp_path, "--force")
            assert runfile.load(file).peers.passes == (row["--passes"] or 10)
            passes.add(row["--passes"])
    assert passes == {*options["--passes"]}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--inner", "worker"), ("--inner worker", "gradient")),
        (("--model", "init:2m"), ("--model", "--workload")),
        (("--tokens", "1e6"), ("--tokens",)),
        (("--length", 16), ("--length", 16)),
        (("--config", "{"), ("--config", "{")),
        (("--config", "[]"), ("--config", "[]")),
        (("--config", '{"a": NaN}'), ("--config", "NaN")),
        (("--config", "[" * 10**5), ("--config", "table")),
        (("--config", '{"vocab_size": "300"}'), ("--config", "vocab_size", "300")),
        (("--data", "arrays:~nobody-here/x.npy"), ("--data", "~nobody-here")),
        (("--batch", 40 * 1000, "--passes", 2), ("--passes", 2, "4,096", "40,000")),
        (("--data", "arrays:nowhere.npy"), ("nowhere.npy",)),
    ],
)
def test_what_cannot_be_is_one_line(given, named, tmp_path):
    with refused(*named):
        lockstep_new(tmp_path / "run.toml", *OWN, *given, "--root", tmp_path)
    assert not (tmp_path / "run.toml").exists()


def test_options_of_a_workload_and_rows_are_refused_without_one(tmp_path):
    model = ("--model", "init:2m", "--optimizer", "diloco", "--tokens", "1e6")
    for given, named in (
        (("--data", "corpus", "--passes", 2), "--passes"),
        (("--data", "files:."), "files:."),
    ):
        with refused(named, "--workload"):
            lockstep_new(tmp_path / "run.toml", *model, *given, "--root", tmp_path)


@pytest.mark.long
def test_the_tutorial_to_the_letter_ends_in_a_trained_audited_and_exported_model(
    tmp_path, monkeypatch
):
    page = (PROJECT / "docs/tutorial/your-own-code.md").read_text()
    source, loading = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "workloads").mkdir()
    (tmp_path / "workloads" / "my_model.py").write_text(source)
    for module in ("description", "worker"):
        monkeypatch.setattr(f"parts.workload.{module}.SOURCE", tmp_path / "workloads")
    monkeypatch.chdir(tmp_path)
    line = re.search(r"^lockstep new (.*) --worker-python .*$", page, re.MULTILINE)[1]
    file, *given = shlex.split(line)
    lockstep_new(file, *given, "--root", tmp_path)
    tiny.make(tmp_path / file, tmp_path)
    assert read_json(tmp_path / "data/verdict/verdict.json")["accepted"]
    found = {}
    exec(loading, found)
    draw = np.random.default_rng(2)  # the held-out data
    x = found["torch"].from_numpy(draw.standard_normal((500, 10)).astype(np.float32))
    right = (found["model"](x).argmax(1) == x[:, :3].argmax(1)).float().mean()
    assert right > 0.9
    evaluated = read_json(tmp_path / "metrics/evaluate.json")
    loss = found["torch"].nn.functional.cross_entropy(found["model"](x), x[:, :3].argmax(1))
    assert evaluated["held_out_loss"] == pytest.approx(loss.item(), rel=1e-4)
