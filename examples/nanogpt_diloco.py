"""A Llama on the characters of a text, with DiLoCo.

    python examples/nanogpt_diloco.py --dataset shakespeare
    python examples/nanogpt_diloco.py --text FILE

The first downloads the text from the Hugging Face hub (1 MB, once, into data/shakespeare). Peers
draw windows of all of it but the last tenth, which measures them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from lockstep import LockstepError, models, simulate

DATASETS = {  # repository, commit, file
    "shakespeare": (
        "Trelis/tiny-shakespeare",
        "2225a5674b252d623cfb151ef099d179629c2f49",
        "input.txt",
    ),
}
SIZES = {"small": (4, 4, 128), "sbase": (8, 8, 512), "base": (12, 12, 768)}  # layers, heads, width


@dataclass(frozen=True)
class Windows:
    """Every window of a text as a dataset, none of which is copied before it is asked for."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        return len(self.tokens) - self.length

    def __getitem__(self, first: int) -> np.ndarray:
        return self.tokens[first : first + self.length + 1]


def download(dataset: str) -> Path:
    """Return the file of a dataset, fetched unless it was before.

    Raises:
      LockstepError: the hub cannot be reached, or does not have it.
    """
    repo, commit, name = DATASETS[dataset]
    try:
        file = hf_hub_download(
            repo, name, repo_type="dataset", revision=commit, local_dir=f"data/{dataset}"
        )
    except (HfHubHTTPError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise LockstepError(f"{repo}: {why}; expected {name}, or a --text of yours") from error
    return Path(file)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the chosen text, model and training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--dataset", choices=DATASETS)
    text.add_argument("--text", type=Path)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--block-size", type=int, default=128, help="characters of a window")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--inner-steps", type=int, default=20, help="local steps of a round")
    parser.add_argument("--batch-size", type=int, default=8, help="windows of a local step")
    parser.add_argument("--eval-windows", type=int, default=256, help="at most, of the last tenth")
    parser.add_argument("--lr", type=float, default=1e-3, help="of the local steps")
    parser.add_argument("--outer-lr", type=float, default=0.7)
    parser.add_argument("--logs", type=Path, default=Path("logs/nanogpt_diloco"))
    parser.add_argument("--checkpoints", type=Path, help="where a killed run goes on from")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train, and write the curves."""
    chosen = parse(arguments)
    text = (chosen.text or download(chosen.dataset)).read_text(encoding="utf-8")
    vocabulary = sorted(set(text))
    number = {character: place for place, character in enumerate(vocabulary)}
    tokens = np.array([number[character] for character in text], np.int32)
    train, held_out = np.split(tokens, [len(tokens) * 9 // 10])

    layers, heads, width = SIZES[chosen.size]
    llama = models.get("llama")
    config = llama.Config.from_hf(
        {
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "hidden_size": width,
            "intermediate_size": 4 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": chosen.block_size,
            "tie_word_embeddings": False,
        }
    )

    def loss(params: dict, tokens_BT: jax.Array, rng: jax.Array | None) -> jax.Array:
        del rng
        logits = llama.apply(config, params, tokens_BT[:, :-1], scan=False, dtype=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()

    outer = {"inner_steps": chosen.inner_steps, "outer_learning_rate": chosen.outer_lr}
    outer |= {"outer_momentum": 0.9}  # as in EXO Gym and the paper
    rows = held_out[: len(held_out) // chosen.block_size * chosen.block_size]
    result = simulate(
        loss,
        llama.init(config, seed=0),
        Windows(train, chosen.block_size),
        rows.reshape(-1, chosen.block_size)[: chosen.eval_windows],
        optimizer={"DiLoCo": outer},
        learning_rate=optax.cosine_decay_schedule(chosen.lr, chosen.rounds, alpha=0.1),
        peers=chosen.peers,
        steps=chosen.rounds,
        batch_size=chosen.batch_size,
        eval_every=5,
        log_dir=chosen.logs,
        checkpoint_dir=chosen.checkpoints,
    )
    result.plot(chosen.logs / "curves.png")
    before, *_, after = result.validation["loss"]
    print(f"held-out loss {before:.2f} -> {after:.2f} nats per character")
    print(f"{result.bytes_per_peer / 1e6:.1f} MB sent by each peer")
    print(f"curves: {chosen.logs}")


if __name__ == "__main__":
    try:
        main()
    except LockstepError as error:
        sys.exit(f"error: {error}")
