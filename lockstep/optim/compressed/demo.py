"""DeMo as an optax transform: for anyone's jitted step, without the rest of this project."""

import jax.numpy as jnp
import optax

from lockstep.optim.compressed.compressor import Compressor
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.expect import expect_counts
from lockstep.optim.transform import Exchange, as_transform


def demo(
    learning_rate: optax.ScalarOrSchedule,
    compression_decay: float,
    compression_topk: int,
    compression_chunk: int,
    weight_decay: float,
    exchange: Exchange,
) -> optax.GradientTransformation:
    """Return decoupled momentum optimization, as the reference of the paper's authors has it.

    With peers p, learning rate lr and D the inverse of the chunked DCT:

        theta   <- theta * (1 - lr * weight_decay)
        delta_p <- compression_decay * delta_p + lr * g_p
        q_p      = top-k by magnitude of DCT(delta_p), per block
        delta_p <- delta_p - D(q_p)
        theta   <- theta - lr * sign(D(mean over the peers that sent a coefficient, of q_p))

    Values are sent in float32; `distro` can round them, or send their signs only. The state differs
    between peers, the updates are the same for all. With `optax.inject_hyperparams`, name as static
    what is not a number to be changed:
    `static_args=("compression_topk", "compression_chunk", "exchange")`.

    Args:
      learning_rate: A schedule of the step, counted from 1, or a constant.
      compression_decay: Decay of delta per step; the paper's 0.999.
      compression_topk: Coefficients sent of each block; the paper's 32.
      compression_chunk: The longest side of a block; the paper's 64.
      weight_decay: Decoupled weight decay, per unit of learning rate.
      exchange: exchange(message, step) -> sent, received, such as `optimizer.all_gather("peer")`
        under `vmap(axis_name="peer")` or `shard_map`, or `optimizer.alone`; see `as_transform`.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
    """
    expect_counts(compression_topk=compression_topk, compression_chunk=compression_chunk)
    compressor = Compressor(compression_topk, compression_chunk, False, jnp.float32)
    momentum = CompressedMomentum(learning_rate, compressor, compression_decay, weight_decay)
    return as_transform(distro(momentum), exchange)
