"""Two rounds of a peer with `bits = "everywhere"`, of each model and optimizer; a hash of each.

As a program it prints lines of a case's name and the hash of its losses, messages and states.
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from lockstep.methods import CARDS
from lockstep.programs.train_step import Programs
from pipeline import runfile
from pipeline.language_model.language_model import programs_of
from pipeline.runfile.derived_run import tables_like
from tests import tiny

LLAMA = tiny.MODEL | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 40}
DEEPSEEK = tiny.DEEPSEEK | LLAMA | {"model_type": "deepseek_v3", "num_key_value_heads": 2}
GROUPS = ("n_group", "topk_group")
MODELS = {
    **{name: LLAMA | {"model_type": name} for name in ("llama", "mistral", "qwen2", "qwen3")},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v2": {name: DEEPSEEK[name] for name in DEEPSEEK if name not in GROUPS}
    | {"model_type": "deepseek_v2"},
}
PEERS = {
    "llama in 8 bits": {"product_bits": 8},
    "llama in bfloat16": {"precision": "bfloat16"},
    "llama scanned": {"scan_layers": True, "remat": "nothing_saveable"},
    "llama in micro-batches": {"micro_batch": 1},
}
LENGTH, ROUNDS = 48, 2


def run_of(name: str) -> runfile.Run:
    """Return the run of a case."""
    word = name.split()[0]
    model = MODELS.get(word, LLAMA)
    checkpoint = {"Init": {"seed": 0, "config": model | {"max_position_embeddings": LENGTH}}}
    document = tiny.run_document(
        Path(tempfile.gettempdir()), model__LLM__checkpoint=checkpoint, config__total_steps=200
    )
    document["model"]["LLM"]["max_seq_len"] = LENGTH
    document["peers"].update({"bits": "everywhere"} | PEERS.get(name, {}))
    run = runfile.parse(document.unwrap(), name)
    if word not in CARDS:
        return run
    return runfile.parse(tables_like(run, CARDS[word], None)[0], name)


def cases() -> list[str]:
    """Return the names of all cases: models, ways to compute one, optimizers."""
    return [*MODELS, *PEERS, *CARDS]


def hash_of(name: str) -> str:
    """Return the hash of what a peer of a case computes."""
    run = run_of(name)
    programs = programs_of(run, run.llm.checkpoint.config)
    results = rounds(programs, run)
    content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results))
    return hashlib.sha256(content).hexdigest()


def rounds(programs: Programs, run: runfile.Run) -> list:
    """Return what a peer computes in some rounds, of weights and rows that NumPy draws."""
    draw, vocabulary = np.random.default_rng(0), run.llm.checkpoint.config["vocab_size"]
    params = jax.tree.map(
        lambda x: (0.05 * draw.standard_normal(x.shape)).astype(x.dtype), programs.task.shapes
    )
    own, shared = programs.init(params)
    count = (run.rows_of_a_step or 4) * programs.optimizer.inner_steps
    results = []
    for step in range(1, ROUNDS + 1):
        rows = draw.integers(vocabulary, size=(count, LENGTH), dtype=np.int32)
        work = programs.work(rows, count, run.peers.micro_batch)
        taken = programs.peer_step(
            params, own, shared, work.rows_MB, np.int32(count), np.int32(step)
        )
        own = taken.own
        results.append(jax.device_get(taken))
        results.append(jax.device_get(programs.steps.measure(params, rows[:2])))
    return results


def main(names: list[str]) -> None:
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    for name in names or cases():
        print(name, hash_of(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
