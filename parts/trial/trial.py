"""`lockstep try`: the stages that a training needs, on a run file made of flags.

    OUT/adamw/, OUT/distro/    run.toml, data/ and metrics/ of the two trainings
    OUT/store/                 what was downloaded, for both

`--distro` says which one a command trains, as in Psyche. It prints both once both exist.
"""

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
from lockstep.errors import LockstepError
from lockstep.files import read_json, write_named
from lockstep.machine.progress import size
from parts.trial import flags
from pipeline import runfile
from pipeline.command_options import run_stage
from pipeline.pages.stage_results import read_tsv
from pipeline.runfile.as_text import run_file
from pipeline.sources.token_files.listing import EXTENSIONS
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.weights import hf

TRIAL_FILE = "run.toml"
LAST = 10  # the mean over a tenth of the rounds is a run's loss: one batch's is noise
NAMES = {"adamw": "AdamW", "distro": "DisTrO"}
TRAINED = ("download", "convert", "train")
SAVED = ("witness", "export")
FLAG_OF = {  # keys of the run file that a flag of another name decides
    "global_batch_size_start": "total-batch",
    "max_seq_len": "sequence-length",
    "repo_id": "model",
    "base_lr": "learning-rate",
    "clip_grad_norm": "max-grad-norm",
    "betas[0]": "beta1",
    "betas[1]": "beta2",
}
CAUSAL_LM = "hf_causal_lm:CausalLM"  # in workloads/: any AutoModelForCausalLM
FAST = 1e6  # megabits per second: a lone peer waits for nobody
FOREVER = 10**9  # seconds of an epoch: the run is one


def take(arguments: Sequence[str]) -> None:
    """Train what the arguments say, and print the results."""
    options = flags.parse(arguments)
    if options.cpu or options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.save_path is not None and os.path.lexists(options.save_path):
        raise LockstepError(f"--save-path {options.save_path}: exists, expected a new folder")
    out = Path(options.out)
    root = out / ("distro" if options.distro else "adamw")
    file = root / TRIAL_FILE
    write_named(file, run_file(run_of(options), f"Made by `lockstep try` for {root.name}."))
    _share_downloads(out, root)
    for name in TRAINED if options.save_path is None else (*TRAINED, *SAVED):
        run_stage(name, file, root)
    if options.save_path is not None:
        _save(Paths("export", file, root), Path(options.save_path))
    count = sum(_print_result(out / folder, name) for folder, name in NAMES.items())
    if count == 1:
        other = "without --distro" if options.distro else "with --distro"
        print(f"try: the same command {other} trains with the other optimizer")


def _print_result(root: Path, name: str) -> bool:
    """Print the loss and the traffic of a training, and return whether it has ended."""
    file = root / TRIAL_FILE
    if not file.is_file() or not (paths := Paths("train", file, root)).is_made("train"):
        return False
    metrics = paths.out("train") / METRICS
    losses = [row["loss"] for row in read_tsv(metrics / "loss.tsv")]
    last = losses[-max(1, len(losses) // LAST) :]
    sent = size(read_json(metrics / "train.json")["bytes_up"])
    loss = f"loss {sum(last) / len(last):.3f} after {len(losses):,} rounds"
    print(f"try: {name}: {loss}, {sent} sent in each; {metrics}")
    return True


def _share_downloads(out: Path, root: Path) -> None:
    store, link = out / "store", root / "data" / "store"
    store.mkdir(exist_ok=True)
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.relpath(store, link.parent), target_is_directory=True)


def _save(paths: Paths, target: Path) -> None:
    if (paths.out("export") / hf.REFUSED).exists():
        raise LockstepError(f"--save-path {target}: the audit refused {paths.out('export')}")
    files = shutil.ignore_patterns(Path(paths.keys.made("export")).name)
    part = target.with_name(f".{target.name}.part")  # what a kill leaves
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(paths.out("export"), part, ignore=files)
    part.rename(target)
    print(f"try: {target}")


# ---- The run file: one peer, as in Psyche ----


def run_of(flags: argparse.Namespace) -> runfile.Run:
    """Return the run that the flags describe."""
    try:
        return runfile.parse(_document(flags), "lockstep try")
    except LockstepError as error:
        raise LockstepError(_in_flags(str(error))) from None


def _in_flags(line: str) -> str:
    """Return an error of a run file with the flag in place of its key."""
    match = re.match(r"lockstep try: (?:\w+\.)*([\w\[\]]+) is (.+?), expected (.*)", line)
    flag = match and FLAG_OF.get(match[1], match[1].replace("_", "-"))
    is_flag = any(flag == f.name for f in flags.FLAGS)
    return f"--{flag} {match[2]}: expected {match[3]}" if match and is_flag else line


def _document(flags: argparse.Namespace) -> dict[str, Any]:
    location = _location(flags)
    devices = flags.data_parallelism
    if devices < 1:
        raise LockstepError(f"--data-parallelism {devices}: expected at least 1")
    workload = _workload(flags)
    hub = {"Hub": {"repo_id": _model(flags.model)}}
    return {
        "config": _config(flags),
        "workload": workload,
        "model": {
            "LLM": {
                "architecture": "HfAuto",
                "data_type": "Pretraining",
                "max_seq_len": flags.sequence_length,
                "cold_start_warmup_steps": 0,
                "checkpoint": "Ephemeral" if workload else hub,
                "data_location": location,
                "lr_schedule": _schedule(flags),
                "optimizer": _optimizer(flags),
            }
        },
        # token files stay where they are; Parquet files are made into some
        "download": {"stream": "Preprocessed" not in location},
        "peers": {
            "count": 1,
            "micro_batch": devices * min(flags.micro_batch, -(-flags.total_batch // devices)),
            "fsdp": devices,
            "overlap": 1 if flags.distro else 0,  # the order of Psyche's example
            **_attention(flags.attn_implementation),
        },
        "links": {"upload_mbps": FAST, "download_mbps": FAST, "latency_seconds": 0.0},
        # nobody else's work is to be audited: its record alone
        "witness": {"snapshot_every": flags.total_steps, "replay_percent": 0.0},
        # every file is trained on, as in Psyche; each sequence once, so the loss is of unseen text
        "held_out": {"sequences": 0},
        "runtime": {
            "checkpoint_every": 100,
            "carrier": "processes" if flags.python else "in_process",
        },
    }


def _config(flags: argparse.Namespace) -> dict[str, Any]:
    return {
        "warmup_time": 30,
        "cooldown_time": 10,
        "epoch_time": FOREVER,
        "max_round_train_time": FOREVER - 1,
        "round_witness_time": 1,
        "min_clients": 1,
        "init_min_clients": 1,
        "waiting_for_members_extra_time": 1,
        "verification_percent": 0,
        "witness_nodes": 1,
        "total_steps": flags.total_steps,
        "global_batch_size_start": flags.total_batch,
        "global_batch_size_end": flags.total_batch,
        "global_batch_size_warmup_tokens": 0,
    }


def _model(name: str) -> str:
    """Return a local folder as a path, which may be longer than a name on the hub."""
    return f"./{name}" if Path(name).is_dir() and not name.startswith(("/", ".", "~")) else name


def _workload(flags: argparse.Namespace) -> dict[str, Any]:
    """Return, with --python, a workload of transformers for a model that `models/` lacks."""
    folder = Path(flags.model)
    if not flags.python or not (folder / hf.CONFIG).is_file():
        return {}
    model_type = hf.read_config(folder).get("model_type")
    if model_type in models.MODELS:
        return {}
    return {"factory": CAUSAL_LM, "config": {"model": str(folder.absolute())}}


def _location(flags: argparse.Namespace) -> dict[str, Any]:
    size = {2: "TwoBytes", 4: "FourBytes"}[flags.token_size]
    shuffle: object = "DontShuffle"
    if flags.seed is not None:
        if not 0 <= flags.seed < 2**32:
            raise LockstepError(f"--seed {flags.seed}: expected a number from 0 to {2**32 - 1}")
        shuffle = {"Seeded": [*bytes(28), *flags.seed.to_bytes(4, "big")]}
    options = {"token_size_in_bytes": size, "shuffle": shuffle}
    if flags.data_provider == "local":
        if flags.data_url is not None:
            raise LockstepError(f"--data-url {flags.data_url}: expected --data-provider http too")
        folder = Path(flags.data_path)
        is_tokens = any(path.name.endswith(EXTENSIONS) for path in folder.glob("*"))
        if not is_tokens and any(folder.rglob("*.parquet")):
            return {"Preprocessed": flags.data_path}
        return {"Local": {"path": flags.data_path, **options}}
    if flags.data_url is None:
        raise LockstepError("--data-provider http: expected --data-url owner/name too")
    if flags.data_url.startswith(("http://", "https://")):
        return {"Http": {**options, "location": {"SingleUrl": flags.data_url}}}
    if "://" in flags.data_url:
        return {"Url": {"url": flags.data_url, **options}}
    return {"Hub": {"repo_id": flags.data_url, **options}}


def _schedule(flags: argparse.Namespace) -> dict[str, Any]:
    warmup = {
        "base_lr": flags.learning_rate,
        "warmup_init_lr": 0.0,
        "warmup_steps": flags.warmup_steps,
    }
    if flags.total_steps <= flags.warmup_steps:  # it ends within the warm-up
        return {"Constant": warmup}
    decay = {"total_steps": flags.total_steps, "final_lr": flags.learning_rate / 10}
    return {"Cosine": warmup | decay}


def _optimizer(flags: argparse.Namespace) -> dict[str, Any]:
    common = {"clip_grad_norm": flags.max_grad_norm, "weight_decay": flags.weight_decay}
    if not flags.distro:
        return {"AdamW": common | {"betas": [flags.beta1, flags.beta2], "eps": flags.eps}}
    return {
        "Distro": common
        | {
            "compression_decay": flags.compression_decay,
            "compression_chunk": flags.compression_chunk,
            "compression_topk": flags.compression_topk,
            "quantize_1bit": flags.distro_quantization,
        }
    }


def _attention(implementation: str | None) -> dict[str, str]:
    if implementation == "flash-attention2":
        return {"attention": "cudnn", "precision": "bfloat16", "scan_layers": True}
    return {}
