"""Handwritten digits of 8 x 8 pixels, by four peers that seldom talk: `python examples/digits.py`.

The images come with scikit-learn (`pip install scikit-learn`). With each optimizer peers take the
same local steps; what differs is how often they send, and how much.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

from lockstep import simulate

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("error: scikit-learn is not installed, expected it: pip install scikit-learn")

HIDDEN = 64


def init(seed: int) -> dict:
    """Return the params of two layers."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "hidden": {"w": jax.random.normal(first, (64, HIDDEN)) / 8, "b": jnp.zeros(HIDDEN)},
        "out": {"w": jax.random.normal(second, (HIDDEN, 10)) / 8, "b": jnp.zeros(10)},
    }


def logits(params: dict, image_BP: jax.Array) -> jax.Array:
    """Return what each digit gets, of images in rows."""
    hidden = jax.nn.relu(image_BP @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss(params: dict, batch: dict, rng: jax.Array | None) -> jax.Array:
    """Return the mean cross-entropy; nothing here is random."""
    del rng
    log_p = jax.nn.log_softmax(logits(params, batch["image"]))
    return -jnp.take_along_axis(log_p, batch["digit"][:, None], axis=1).mean()


def main(arguments: list[str] | None = None) -> None:
    """Train with three optimizers, and print what each reaches and sends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200, help="local steps of each peer")
    parser.add_argument("--inner-steps", type=int, default=20, help="of a round of DiLoCo")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a local step")
    chosen = parser.parse_args(arguments)

    images, digits = load_digits(return_X_y=True)
    data = {"image": (images / 16).astype(np.float32), "digit": digits.astype(np.int32)}
    order = np.random.default_rng(0).permutation(len(digits))
    train = {name: column[order[:1500]] for name, column in data.items()}
    test = {name: column[order[1500:]] for name, column in data.items()}

    optimizers = {  # and how many local steps a round has
        "AdamW": ("adamw", 1),
        "SPARTA": ({"SPARTA": {"share": 0.05}}, 1),
        "DiLoCo": ({"DiLoCo": {"inner_steps": chosen.inner_steps}}, chosen.inner_steps),
    }
    for name, (optimizer, local_steps) in optimizers.items():
        result = simulate(
            loss,
            init(seed=0),
            train,
            optimizer=optimizer,
            learning_rate=3e-3,
            peers=chosen.peers,
            steps=chosen.steps // local_steps,
            batch_size=chosen.batch_size,
            show_progress=False,
        )
        right = logits(result.params, test["image"]).argmax(axis=1) == test["digit"]
        sent = f"{result.bytes_per_peer:,.0f} bytes sent by a peer"
        print(f"{name:8} {right.mean():.1%} right, {sent}")


if __name__ == "__main__":
    main()
