"""AdamW in plain data parallelism: the baseline of all else."""

import optax

from pipeline.optim.dense import dense
from pipeline.optim.optimizer import Optimizer, Rate, Tree


def adamw(
    learning_rate: Rate,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
) -> Optimizer:
    """AdamW on the mean of all present peers' gradients, in the words of `dense`:

        m, v    = Adam's moments of g, bias-corrected
        d       = m / (sqrt(v) + eps)

    Args:
      learning_rate: of a step, the first is 1; or a number.
      betas: decay of the first and second moment.
      eps: added to the root of the second moment.
      weight_decay: decoupled, per unit of learning rate.
      clip_grad_norm: largest global L2 norm of the mean gradient; None or 0 for no clipping.

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101
    """
    moments = optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)

    def init(params: Tree) -> Tree:
        return moments.init(params)._asdict()

    def direct(grads: Tree, state: Tree) -> tuple[Tree, Tree]:
        direction, after = moments.update(grads, optax.ScaleByAdamState(**state))
        return direction, after._asdict()

    return dense(
        learning_rate, init, direct, weight_decay=weight_decay, clip_grad_norm=clip_grad_norm
    )
