"""`lockstep try` does what the command lines of Psyche's pages ask for."""

import os
from pathlib import Path

import pytest

from lockstep.methods.distro import OptimizerDistro
from lockstep.methods.schedule import ScheduleConstant
from parts.trial.trial import parse, run_of
from pipeline import runfile
from pipeline.pages.stage_results import read_tsv
from pipeline.stage.keys import PROJECT
from pipeline.weights import hf
from tests import tiny
from tests.errors import refused
from tests.pipeline.conversion import write_model
from tests.servers import hub as hub_server
from tests.servers.hub import Repo

pytestmark = pytest.mark.long

MODEL, DATASET = "emozilla/llama2-20m-init", "emozilla/fineweb-10bt-tokenized-datatrove-llama2"
BATCH = ["--total-batch", "2", "--micro-batch", "1"]
# The pages "Implementing models" and "Python Integration".
BY_PATH = ["--model", MODEL, "--data-path", "./data/fineweb-10bt/", *BATCH]
BY_HTTP = ["--model", MODEL, "--data-provider", "http", "--data-url", DATASET, *BATCH]
IN_PYTHON = [*BY_PATH, "--python"]
BRIEF = ["--sequence-length", "16", "--total-steps", "4", "--warmup-steps", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("model") / "hf", "float32")
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder as the pages assume it, with Psyche's data set in its data/, and as a hub's."""
    monkeypatch.chdir(tmp_path)
    tiny.write_data(Path("data/fineweb-10bt"))
    with hub_server.running_hub(monkeypatch, tmp_path / "hf") as hub:
        hub.datasets[DATASET] = dataset = Repo()
        dataset.commit({"000.ds": Path("data/fineweb-10bt/a.ds").read_bytes(), "README.md": b"-"})
        yield tmp_path


def lockstep_try(arguments: list[str], model: Path) -> str:
    arguments = [str(model) if argument == MODEL else argument for argument in arguments]
    return tiny.invoked("try", *arguments, *BRIEF).stdout


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_tsv(out / "metrics" / "loss.tsv")]


def test_command_lines_of_psyches_pages_run_with_both_optimizers(place, model):
    left = place / ".saved.part" / "config.json"  # by a kill while it copied
    left.parent.mkdir()
    left.write_text("{")
    lockstep_try([*BY_PATH, "--save-path", "saved"], model)
    trained = losses(Path("data/try/adamw"))
    assert len(trained) == 4
    assert hf.read_folder(Path("saved"))[0]["model_type"] == "llama"
    assert not left.parent.exists()

    # "Both examples work with the same model and the same exact data."
    lockstep_try([*BY_HTTP, "--out", "http"], model)
    assert losses(Path("http/adamw")) == trained
    # a Python process would do the same work, and it is done
    assert "train: " + str(Path("data/try/adamw/data/trained")) in lockstep_try(IN_PYTHON, model)

    lockstep_try([*BY_PATH, "--distro"], model)
    assert losses(Path("data/try/distro"))[0] == trained[0] != losses(Path("data/try/distro"))[1]


def parsed(*arguments: str) -> runfile.Run:
    return run_of(parse(list(arguments)))


def test_command_line_of_psyches_page_is_the_ready_run(place):
    """Psyche's defaults are those of params/fineweb-10bt.toml, which was written by hand."""
    ready = runfile.load(PROJECT / "params" / "fineweb-10bt.toml")
    for run in (parsed(*BY_HTTP), parsed(*BY_PATH)):
        for key in ("checkpoint", "lr_schedule", "optimizer", "max_seq_len"):
            assert getattr(run.llm, key) == getattr(ready.llm, key)
        assert run.config.total_steps == 25_000
        assert run.config.global_batch_size_start == 2
        assert (run.peers.count, run.peers.micro_batch, run.peers.overlap) == (1, 1, 0)
    assert parsed(*BY_HTTP).llm.data_location == ready.llm.data_location
    assert parsed(*BY_PATH).llm.data_location == runfile.DataLocal(path="./data/fineweb-10bt/")


def test_distro_has_psyches_defaults_and_order():
    run = parsed("--distro")
    assert run.llm.optimizer == OptimizerDistro(
        clip_grad_norm=1.0,
        weight_decay=0.1,
        compression_decay=0.999,
        compression_chunk=64,
        compression_topk=4,
        quantize_1bit=False,
    )
    assert (run.peers.overlap, run.peers.micro_batch, run.config.global_batch_size_end) == (
        1,
        8,
        256,
    )
    assert run.llm.checkpoint.repo_id == "emozilla/llama2-215m-init"


def test_counts_are_written_as_people_write_them():
    run = parsed("--total-steps", "1M", "--total-batch", "1,024", "--sequence-length", "2e3")
    assert (run.config.total_steps, run.config.global_batch_size_end) == (10**6, 1024)
    assert run.llm.max_seq_len == 2000
    for wrong in ("1.5", "1e99", "many"):
        with refused("--total-steps", wrong, "100k"):
            parse(["--total-steps", wrong])


def test_flags_that_stand_for_no_single_key_reach_the_run_file(tmp_path):
    tiny.write_data(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train-0.parquet").touch()
    run = parsed("--seed", "258", "--token-size", "4", "--total-steps", "100", "--eps", "1e-7")
    assert run.llm.data_location.shuffle.seed == (*bytes(30), 1, 2)
    assert run.llm.data_location.token_size_in_bytes == "FourBytes"
    assert isinstance(run.llm.lr_schedule, ScheduleConstant)  # it ends within the warm-up
    assert run.llm.optimizer.eps == 1e-7
    rows = parsed("--data-path", str(tmp_path / "rows"))
    assert rows.llm.data_location == runfile.DataPreprocessed(source=str(tmp_path / "rows"))
    assert not rows.download.stream
    for option in (("--seed", "7"), ("--token-size", "4")):
        with refused(*option, "Parquet"):
            parsed("--data-path", str(tmp_path / "rows"), *option)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with refused("--attn-implementation", "eager"):  # of a model that `transformers` has
        parsed("--model", str(tmp_path), "--python", "--attn-implementation", "eager")
    shared = parsed("--data-parallelism", "2", "--total-batch", "6", "--micro-batch", "8")
    assert (shared.peers.count, shared.peers.fsdp, shared.peers.micro_batch) == (1, 2, 6)
    assert parsed(*IN_PYTHON).runtime.carrier == "processes"
    assert parsed(*BY_PATH).runtime.carrier == "in_process"
    fused = parsed("--attn-implementation", "flash-attention2").peers
    assert (fused.attention, fused.precision) == ("cudnn", "bfloat16")
    assert fused.scan_layers
    http = ("--data-provider", "http", "--data-url")
    assert isinstance(parsed(*http, "https://a.org/b.ds").llm.data_location, runfile.DataHttp)
    assert isinstance(parsed(*http, "s3://bucket/folder").llm.data_location, runfile.DataUrl)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--device cuda:1", ("--device", "cuda:1", "CUDA_VISIBLE_DEVICES")),
        ("--optim-stats", ("--optim-stats", "loss.tsv")),
        ("--start-step 2", ("--start-step", 2, 1)),
        ("--data-provider http", ("--data-provider", "--data-url", "''")),
        ("--data-url a/b", ("--data-provider", "--data-url", "a/b")),
        ("--seed -1", ("--seed", -1, 2**32 - 1)),
        ("--total-step 9", ("--total-step", 9, "--help")),
        ("--total-batch 0", ("config.global_batch_size_start", 0)),
        ("--learning-rate nan", ("lr_schedule.Cosine.base_lr", "NaN")),
        ("--data-path x --data-provider http --data-url a/b", ("--data-path x", "http")),
        ("--beta1 0.9 --distro", ("--beta1", 0.9)),  # by default, and yet nothing reads it
        ("--compression-topk 4", ("--compression-topk", 4)),
        ("--beta2 2", ("optimizer.AdamW.betas[1]", 2.0)),
        ("--data-parallelism 0", ("peers.fsdp", 0)),
        ("--save-path .", ("--save-path", ".")),
    ],
)
def test_flag_that_makes_no_sense_is_refused_by_name_in_one_line(
    arguments, named, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with refused(*named):
        tiny.invoked("try", *arguments.split())
    assert not os.listdir(tmp_path)
