"""DeMo as an optax transform: for anyone's jitted step, without the rest of this project."""

import optax

from pipeline.optim.distro import distro
from pipeline.optim.optimizer import Exchange, Rate, as_transform


def demo(
    learning_rate: Rate,
    compression_decay: float,
    compression_topk: int,
    compression_chunk: int,
    weight_decay: float,
    exchange: Exchange,
) -> optax.GradientTransformation:
    """Decoupled momentum optimization, step for step as the reference of the paper's authors.

    With peers p, learning rate lr and D the inverse of the chunked DCT:

        theta   <- theta * (1 - lr * weight_decay)
        delta_p <- compression_decay * delta_p + lr * g_p
        q_p      = top-k by magnitude of DCT(delta_p), per block
        delta_p <- delta_p - D(q_p)
        theta   <- theta - lr * sign(D(mean over the peers that sent a coefficient, of q_p))

    Values travel whole; `distro` with `quantize_1bit` sends their signs. The state differs between
    peers, the updates are the same for all. With `optax.inject_hyperparams`, name as static what is
    no number to be changed: `static_args=("compression_topk", "compression_chunk", "exchange")`.

    Args:
      learning_rate: of a step, the first is 1; or a number.
      compression_decay: of delta, per step; the paper's 0.999.
      compression_topk: coefficients sent of each block; the paper's 32.
      compression_chunk: the longest side of a block; the paper's 64.
      weight_decay: decoupled, per unit of learning rate.
      exchange: `exchange(message, step) -> sent, received`, as `swarm.exchange.all_gather("peer")`
        under `vmap(axis_name="peer")` or `shard_map`.

    References:
      Peng, Quesnelle, Kingma, DeMo: Decoupled Momentum Optimization, https://arxiv.org/abs/2411.19870
    """
    optimizer = distro(
        learning_rate,
        compression_decay=compression_decay,
        compression_topk=compression_topk,
        compression_chunk=compression_chunk,
        quantize_1bit=False,
        weight_decay=weight_decay,
    )
    return as_transform(optimizer, exchange)
