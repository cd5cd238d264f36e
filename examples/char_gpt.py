"""A character GPT in plain JAX, on this project's own source: `python examples/char_gpt.py`.

Four peers train it with DiLoCo over links of 10 Mbit/s, and at the end it writes some Python. Needs
no network, and less than a minute on 2 cores. Shapes in names: B sequences, T characters, D width,
H heads, V characters of the vocabulary.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lockstep import simulate

HEADS = 4


def init(key: jax.Array, vocabulary: int, length: int, width: int, layers: int) -> dict:
    """Return the params: embeddings, and each layer's matrices stacked."""

    def normal(*shape: int) -> jax.Array:
        nonlocal key
        key, now = jax.random.split(key)
        return 0.05 * jax.random.normal(now, shape)

    return {
        "embed": normal(vocabulary, width),
        "position": normal(length, width),
        "layers": {
            "qkv": normal(layers, width, 3 * width),
            "out": normal(layers, width, width),
            "up": normal(layers, width, 4 * width),
            "down": normal(layers, 4 * width, width),
        },
    }


def logits(params: dict, tokens_BT: jax.Array) -> jax.Array:
    """Return what each character gets as the next one, at every place: [B, T, V]."""
    B, T = tokens_BT.shape
    x_BTD = params["embed"][tokens_BT] + params["position"][:T]
    seen_TT = jnp.tril(jnp.ones((T, T), bool))

    def layer(x_BTD: jax.Array, w: dict) -> tuple[jax.Array, None]:
        qkv = (norm(x_BTD) @ w["qkv"]).reshape(B, T, 3, HEADS, -1)
        q, k, v = (qkv[:, :, part] for part in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=seen_TT[None, None])
        x_BTD += mixed.reshape(B, T, -1) @ w["out"]
        return x_BTD + jax.nn.gelu(norm(x_BTD) @ w["up"]) @ w["down"], None

    x_BTD, _ = jax.lax.scan(layer, x_BTD, params["layers"])
    return norm(x_BTD) @ params["embed"].T


def norm(x_BTD: jax.Array) -> jax.Array:
    """Return x with a root mean square of 1."""
    return x_BTD * jax.lax.rsqrt((x_BTD**2).mean(axis=-1, keepdims=True) + 1e-6)


def loss(params: dict, tokens_BT: jax.Array, rng: jax.Array | None) -> jax.Array:
    """Return the mean cross-entropy of each character, given those before it."""
    del rng
    scores = logits(params, tokens_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(scores, tokens_BT[:, 1:]).mean()


def write(params: dict, start: list[int], count: int, length: int) -> list[int]:
    """Return `start`, continued by `count` characters drawn one by one."""
    text, draw = list(start), np.random.default_rng(0)
    predict = jax.jit(logits)
    for _ in range(count):
        seen = text[-length:]
        padded = jnp.array([seen + [0] * (length - len(seen))])
        scores = np.asarray(predict(params, padded)[0, len(seen) - 1], np.float64) / 0.8
        p = np.exp(scores - scores.max())
        text.append(int(draw.choice(len(p), p=p / p.sum())))
    return text


def main(arguments: list[str] | None = None) -> None:
    """Train, then print the losses, the bytes, and what the model writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "pipeline")
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--inner-steps", type=int, default=10, help="of a round")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a local step")
    parser.add_argument("--length", type=int, default=64, help="characters of a sequence")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--write", type=int, default=300, help="characters in the end")
    chosen = parser.parse_args(arguments)

    files = sorted(chosen.text.rglob("*.py")) if chosen.text.is_dir() else [chosen.text]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    vocabulary = sorted(set(text))
    number = {character: place for place, character in enumerate(vocabulary)}
    tokens = np.array([number[character] for character in text], np.int32)
    rows = tokens[: len(tokens) // (chosen.length + 1) * (chosen.length + 1)]
    rows = rows.reshape(-1, chosen.length + 1)
    held_out = max(1, len(rows) // 20)

    inner = {"betas": [0.9, 0.95], "weight_decay": 0.1, "clip_grad_norm": 1.0}
    result = simulate(
        loss,
        init(jax.random.key(0), len(vocabulary), chosen.length, chosen.width, chosen.layers),
        rows[:-held_out],
        rows[-held_out:],
        optimizer={"DiLoCo": {"inner_steps": chosen.inner_steps, "inner": {"AdamW": inner}}},
        learning_rate=3e-3,
        peers=chosen.peers,
        steps=chosen.rounds,
        batch_size=chosen.batch_size,
        links={"upload_mbps": 10, "download_mbps": 10, "latency_seconds": 0.05},
    )
    before, *_, after = result.validation["loss"]
    print(f"held-out loss {before:.2f} -> {after:.2f} nats per character")
    print(f"{result.bytes_per_peer / 1e6:.1f} MB sent by each peer")
    start = [number[character] for character in "def " if character in number]
    print("".join(vocabulary[i] for i in write(result.params, start, chosen.write, chosen.length)))


if __name__ == "__main__":
    main()
