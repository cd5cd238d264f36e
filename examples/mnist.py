"""MNIST by a convolutional network, with three optimizers: `python examples/mnist.py`.

Downloads MNIST once (12 MB, into data/mnist), or reads its four files, packed or not, from a
`--folder`. The model is a Flax module with dropout; any other library that gives a function of
params would do. Writes each optimizer's curves to `--logs`, and draws them, in a few minutes.
"""

import argparse
import gzip
import hashlib
import math
import sys
import zlib
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from lockstep import LockstepError, simulate

URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
FILES = {  # name -> MD5
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
MOST = 20_000_000  # bytes of a file


class Network2D(nnx.Module):
    """Two convolutions, each halving the picture, and two layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.hidden = nnx.Linear(7 * 7 * 32, 128, rngs=rngs)
        self.out = nnx.Linear(128, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.25)

    def __call__(self, image_BHW: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """Return logits; without `rngs`, nothing is dropped."""
        x = image_BHW[..., None].astype(jnp.float32) / 255
        for convolution in (self.first, self.second):
            x = nnx.max_pool(nnx.relu(convolution(x)), (2, 2), strides=(2, 2))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.out(self.dropout(x, deterministic=rngs is None, rngs=rngs))


def read(folder: Path | None) -> tuple[dict, dict]:
    """Return the examples for training and testing, from a folder or from the web.

    Raises:
      LockstepError: a file is missing, or not what it should be.
    """
    if folder is None:
        paths = [download(name, md5) for name, md5 in FILES.items()]
    else:
        paths = [folder / name for name in FILES]
        paths = [path if path.exists() else path.with_suffix("") for path in paths]
    images, labels, test_images, test_labels = map(read_idx, paths)
    return {"image": images, "digit": labels}, {"image": test_images, "digit": test_labels}


def download(name: str, md5: str) -> Path:
    """Return a file of MNIST, fetched unless it was before.

    Raises:
      LockstepError: it cannot be fetched, or is another one.
    """
    path = Path("data/mnist") / name
    if not path.exists():
        try:
            with urlopen(URL + name, timeout=60) as answer:
                content = answer.read(MOST)
        except (OSError, HTTPException) as error:
            raise LockstepError(
                f"{URL}{name}: {error}; expected MNIST, or its files in a --folder"
            ) from error
        found = hashlib.md5(content).hexdigest()
        if found != md5:
            raise LockstepError(f"{URL}{name}: its MD5 is {found}, expected {md5}")
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".part")
        aside.write_bytes(content)
        aside.replace(path)  # a killed download leaves no half
    return path


def read_idx(path: Path) -> np.ndarray:
    """Return the bytes of an IDX file, in its shape.

    Raises:
      LockstepError: it is missing, or not an IDX file of bytes.
    """
    if not path.is_file():
        raise LockstepError(f"{path}: not there, expected a file of MNIST")
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, OSError, zlib.error) as error:
        raise LockstepError(f"{path}: damaged: {error}; expected a file of MNIST") from error
    axes = content[3] if content[:3] == b"\0\0\x08" and len(content) > 3 else 0
    shape = [int.from_bytes(content[4 * axis : 4 * axis + 4]) for axis in range(1, axes + 1)]
    start = 4 + 4 * axes
    if not axes or len(content) != start + math.prod(shape):
        raise LockstepError(f"{path}: not an IDX file of bytes, expected a file of MNIST")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def main(arguments: list[str] | None = None) -> None:
    """Train with each optimizer, and print what it reaches and sends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where MNIST's files are")
    parser.add_argument("--logs", type=Path, default=Path("logs/mnist"))
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=160, help="local steps of each peer")
    parser.add_argument("--inner-steps", type=int, default=20, help="of a round of DiLoCo")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a local step")
    parser.add_argument("--test-size", type=int, default=1000, help="images that measure the loss")
    names = ("adamw", "sparta", "diloco")
    parser.add_argument("--optimizers", nargs="+", choices=names, default=names)
    chosen = parser.parse_args(arguments)

    train, test = read(chosen.folder)
    test = {name: column[: chosen.test_size] for name, column in test.items()}
    model, params = nnx.split(Network2D(nnx.Rngs(0)), nnx.Param)

    def loss(params: nnx.State, batch: dict, rng: jax.Array | None) -> jax.Array:
        rngs = None if rng is None else nnx.Rngs(dropout=rng)  # none where it is measured
        scores = nnx.merge(model, params)(batch["image"], rngs)
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["digit"]).mean()

    for name in chosen.optimizers:
        local_steps = chosen.inner_steps if name == "diloco" else 1
        settings = {"diloco": {"inner_steps": local_steps}, "sparta": {"share": 0.005}}
        rounds = max(1, chosen.steps // local_steps)
        result = simulate(
            loss,
            params,
            train,
            test,
            optimizer={name: settings.get(name, {})},
            learning_rate=1e-3,
            peers=chosen.peers,
            steps=rounds,
            batch_size=chosen.batch_size,
            eval_every=max(1, rounds // 8),
            log_dir=chosen.logs / name,
        )
        result.plot(chosen.logs / f"{name}.png")
        loss_after = result.validation["loss"][-1]
        print(f"{name}: loss {loss_after:.4f}, {result.bytes_per_peer:,.0f} bytes sent by a peer")


if __name__ == "__main__":
    try:
        main()
    except LockstepError as error:
        sys.exit(f"error: {error}")
