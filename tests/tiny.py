"""A run of seconds: a project of its own in a temporary folder, with data that is made there."""

import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import tomlkit
from typer.testing import CliRunner, Result

from pipeline import runfile
from pipeline.run_stage import run_stage
from pipeline.stage import lock
from pipeline.stage.devices import FLAGS
from pipeline.stage.keys import PROJECT, RUN_FILE, STAGES

READY_RUNS = sorted(  # params/ has comparisons too
    file for file in (PROJECT / "params").rglob("*.toml") if not file.name.startswith("compare")
)
VOCABULARY = 64
MODEL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
DEEPSEEK = MODEL | {  # a dense layer, and one with experts
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
ADAMW = {"AdamW": {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "clip_grad_norm": 1.0}}
MUON = {"Muon": {**ADAMW["AdamW"], "momentum": 0.95, "step_scale": {"layers": 0.5, "lm_head": 2.0}}}
LOCAL_STEPS = {"inner_steps": 2, "inner": ADAMW}
OUTER = {"outer_learning_rate": 0.7, "outer_momentum": 0.9, "nesterov": True}
DILOCO = {"DiLoCo": {**LOCAL_STEPS, **OUTER}}
STREAMING = {
    "StreamingDiLoCo": {
        **LOCAL_STEPS, **OUTER, "inner_steps": 4, "fragments": 2, "delay": 1, "mixing": 0.25,
    }
}  # fmt: skip
DECOUPLED = {
    "DecoupledDiLoCo": {
        **LOCAL_STEPS, "inner_steps": 4, "fragments": 2, "delay": 1, "adopt": "carry",
        "quorum": 4, "grace_seconds": 0.1, "max_age": 2,
        "outer": {"Nesterov": {"learning_rate": 0.7, "momentum": 0.9}},
    }
}  # fmt: skip
DECOUPLED_IN_SIGNS = {
    "DecoupledDiLoCo": {
        **DECOUPLED["DecoupledDiLoCo"], "inner_steps": 2, "fragments": 1, "adopt": "overwrite",
        "quantize": "sign", "quantize_block": 64, "error_feedback": 0.9,
        "outer": {
            "CGAD": {
                "learning_rate": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "alpha": 0.5, "cutoff": 4
            }
        },
    }
}  # fmt: skip
FEDAVG = {"FedAvg": LOCAL_STEPS}
DILOCO_IN_4_BITS = {
    "DiLoCo": {**DILOCO["DiLoCo"], "quantize": "int4", "quantize_block": 16, "error_feedback": 0.9}
}
SPARSELOCO = {
    "SparseLoCo": {
        **LOCAL_STEPS,
        "outer_learning_rate": 1.0,
        "error_feedback": 0.95,
        "compression_topk": 4,
        "compression_chunk": 8,
    }
}
PLACES = {"share": 0.3, "seed": 0}
SPARTA = {"SPARTA": {**LOCAL_STEPS, **PLACES, "selector": "partitioned"}}
SPARTA_DILOCO = {"SPARTADiLoCo": {**LOCAL_STEPS, **PLACES, **OUTER, "outer_every": 3}}


BY_TIME = {"epoch_time": 8, "warmup_time": 5, "max_round_train_time": 5, "cooldown_time": 1}
"""Of `[config]`: epochs so short that who is away comes back soon."""
SHORT_EPOCHS = {f"config__{key}": seconds for key, seconds in BY_TIME.items()}


def run_document(data: Path | str, **changes: object) -> tomlkit.TOMLDocument:
    """The default run made tiny; `changes` by dotted name, as in config__total_steps=4."""
    document = pickle.loads(_default_run())
    llm = document["model"]["LLM"]
    llm["max_seq_len"] = 16
    llm["checkpoint"] = {"Init": {"seed": 0, "config": MODEL | {"num_hidden_layers": 1}}}
    llm["data_location"] = {"Local": str(data)}
    document["pins"]["data"] = ""
    llm["lr_schedule"]["Cosine"] |= {"base_lr": 2e-3, "final_lr": 2e-4}
    optimizer = llm["optimizer"]["Distro"]
    del optimizer["step_scale"]  # of groups that not every test's model has
    optimizer["compression_chunk"], optimizer["compression_topk"] = 8, 4
    document["config"] |= {
        "min_clients": 2,
        "init_min_clients": 2,
        "witness_nodes": 1,
        "total_steps": 6,
        "global_batch_size_start": 4,
        "global_batch_size_end": 4,
    }
    document["peers"] |= {"count": 2, "micro_batch": 2, "bits": "machine", "product_bits": 20}
    document["witness"] |= {"snapshot_every": 3, "replay_percent": 100}
    document["held_out"] |= {"sequences": 4, "every": 3}
    document["evaluate"] |= {"max_new_tokens": 4}
    document["runtime"] |= {"checkpoint_every": 1}
    for name, value in changes.items():
        *tables, key = name.split("__")
        place = document
        for table in tables:
            place = place[table]
        place[key] = value
    return document


@cache
def _default_run() -> bytes:
    return pickle.dumps(tomlkit.parse((PROJECT / RUN_FILE).read_text()))  # parsed 10 times slower


def write_data(folder: Path) -> Path:
    """Token shards that a model can learn: each token follows from the one before, mostly."""
    for name, data in _data().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@cache
def _data() -> dict[str, bytes]:
    rng, files = np.random.default_rng(0), {}
    for name, count in (("a.ds", 40_000), ("held_out/a.ds", 200)):
        noise = np.where(rng.random(count) < 0.1, rng.integers(VOCABULARY, size=count), 1)
        tokens = accumulate(
            noise[1:].tolist(), lambda last, n: (3 * last + n) % VOCABULARY, initial=0
        )
        files[name] = np.fromiter(tokens, "<u2", count).tobytes()
    return files


def write_run(file: Path, document: tomlkit.TOMLDocument) -> None:
    file.write_text(tomlkit.dumps(document))


def start(folder: Path, **changes: object) -> tuple[Path, Path]:
    """Write a tiny run file and its data; return the file, and the root of its results to be."""
    run_file = folder / "run.toml"
    write_run(run_file, run_document(write_data(folder / "tokens"), **changes))
    return run_file, folder / "root"


def parsed(**changes: object) -> runfile.Run:
    """Return a tiny run whose data nobody reads."""
    return runfile.parse(run_document("nowhere", **changes).unwrap(), "run.toml")


def environment(project: Path, devices: int = 1) -> dict[str, str]:
    """What a stage's process sees: this Python first, the project's own source, some devices.

    XLA compiles a program for each device anew, which takes most of a tiny run's time.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {
        "PATH": path,
        "PYTHONPATH": str(project),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": os.environ["XLA_FLAGS"].removeprefix(FLAGS).strip(),  # a stage adds its own
        "GLIBC_TUNABLES": "",  # to start over for a faster allocator costs tiny runs more
    }


def make_project(folder: Path, **changes: object) -> Path:
    """A git repository with this checkout's source, a tiny run and its data, committed."""
    project = folder / "project"
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=PROJECT, text=True).split():
        if (PROJECT / name).is_file() and not name.startswith(("tests/", "metrics/", "dvc.lock")):
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(PROJECT / name, project / name)
    document = run_document(write_data(folder / "tokens"), **changes)
    write_run(project / RUN_FILE, document)
    git(project, "init", "-q")
    git(project, "add", "-A")
    commit(project, "A tiny run")
    return project


def git(folder: Path, *arguments: str) -> str:
    """What git says in a folder."""
    who = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


def commit(project: Path, message: str) -> None:
    git(project, "commit", "-q", "--allow-empty", "-am", message)


def run(project: Path, *command: str, **more: str) -> str:
    """Runs a command in the project; its whole output, or an assertion that shows it.

    `more` is added to its environment.
    """
    done = subprocess.run(
        command,
        cwd=project,
        env=environment(project) | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def python(*arguments: object, cwd: Path = PROJECT, **more: str) -> subprocess.CompletedProcess:
    """Run a Python of its own with this project's source; `more` is added to its environment."""
    command = [sys.executable, *map(str, arguments)]
    known = environment(PROJECT) | more
    return subprocess.run(command, cwd=cwd, env=known, capture_output=True, text=True)


def lockstep(stage: str, run_file: Path, root: Path, devices: int = 1) -> subprocess.Popen:
    """Starts a stage by hand."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", stage, "--run", run_file, "--root", root],
        cwd=PROJECT,
        env=environment(PROJECT, devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def by_hand(run_file: Path, root: Path, *stages: str, devices: int = 1) -> str:
    """Runs stages by hand, all by default, each in a process of its own; their output."""
    outputs = []
    for stage in stages or STAGES:
        process = lockstep(stage, run_file, root, devices)
        outputs.append(process.communicate()[0])
        assert process.returncode == 0, f"{stage}: {outputs[-1]}"
    return "".join(outputs)


def make(run_file: Path, root: Path, *stages: str, devices: int = 1) -> str:
    """Run stages in this process on few devices, all by default; return their output.

    Much faster than by_hand: nothing is imported again, and stages and runs of equal settings have
    their programs in common.
    """
    output = io.StringIO()
    for stage in stages or STAGES:
        with like_a_process(devices), redirect_stdout(output):
            run_stage(stage, run_file, root)
    return output.getvalue()


@contextmanager
def like_a_process(devices: int = 1) -> Iterator[None]:
    """Environment, logging and devices as `lockstep` has them, and afterwards as they were."""
    import jax

    logger = logging.getLogger()
    handlers, level = logger.handlers, logger.level
    first = jax.devices()[:devices]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(PROJECT, devices).items():
            patch.setenv(name, value)
        patch.setattr(jax, "devices", lambda *_: first)
        patch.setattr("pipeline.start.set_up.programs_of", programs_in_common)
        logger.handlers = []
        try:
            yield
        finally:
            logger.handlers = handlers
            logger.setLevel(level)


def invoked(*words: object) -> Result:
    """Run a command in this process; return what came of it. Its errors are raised."""
    from pipeline.__main__ import app

    with like_a_process():
        done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


_made: dict[tuple[str, str], object] = {}


def programs_in_common(run: runfile.Run, *inputs: object) -> object:
    """Stand in for `programs_of`: return those that were made with equal settings a while ago."""
    from pipeline.subject import programs_of

    of_model = {"LLM": {"lr_schedule", "cold_start_warmup_steps", "optimizer"}}
    key = (
        run.model_dump_json(include={"model": of_model, "peers": True, "workload": True}),
        repr(inputs),
    )
    if key not in _made:
        if len(_made) == 4:
            del _made[next(iter(_made))]
        _made[key] = programs_of(run, *inputs)
    return _made[key]


def keys_of(project: Path) -> dict[str, str]:
    """Each stage's key by the source and the run file of a project, asked of that project."""
    program = (
        "import json; from pathlib import Path; from pipeline.stage.keys import *; "
        "print(json.dumps({s: Keys(Path(RUN_FILE)).made(s) for s in STAGES}))"
    )
    return json.loads(run(project, sys.executable, "-c", program).splitlines()[-1])


def in_common(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process of the tests to need it makes, for all of them.

    Tests may read it, and change copies of it.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"{name}-in-common"
    whole = folder.with_suffix(".whole")
    with lock.hold(folder.with_suffix(".lock"), patience_seconds=600):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


def sent(transcript: Path) -> list[dict]:
    """What a transcript has of each message that was sent, as its rounds are written."""
    lines = (transcript / "rounds.jsonl").read_text().splitlines()
    return [m for line in lines for m in json.loads(line)["evidence"]["messages"].values()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
