"""A run file's tables for tests, and what is said of them with a few values edited."""

import copy
import tomllib

import pytest

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.stage.keys import PROJECT

FIXTURES = PROJECT / "tests" / "fixtures"
OLDER = FIXTURES / "psyche_older_spelling.toml"  # a sample of Psyche's documentation, verbatim

BASE = tomllib.loads("""
[config]
warmup_time = 30
cooldown_time = 5
epoch_time = 60
max_round_train_time = 15
round_witness_time = 1
min_clients = 2
init_min_clients = 3
verification_percent = 0
witness_nodes = 1
global_batch_size_start = 4
global_batch_size_end = 8
global_batch_size_warmup_tokens = 1000
total_steps = 100
waiting_for_members_extra_time = 3

[model.LLM]
architecture = "HfLlama"
data_type = "Pretraining"
max_seq_len = 64
cold_start_warmup_steps = 0
data_location = "Dummy"

[model.LLM.checkpoint.Hub]
repo_id = "owner/name"

[model.LLM.lr_schedule.Cosine]
base_lr = 4.0e-4
warmup_steps = 25
warmup_init_lr = 0.0
total_steps = 100
final_lr = 4.0e-5

[model.LLM.optimizer.Distro]
clip_grad_norm = 1.0
compression_decay = 0.999
compression_chunk = 64
compression_topk = 8
quantize_1bit = true

[peers]
count = 4
""")
REMOVE = type("Remove", (), {"__repr__": lambda self: "REMOVE"})()
CONSILIENCE = tomllib.loads((FIXTURES / "psyche" / "consilience.toml").read_text())
SGD = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
LOCAL = {"inner_steps": 1, "inner": {"SGD": SGD}}
DISTRO = "model.LLM.optimizer.Distro"
DATA = "model.LLM.data_location"


def edited(*edits: tuple[str, object]) -> dict:
    """BASE with each value put at its dotted key, or removed from there."""
    document = copy.deepcopy(BASE)
    for key, value in edits:
        *tables, last = key.split(".")
        table = document
        for name in tables:
            table = table.setdefault(name, {})
        if value is REMOVE:
            del table[last]
        else:
            table[last] = value
    return document


def load(*edits: tuple[str, object]) -> runfile.Run:
    return runfile.parse(edited(*edits), "run.toml")


def complaint(*edits: tuple[str, object]) -> str:
    with pytest.raises(LockstepError) as caught:
        load(*edits)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message.removeprefix("run.toml: ")


def fault(**changed):
    return {"kind": "sign_flip", "peer": 2, "rounds": [20, 29]} | changed
