"""Federated averaging: peers train by themselves for a while, and then take the mean."""

from lockstep.optim.aggregation.aggregate import AggregateFn, mean
from lockstep.optim.local.diloco import outer_sgd
from lockstep.optim.local.local_steps import local_steps
from lockstep.optim.optimizer import Optimizer


def fedavg(inner: Optimizer, *, inner_steps: int, aggregate: AggregateFn = mean) -> Optimizer:
    """Return federated averaging: the params become the mean of all peers' local ones.

    With the names of `local_steps`, in each round:

        inner_steps times    theta_p <- the inner optimizer's step from theta_p, on g_p at theta_p
        theta  <- mean over peers of theta_p

    A message is theta - theta_p in float32: 4 bytes per parameter, from each peer, each round.
    Peers count by the sequences that they were assigned; absent ones do not.

    Args:
      inner: Takes the local steps; in the paper SGD without momentum.
      inner_steps: Local steps of a round.
      aggregate: Takes the place of the mean.

    References:
      McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
        https://arxiv.org/abs/1602.05629
    """
    return local_steps(inner, outer_sgd(1.0, aggregate=aggregate), inner_steps)
