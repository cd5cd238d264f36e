"""The models that benchmarks train, and the default run with one of them in its place."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import tomlkit

from lockstep.methods import CARDS
from pipeline import runfile
from pipeline.runfile.derived_run import tables_like, with_tokens


class Size(NamedTuple):
    """A Llama, and what a peer is given of it in a round: `batch` sequences of `length` tokens."""

    width: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    length: int
    batch: int

    @property
    def config(self) -> dict[str, int]:
        """The sizes as a config.json has them."""
        return {
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.length,
        }

    @property
    def flop_per_token(self) -> int:
        """FLOP of a forward and backward pass: 6 for each param of a matrix that multiplies, and
        6 * layers * length * width for causal attention; embedding lookups are free."""
        block = 4 * self.width * self.width + 3 * self.width * self.inner
        matrices = self.layers * block + self.width * self.vocabulary
        return 6 * matrices + 6 * self.layers * self.length * self.width


SIZES = {
    "toy": Size(16, 32, 1, 2, 320, 32, 2),
    "0.9M": Size(128, 352, 4, 4, 512, 128, 4),
    "2M": Size(128, 352, 4, 4, 4096, 256, 4),
    "5M": Size(256, 640, 4, 4, 4096, 256, 4),
    "30M": Size(512, 1408, 8, 8, 4096, 256, 4),
    "35M": Size(512, 1408, 8, 8, 8192, 256, 4),
    "124M": Size(768, 2048, 12, 12, 50304, 1024, 16),
    "134M": Size(768, 2048, 12, 12, 32000, 256, 4),
    "350M": Size(1024, 2816, 22, 16, 32000, 1024, 16),
    "1B": Size(2048, 5632, 18, 16, 32000, 2048, 4),
}


def document(size: Size, peers: int = 4) -> dict:
    """The default run file with another model, and `peers` that each take a whole batch of it."""
    run = default()
    llm, total = run["model"]["LLM"], peers * size.batch
    llm["max_seq_len"] = size.length
    llm["checkpoint"]["Init"]["config"] |= size.config
    run["config"] |= {"global_batch_size_start": total, "global_batch_size_end": total}
    if peers != run["peers"]["count"]:
        run["config"] |= {"min_clients": 1, "init_min_clients": 1, "witness_nodes": 1}
    run["peers"] |= {"count": peers, "micro_batch": size.batch}
    return run


def default() -> dict:
    """The default run file, as compiled."""
    run = tomlkit.parse(Path("params/run.toml").read_text(encoding="utf-8")).unwrap()
    run["peers"] |= {"bits": "machine", "product_bits": 20}
    return run


def load(run: dict) -> runfile.Run:
    """The run of a document, as if it were read from a file."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(tomlkit.dumps(run))
        file.flush()
        return runfile.load(Path(file.name))


def document_of(size: str, name: str, rounds: int) -> dict:
    """The tables of a run by another optimizer of `CARDS`, at the rate stated for it.

    Each round has as many tokens for each local step as the size says.
    """
    card = CARDS[name]
    base = load(document(SIZES[size]))
    tokens = base.config.global_batch_size_end * base.llm.max_seq_len
    tables, _ = tables_like(with_tokens(base, rounds * card.local_steps * tokens), card, None)
    tables["held_out"]["every"] = max(1, rounds // 10)
    tables["witness"]["snapshot_every"] = rounds  # nobody audits: fewer snapshots, less disk
    return tables
