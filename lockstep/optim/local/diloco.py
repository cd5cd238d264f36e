"""DiLoCo: peers take many AdamW steps by themselves, and then one together, with momentum."""

import optax

from lockstep.optim.aggregation.aggregate import AggregateFn, mean
from lockstep.optim.local.local_steps import local_steps
from lockstep.optim.optimizer import Optimizer
from lockstep.optim.sgd import sgd


def diloco(inner: Optimizer, outer: Optimizer, *, inner_steps: int) -> Optimizer:
    """Return DiLoCo: the mean pseudogradient of the peers is the gradient of SGD with momentum.

    With the names of `local_steps` and `outer_sgd`, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        D       = mean over peers of theta - theta_p
        m      <- momentum * m + D
        theta  <- theta - learning_rate * (D + momentum * m)        with Nesterov's
        theta  <- theta - learning_rate * m                         without

    A message is the pseudogradient theta - theta_p in float32, 4 bytes per parameter, or as a
    quantizer rounds it, from each peer, each round.

    Args:
      inner: Takes the local steps: AdamW in DiLoCo, Muon in MuLoCo.
      outer: Takes the step of a round: `outer_sgd`, or that in `quantized`.
      inner_steps: Local steps of a round; DiLoCo's 500.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models,
        https://arxiv.org/abs/2311.08105
      Therien et al., MuLoCo: Muon is a practical inner optimizer for DiLoCo,
        https://arxiv.org/abs/2505.23725
    """
    return local_steps(inner, outer, inner_steps)


def outer_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    aggregate: AggregateFn = mean,
) -> Optimizer:
    """Return SGD on the mean pseudogradient, where peers count by the sequences they were assigned.

    Args:
      learning_rate: A schedule of the round, counted from 1, or a constant; 0.7 in DiLoCo.
      momentum: Decay of the momentum per outer step, in [0, 1); 0.9 in DiLoCo, 0 keeps none.
      nesterov: Whether the momentum is Nesterov's, as in DiLoCo.
      aggregate: Takes the place of the mean.
    """
    return sgd(learning_rate, momentum=momentum, nesterov=nesterov, aggregate=aggregate)
