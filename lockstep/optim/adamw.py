"""AdamW in plain data parallelism: the baseline of all else."""

import jax
import jax.numpy as jnp
import optax

from lockstep.optim.aggregation.aggregate import EQUAL_MEAN, AggregateFn
from lockstep.optim.dense import dense
from lockstep.optim.expect import expect, expect_decay, expect_rates
from lockstep.optim.optimizer import Optimizer, Tree

LARGEST = 2.0**60  # of an element: an infinite second moment would stay so for ever


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_grad_norm: float | None = None,
    aggregate: AggregateFn = EQUAL_MEAN,
) -> Optimizer:
    """Return AdamW on the mean of all present peers' gradients.

    With the names of `dense`:

        m, v    = Adam's moments of g, bias-corrected
        d       = m / (sqrt(v) + eps)

    Args:
      learning_rate: A schedule of the step, counted from 1, or a constant.
      betas: Decay of the first and second moment.
      eps: Added to the root of the second moment.
      weight_decay: Decoupled weight decay, per unit of learning rate.
      clip_grad_norm: Largest global L2 norm of the mean gradient; None or 0 for no clipping.
      aggregate: Takes the place of the mean; see `dense`.

    References:
      Loshchilov, Hutter, Decoupled Weight Decay Regularization, https://arxiv.org/abs/1711.05101
    """
    moments = adam(betas, eps)
    return dense(
        learning_rate,
        moments,
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        aggregate=aggregate,
    )


def adam(betas: tuple[float, float], eps: float) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam`, its settings checked, of gradients whose squares are finite."""
    pair = "two numbers"
    expect("betas", betas, lambda x: isinstance(x, tuple | list) and len(x) == 2, pair)
    for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
        expect_decay(name, beta)
    expect_rates(eps=eps)
    moments = optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps)

    def update(
        grads: Tree, state: optax.OptState, params: Tree | None = None
    ) -> tuple[Tree, optax.OptState]:
        bounded = jax.tree.map(lambda g: jnp.clip(g, -LARGEST, LARGEST), grads)
        found: tuple[Tree, optax.OptState] = moments.update(bounded, state, params)
        return found

    return optax.GradientTransformation(moments.init, update)
