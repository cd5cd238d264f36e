"""`lockstep new` writes run files that load, keep the tokens asked for, and are in time."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from lockstep.files import write_json
from lockstep.methods import CARDS
from lockstep.same_bits.rules import RULES
from lockstep.tables.peers import MAX_CLIENTS
from models.llama import llama
from parts.new import run_tables
from parts.new.commands import MOST_PEERS, OPTIMIZERS
from parts.new.data_tables import data_named
from parts.new.starting_model import SIZES, model_named
from pipeline import runfile
from pipeline.preflight.plan import plan, plan_of
from pipeline.stage.keys import PROJECT
from pipeline.toml_file import read_run_file
from tests import tiny
from tests.errors import check_names, refused
from tests.pairwise import flags, pairwise
from tests.pipeline.sources.corpora import parquet_of
from tests.servers import hub as hub_server
from tests.servers.hub import REPO

RUN = PROJECT / "params" / "run.toml"
READY = [  # optimizers of ready runs that are the default run but for these
    *("adamw", "diloco", "streaming-diloco", "sparseloco", "sparta", "sparta-diloco")
]


def lockstep_new(*arguments: object) -> str:
    return tiny.invoked("new", *arguments).output


@pytest.fixture(autouse=True)
def unlooked(monkeypatch) -> list[Path]:
    """What `new` writes is not looked at: tests/pipeline/preflight does that. The files of it."""
    files = []
    monkeypatch.setattr("pipeline.preflight.commands.show", lambda file, _: files.append(file) or 2)
    return files


@pytest.fixture
def small(tmp_path) -> tuple[str, ...]:
    """Flags of a small new run: a folder with a config and no weights, and one of text."""
    write_json(tmp_path / "model" / "config.json", tiny.MODEL | {"vocab_size": 300})
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("peers train one model\n" * 50)
    model, text = tmp_path / "model", tmp_path / "text"
    return "--model", str(model), "--data", str(text), "--tokens", "2e5"


def lockstep_plan(file: Path, root: Path) -> str:
    """What the command prints, in a process of its own: it sets up the allocator."""
    return tiny.python("-m", "pipeline", "plan", "--run", file, "--root", root).stdout


# ---- A new run ----


@pytest.mark.parametrize("name", CARDS)
def test_a_new_run_of_each_optimizer_loads_and_every_message_is_in_time(name, small, tmp_path):
    file = tmp_path / "run.toml"
    lockstep_new(file, *small, "--optimizer", name, "--root", tmp_path)
    run = runfile.load(file)
    assert run.llm.optimizer.tag() == CARDS[name].tag
    assert run.config.global_batch_size_end == run.config.global_batch_size_start
    assert run.peers.bits == "everywhere"  # model and optimizer have rules
    assert plan(run, tmp_path).late is None
    tokens = run.config.last_index(run.llm.max_seq_len) * run.llm.max_seq_len
    assert abs(tokens - 2e5) <= run.config.global_batch_size_end * run.llm.max_seq_len / 2


def test_length_batch_and_links_are_those_that_were_asked_for(small, tmp_path):
    file = tmp_path / "run.toml"
    given = ("--length", 16, "--batch", 48, "--uplink", 3, "--downlink", 7)
    said = lockstep_new(file, *small, "--optimizer", "distro", *given, "--root", tmp_path)
    run = runfile.load(file)
    assert run.llm.max_seq_len == 16 and run.config.global_batch_size_end == 48
    assert (run.links.upload_mbps, run.links.download_mbps) == (3, 7)
    assert run.config.total_steps == round(2e5 / (16 * 48))
    assert "12 sequences" in said and "of --batch" in said
    assert "links.download_mbps = 7.0: simulated, as asked for" in said


def test_rate_seed_and_dtype_are_those_that_were_asked_for(small, tmp_path):
    file = tmp_path / "run.toml"
    given = ("--learning-rate", 3e-4, "--seed", 7, "--dtype", "bfloat16")
    said = lockstep_new(file, *small, "--optimizer", "diloco", *given, "--root", tmp_path)
    run = runfile.load(file)
    assert (run.llm.lr_schedule.base_lr, run.llm.lr_schedule.final_lr) == (3e-4, 3e-5)
    assert (run.peers.seed, run.llm.checkpoint.seed, run.export.dtype) == (7, 7, "bfloat16")
    assert "base_lr = 0.0003: --learning-rate." in said and "final_lr = 3e-05" in file.read_text()
    lockstep_new(file, *small, "--optimizer", "diloco", "--root", tmp_path, "--force")
    assert runfile.load(file).llm.data_location.shuffle != run.llm.data_location.shuffle


def test_weights_that_are_trained_get_a_rate_of_fine_tuning_and_keep_their_dtype(small, tmp_path):
    rates = {}
    for trained in (False, True):
        if trained:
            (tmp_path / "model" / "model.safetensors").touch()
            config = tiny.MODEL | {"vocab_size": 300, "torch_dtype": "bfloat16"}
            write_json(tmp_path / "model" / "config.json", config)
        for name in ("adamw", "diloco", "muon"):
            file = tmp_path / f"{name}-{trained}.toml"
            said = lockstep_new(file, *small, "--optimizer", name, "--root", tmp_path)
            rates[name, trained] = runfile.load(file).llm.lr_schedule.base_lr
            assert runfile.load(file).export.dtype == ("bfloat16" if trained else "float32")
            whose = "trained already" if trained else "fresh weights"
            assert f"base_lr = {rates[name, trained]}: for" in said and whose in said
    assert rates["adamw", True] == rates["diloco", True] == 2e-5
    of_fresh = rates["muon", False] / rates["adamw", False]
    assert rates["muon", True] == pytest.approx(2e-5 * of_fresh, rel=1e-4)


def test_a_measurement_has_enough_tokens_to_say_something(small, tmp_path):
    for length in (7, 16):
        file = tmp_path / f"{length}.toml"
        given = ("--optimizer", "distro", "--length", length, "--root", tmp_path)
        lockstep_new(file, *small, *given)
        assert 2**17 <= runfile.load(file).held_out.sequences * length < 2**17 + length


def test_every_model_has_tables_of_every_optimizer_that_load():
    for size in SIZES:
        model = model_named(f"init:{size}", Path())
        for recipe in CARDS.values():
            asked = run_tables.NewRun(model, data_named("corpus", model), recipe, 10**9, 4, 8)
            run = runfile.parse(run_tables.tables(asked), "new")
            assert (run.peers.fsdp, run.peers.attention) == (2, "cudnn")
            assert run.peers.precision == "bfloat16"
            assert all(run_tables.reasons(asked).values())


@pytest.mark.parametrize(("vocabulary", "tokens"), [(32_000, 8192), (128_256, 4096), (2**30, 128)])
def test_a_gpu_makes_two_gigabytes_of_logits_at_most(vocabulary, tokens):
    assert run_tables.head_tokens(vocabulary) == tokens


def test_the_named_sizes_have_the_parameters_that_their_names_say():
    for size in SIZES:
        params = model_named(f"init:{size}", Path()).params
        unit = {"m": 1e6, "b": 1e9}[size[-1]]
        digits = len(size[:-1].partition(".")[2])
        assert f"{params / unit:.{digits}f}" == size[:-1]


def test_times_are_widened_where_no_message_would_be_in_time_and_that_is_said(tmp_path):
    file = tmp_path / "run.toml"
    model = ("--model", "init:1.1b", "--data", "owner/tokens", "--gpus", "4")
    said = lockstep_new(file, *model, "--optimizer", "diloco", "--tokens", "1e9")
    run = runfile.load(file)
    assert "config.max_round_train_time" in said and "widened from 30" in said
    assert "not measured on a GPU" in said
    config = dict(run.llm.checkpoint.config)
    assert plan_of(run, config).late is None
    short = run.config.model_copy(update={"max_round_train_time": 30})
    with pytest.raises(LockstepError, match="nothing is trained"):
        plan_of(run.model_copy(update={"config": short}), config)
    assert run.config.epoch_time > plan_of(run, config).seconds
    assert run.download.limit.steps == run.config.total_steps


def test_a_new_file_is_looked_at_and_new_says_that_it_would_fail(small, unlooked, tmp_path):
    file = tmp_path / "run.toml"
    said = lockstep_new(file, *small, "--optimizer", "adamw", "--root", tmp_path)
    assert unlooked == [file]
    check_names(said.splitlines()[-1], file, f"lockstep check --run {file}", 2)


def test_the_last_line_is_the_next_command(small, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.preflight.commands.show", lambda *_: 0)
    said = lockstep_new(tmp_path / "run.toml", *small, "--optimizer", "adamw", "--root", tmp_path)
    assert said.splitlines()[-1].endswith(f"make repro RUN={tmp_path / 'run.toml'}")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("100k", 100_000),
        ("2.3M", 2_300_000),
        ("1B", 10**9),
        ("1e9", 10**9),
        ("1,000,000", 10**6),
        ("1_000", 1000),
        ("0.5T", 5 * 10**11),
        *((odd, None) for odd in ("1,5M", "k", "1x", "nan", "-1", "1e", "", "1..5", "1e9999")),
    ],
)
def test_counts_are_read_as_people_write_them(written, meant):
    if meant is None:
        with refused("--tokens"):
            run_tables.number(written)
    else:
        assert run_tables.number(written) == meant


@pytest.mark.parametrize(
    ("option", "written", "meant"),
    [
        ("--data", "copus", "corpus"),
        ("--data", "./txets", "./texts"),
        ("--model", "./modle", "./model"),
        ("--model", "init:12m", "2m"),
        ("--optimizer", "dilco", "diloco"),
        ("--optimizer", "Adam_V", "adamw"),
    ],
)
def test_a_name_that_is_misspelt_is_answered_by_the_right_one(
    option, written, meant, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "model").mkdir()
    given = {"--model": "init:2m", "--data": "corpus", "--optimizer": "sgd", "--tokens": "1M"}
    flags = [word for pair in (given | {option: written}).items() for word in pair]
    with refused(option, written, f"did you mean {meant}?"):
        lockstep_new("run.toml", *flags)


def test_a_closed_standard_input_is_asked_nothing(tmp_path):
    command = f"exec {sys.executable} -m pipeline new '{tmp_path / 'mine.toml'}' <&-"
    environment = tiny.environment(PROJECT)
    done = subprocess.run(
        ["sh", "-c", command], cwd=PROJECT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: lockstep new: missing --model")


def test_what_is_said_stands_in_the_file_too(small, tmp_path):
    file = tmp_path / "run.toml"
    said = lockstep_new(file, *small, "--optimizer", "diloco", "--root", tmp_path)
    text = " ".join(line.removeprefix("# ") for line in file.read_text().splitlines())
    lines = [line for line in said.splitlines() if line.startswith(("config.", "model.", "peers."))]
    assert len(lines) > 5
    for line in lines:
        assert line in text
        assert f"Chosen: {line.partition(': ')[2]}" in text


def test_a_model_with_one_matrix_for_both_ends_has_no_step_size_for_a_head(small, tmp_path):
    tied = tiny.MODEL | {"vocab_size": 300, "tie_word_embeddings": True}
    write_json(tmp_path / "model" / "config.json", tied)
    lockstep_new(tmp_path / "muon", *small, "--optimizer", "muon")
    optimizer = read_run_file(tmp_path / "muon")["model"]["LLM"]["optimizer"]
    assert optimizer["Muon"]["step_scale"].keys() == {"layers"}


def test_the_config_of_a_model_on_the_hub_is_fetched_alone(tmp_path, monkeypatch):
    config = json.dumps(llama.Config.from_hf(tiny.MODEL).to_hf()).encode()
    with hub_server.running_hub(monkeypatch, tmp_path / "hf") as hub:
        commit = hub.commit(
            {"config.json": config, "tokenizer.json": b"{}", "model.safetensors": b"-" * 99}
        )
        file = tmp_path / "run.toml"
        where = ("--model", REPO, "--data", "owner/tokens", "--root", tmp_path)
        lockstep_new(file, *where, "--optimizer", "adamw", "--tokens", "1e5")
    assert runfile.load(file).llm.checkpoint == runfile.CheckpointHub(repo_id=REPO, revision=commit)
    assert [path.name for path in tmp_path.glob("data/store/hub/*/*/*")] == ["config.json"]


@pytest.mark.long
def test_plan_takes_a_model_on_the_hub_from_its_config_and_not_from_another_runs(
    tmp_path, monkeypatch
):
    other = tmp_path / "data" / "init" / "hf" / "config.json"
    write_json(other, llama.Config.from_hf(tiny.MODEL | {"vocab_size": 99}).to_hf())
    config = json.dumps(llama.Config.from_hf(tiny.MODEL).to_hf()).encode()
    with hub_server.running_hub(monkeypatch, tmp_path / "hf") as hub:
        hub.commit({"config.json": config, "vocab.json": b"{}", "model.safetensors": b""})
        file = tmp_path / "run.toml"
        where = ("--model", REPO, "--data", "owner/tokens", "--root", tmp_path)
        said = lockstep_new(file, *where, "--optimizer", "adamw", "--tokens", "1e5")
        planned = lockstep_plan(file, tmp_path)
    line = next(line for line in said.splitlines() if line.startswith("params"))
    assert line in planned.splitlines()
    assert "memory         not known before `lockstep convert`" in planned


def test_where_there_is_no_rule_a_new_run_is_as_compiled_and_says_why(small, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    given = (file, *small, "--optimizer", "adamw", "--root", tmp_path)
    said = lockstep_new(*given, "--gpus", "1")
    assert 'peers.bits = "machine"' in said and "cuDNN" in said
    peers = runfile.load(file).peers
    assert (peers.remat, peers.head_tokens) == ("dots_with_no_batch_dims_saveable", 8192)
    monkeypatch.delitem(RULES, "rsqrt")
    said = lockstep_new(*given, "--force")
    assert runfile.load(file).peers.bits == "machine" and "rsqrt of float32" in said


@pytest.mark.long
def test_plan_of_a_kernel_that_is_not_here_says_all_but_the_memory(small, tmp_path):
    file = tmp_path / "run.toml"
    lockstep_new(file, *small, "--optimizer", "adamw", "--gpus", "1", "--root", tmp_path)
    planned = lockstep_plan(file, tmp_path)
    assert 'not known here: [peers] attention = "cudnn"' in planned
    assert "stage train    will run" in planned


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("corpus", {"vocab_size": 4096}),
        ("https://host/a.ds", {"location": {"SingleUrl": "https://host/a.ds"}}),
        ("https://host/mix.json", "https://host/mix.json"),
        ("gs://b/a/c", {"location": {"Gcp": {"bucket_name": "b", "filter_directory": "a/c"}}}),
        ("s3://bucket/a", {"url": "s3://bucket/a"}),
        ("tokens:owner/name", {"repo_id": "owner/name"}),
        ("owner/name", {"source": "owner/name", "vocab_size": 4096}),
        ("owner/name:some-10BT", {"source": "owner/name", "subset": "some-10BT"}),
        ("text:s3://bucket/a", {"source": "s3://bucket/a"}),
        ("https://host/a.jsonl.gz", {"source": "https://host/a.jsonl.gz"}),
        ("tokens", {"path": "tokens", "token_size_in_bytes": "TwoBytes"}),
        ("parquet", "parquet"),
        ("documents", {"source": "documents", "vocab_size": 4096}),
        ("text", {"source": "text", "vocab_size": 4096}),
    ],
)  # fmt: skip
def test_each_kind_of_location_has_a_table_that_loads(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file, data in {
        "tokens/a.ds": b"-",
        "parquet/a.parquet": parquet_of([[1, 2]], column="inputs"),
        "documents/a.parquet": parquet_of(["a text"]),
        "text/a.txt": b"-",
    }.items():
        Path(file).parent.mkdir()
        Path(file).write_bytes(data)
    lockstep_new("run.toml", "--model", "init:2m", "--data", name, "--optimizer", "adamw",
                 "--tokens", "1e6")  # fmt: skip
    runfile.load(Path("run.toml"))
    ((_, table),) = read_run_file(Path("run.toml"))["model"]["LLM"]["data_location"].items()
    assert table == expected or expected.items() <= table.items()


# ---- A run like another ----


def of_keys(found: dict, like: dict) -> dict:
    """The keys of a table that another has too, those of tables in it likewise."""
    return {
        key: of_keys(found[key], value) if isinstance(value, dict) else found[key]
        for key, value in like.items()
    }


@pytest.mark.parametrize("name", READY)
def test_like_the_default_run_is_the_ready_run_of_that_optimizer(name, tmp_path):
    ready, file = read_run_file(PROJECT / "params" / f"{name}.toml"), tmp_path / "run.toml"
    lockstep_new(file, "--like", RUN, "--optimizer", name)
    made = read_run_file(file)
    llm = made["model"]["LLM"]
    assert made["config"] == ready["config"]
    assert llm["lr_schedule"] == ready["model"]["LLM"]["lr_schedule"]
    ((tag, table),) = ready["model"]["LLM"]["optimizer"].items()
    assert of_keys(llm["optimizer"][tag], table) == table
    assert made["witness"]["snapshot_every"] == ready["witness"]["snapshot_every"]
    for key in ("checkpoint", "data_location"):
        assert getattr(runfile.load(file).llm, key) == getattr(runfile.load(RUN).llm, key)
    assert runfile.load(file).peers == runfile.load(RUN).peers
    assert runfile.load(file).pins == runfile.load(RUN).pins


@pytest.mark.parametrize("name", CARDS)
def test_like_keeps_the_tokens_to_within_a_round_also_over_a_ramp(name, tmp_path):
    ramp = RUN.read_text().replace("batch_size_start = 16", "batch_size_start = 8")
    ramp = ramp.replace("warmup_tokens = 0", "warmup_tokens = 1", 1)
    (tmp_path / "base.toml").write_text(ramp.replace("total_steps = 200", "total_steps = 203"))
    lockstep_new(tmp_path / "run.toml", "--like", tmp_path / "base.toml", "--optimizer", name)
    base, run = runfile.load(tmp_path / "base.toml"), runfile.load(tmp_path / "run.toml")
    asked, got = (one.config.last_index(one.llm.max_seq_len) for one in (base, run))
    assert abs(asked - got) <= run.config.global_batch_size_end / 2
    assert run.llm.data_location == base.llm.data_location
    assert run.llm.checkpoint == base.llm.checkpoint
    assert plan(run, tmp_path).late is None


def test_like_a_run_in_the_older_spelling_stays_in_it(small, tmp_path):
    older = (PROJECT / "params" / "fineweb-edu.toml").read_text()
    older = older.replace("emozilla/llama2-20m-init", small[1]).replace(" = 2048", " = 16")
    (tmp_path / "base.toml").write_text(older.replace("max_seq_len = 2048", "max_seq_len = 16"))
    lockstep_new(tmp_path / "run.toml", "--like", tmp_path / "base.toml", "--optimizer", "diloco")
    run = runfile.load(tmp_path / "run.toml")
    assert (run.config.global_batch_size, run.config.total_steps) == (80, 2500)
    assert run.config.rounds_per_epoch == 2
    limit = run.download.limit
    assert (limit.steps, limit.batch, limit.max_seq_len) == (2500, 80, 16)


@pytest.mark.long
def test_like_a_large_run_widens_the_times_that_larger_messages_need(tmp_path):
    base, file = tmp_path / "base.toml", tmp_path / "run.toml"
    lockstep_new(base, "--model", "init:134m", "--data", "corpus", "--optimizer", "distro",
                 "--tokens", "1e7")  # fmt: skip
    said = lockstep_new(file, "--like", base, "--optimizer", "fedavg")
    before, after = runfile.load(base).config, runfile.load(file).config
    assert before.max_round_train_time == 30 < after.max_round_train_time
    assert "widened from 30" in said
    assert plan(runfile.load(file), tmp_path).late is None


# ---- What is refused, and what is asked ----


def test_options_in_all_combinations_of_two_make_a_run_or_one_line(small, tmp_path):
    options = {
        "--optimizer": ("sgd", "streaming-diloco", "decoupled-diloco", "muon"),
        "--tokens": ("2e5", "1e3"),
        "--peers": (None, 1, 3),
        "--gpus": (None, 1, 4),
        "--length": (None, 16),
        "--batch": (None, 60, 65535),
        "--uplink": (None, 0.001, 1e300),
        "--downlink": (None, 5),
        "--learning-rate": (None, 1.0),
        "--seed": (None, 0),
        "--dtype": (None, "float16"),
    }
    file, made = tmp_path / "run.toml", 0
    for row in pairwise(options):
        with suppress(LockstepError):  # else a traceback
            lockstep_new(file, *small[:4], *flags(row), "--root", tmp_path, "--force")
            runfile.load(file)
            made += 1
    assert made >= 5


def test_an_existing_file_is_overwritten_only_with_force(small, tmp_path, monkeypatch):
    file = tmp_path / "run.toml"
    file.write_text("mine")
    with refused("run.toml", "--force"):
        lockstep_new(file, *small, "--optimizer", "adamw")
    assert file.read_text() == "mine"
    monkeypatch.setenv("HOME", str(tmp_path))  # as an answer in a terminal may name it
    lockstep_new("~/run.toml", *small, "--optimizer", "adamw", "--force")
    runfile.load(file)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"--optimizer": "adam"}, ("adam", "adamw")),
        ({"--tokens": "many"}, ("many",)),
        ({"--tokens": "10"}, (10, "1,024")),
        ({"--model": "init:9t"}, ("init:9t", "2m")),
        ({"--data": "/nowhere"}, ("/nowhere", "corpus")),
        ({"--data": "~nobody-here/x"}, ("~nobody-here/x",)),
        ({"--like": str(RUN)}, ("--model",)),
        ({"--tokens": "10000", "--batch": "64"}, ("10,000", "16,384", "--batch")),
        ({"--length": "4096"}, (4096,)),
        ({"--batch": "6"}, (6, 4)),
    ],
)
def test_what_makes_no_run_is_one_line_and_no_file(changes, named, tmp_path):
    flags = {"--model": "init:2m", "--data": "corpus", "--optimizer": "adamw", "--tokens": "1e6"}
    arguments = [word for pair in (flags | changes).items() for word in pair]
    with refused(next(iter(changes)), *named):
        lockstep_new(tmp_path / "run.toml", *arguments)
    assert not (tmp_path / "run.toml").exists()


def test_without_a_terminal_what_is_missing_is_said_in_one_line(tmp_path):
    with refused("--data", "--optimizer", "--tokens"):
        lockstep_new(tmp_path / "run.toml", "--model", "init:2m")


@pytest.mark.long
def test_in_a_terminal_it_asks_one_question_at_a_time(tmp_path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pipeline", "new", "--root", str(tmp_path)]
    file = tmp_path / "run.toml"
    # an empty one is the default, and one that cannot be is asked for again at once
    answers = (file, "./my-lama", "", "", "dilco", "adamw", "10", "", "none", "2", "")
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=PROJECT, env=environment
    ) as process:
        os.close(theirs)
        seen = ""
        for answer in answers:
            seen += _read_until(ours, "]: ")
            os.write(ours, f"{answer}\n".encode())
        seen += _read_until(ours, "\nnew:")
        assert process.wait(60) == 0
    os.close(ours)
    words = ("Model", "my-lama", "Data", "Optimizer", "dilco", "Tokens", "10:", "Peers", "none")
    asked = [seen.index(word) for word in (*words, "GPUs")]
    assert asked == sorted(asked)
    assert all(name in seen[: seen.index("dilco")] for name in CARDS)
    for question, times in (("Model: ", 2), ("Optimizer: ", 2), ("Tokens to", 2), ("Peers [", 2)):
        assert seen.count(question) == times + (question == "Model: ")  # in the file too
    run = runfile.load(file)
    assert (run.peers.count, run.peers.precision) == (2, "float32")
    assert run.llm.optimizer.tag() == "AdamW"


def _read_until(terminal: int, ending: str) -> str:
    """What a program prints up to some text."""
    seen, until = "", time.monotonic() + 60
    while ending not in seen:
        assert time.monotonic() < until, seen
        if select.select([terminal], [], [], 1)[0]:
            try:
                seen += os.read(terminal, 65536).decode()
            except OSError as error:  # it has ended
                raise AssertionError(seen) from error
    return seen


# ---- The cards ----


@pytest.mark.parametrize("name", CARDS)
def test_stated_rates_and_tables_are_those_of_the_files_that_are_named(name):
    card = CARDS[name]
    assert [rate.params for rate in card.rates] == sorted(rate.params for rate in card.rates)
    for rate in card.rates:
        if rate.file.endswith(".toml"):
            schedule = read_run_file(PROJECT / rate.file)["model"]["LLM"]["lr_schedule"]
            assert schedule["Cosine"]["base_lr"] == rate.rate
    if card.file.endswith(".toml"):
        ready = read_run_file(PROJECT / card.file)["model"]["LLM"]["optimizer"]
        assert ready == {card.tag: card.settings}


def test_help_lists_the_optimizers_and_bounds_of_the_library():
    assert list(CARDS) == OPTIMIZERS
    assert MAX_CLIENTS == MOST_PEERS
