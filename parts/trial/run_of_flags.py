"""The run of `lockstep try`: a run file made of the flags, with one peer, as in Psyche."""

import argparse
import re
from pathlib import Path
from typing import Any

import models
from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.sources.token_files.listing import EXTENSIONS
from pipeline.weights import hf

FLAG_OF = {  # each key of the run file that a flag alone decides
    "total_steps": "total-steps",
    "global_batch_size_start": "total-batch",
    "max_seq_len": "sequence-length",
    "repo_id": "model",
    "base_lr": "learning-rate",
    "warmup_steps": "warmup-steps",
    "clip_grad_norm": "max-grad-norm",
    "weight_decay": "weight-decay",
    "betas[0]": "beta1",
    "betas[1]": "beta2",
    "eps": "eps",
    "compression_decay": "compression-decay",
    "compression_chunk": "compression-chunk",
    "compression_topk": "compression-topk",
    "micro_batch": "micro-batch",
}
CAUSAL_LM = "hf_causal_lm:CausalLM"  # in workloads/: any AutoModelForCausalLM
FAST = 1e6  # megabits per second: a lone peer waits for nobody
FOREVER = 10**9  # seconds of an epoch: the run is one


def run_of(flags: argparse.Namespace) -> runfile.Run:
    """Return the run that the flags describe.

    Raises:
      LockstepError: They do not describe a run.
    """
    try:
        return runfile.parse(_document(flags), "lockstep try")
    except LockstepError as error:
        raise LockstepError(_in_flags(str(error))) from None


def _in_flags(line: str) -> str:
    """Return an error of a run file with the flag in place of the key that was made of it."""
    match = re.match(r"lockstep try: (?:\w+\.)*([\w\[\]]+) is (.+?), expected (.*)", line)
    flag = match and FLAG_OF.get(match[1])
    return f"--{flag} {match[2]}: expected {match[3]}" if match and flag else line


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
    """A folder of this machine by a path, which may be longer than a name on the hub."""
    return f"./{name}" if Path(name).is_dir() and not name.startswith(("/", ".", "~")) else name


def _workload(flags: argparse.Namespace) -> dict[str, Any]:
    """With --python, a model that `models/` does not have is one of transformers, in a worker."""
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
    how = {"token_size_in_bytes": size, "shuffle": shuffle}
    if flags.data_provider == "local":
        if flags.data_url is not None:
            raise LockstepError(f"--data-url {flags.data_url}: expected --data-provider http too")
        folder = Path(flags.data_path)
        is_tokens = any(path.name.endswith(EXTENSIONS) for path in folder.glob("*"))
        if not is_tokens and any(folder.rglob("*.parquet")):
            return {"Preprocessed": flags.data_path}
        return {"Local": {"path": flags.data_path, **how}}
    if flags.data_url is None:
        raise LockstepError("--data-provider http: expected --data-url owner/name too")
    if flags.data_url.startswith(("http://", "https://")):
        return {"Http": {**how, "location": {"SingleUrl": flags.data_url}}}
    if "://" in flags.data_url:
        return {"Url": {"url": flags.data_url, **how}}
    return {"Hub": {"repo_id": flags.data_url, **how}}


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
        return {"attention": "cudnn", "precision": "bfloat16"}
    return {}
