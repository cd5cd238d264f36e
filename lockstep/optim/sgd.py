"""SGD in plain data parallelism; and, with momentum, what DiLoCo steps by once a round."""

import jax
import optax

from lockstep.optim.aggregation.aggregate import EQUAL_MEAN, AggregateFn
from lockstep.optim.dense import dense
from lockstep.optim.expect import expect, expect_decay, expect_flags
from lockstep.optim.optimizer import Optimizer


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip_grad_norm: float | None = None,
    aggregate: AggregateFn = EQUAL_MEAN,
) -> Optimizer:
    """Return SGD on the mean of all present peers' gradients.

    With the names of `dense`, and as PyTorch and optax have it:

        m  <- momentum * m + g
        d   = m, or with Nesterov's g + momentum * m

    Args:
      learning_rate: A schedule of the step, counted from 1, or a constant.
      momentum: Decay of m, in [0, 1); 0 keeps no m.
      nesterov: Whether the momentum is Nesterov's.
      weight_decay: Decoupled weight decay, per unit of learning rate.
      clip_grad_norm: Largest global L2 norm of the mean gradient; None or 0 for no clipping.
      aggregate: Takes the place of the mean; see `dense`.

    References:
      Sutskever et al., On the importance of initialization and momentum in deep learning,
        https://proceedings.mlr.press/v28/sutskever13.html
    """
    expect_decay("momentum", momentum)
    expect_flags(nesterov=nesterov)
    moves = isinstance(momentum, jax.core.Tracer) or bool(momentum)
    expect("nesterov", nesterov, lambda x: moves or not x, "false without momentum")
    direction = optax.trace(momentum, nesterov) if moves else optax.identity()
    return dense(
        learning_rate,
        direction,
        weight_decay=weight_decay,
        clip_grad_norm=clip_grad_norm,
        aggregate=aggregate,
    )
