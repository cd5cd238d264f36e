"""Aggregates that judge a peer by all that it sent of a parameter: its norm, or its distances.

Norms and distances are L2, of one parameter; in `multi_krum` of all of them.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pipeline.optim.aggregation.aggregate import AggregateFn, mean
from pipeline.optim.aggregation.by_element import is_sent, median, middle
from pipeline.optim.optimizer import KeyPath, Tree, group_of

CLIPS = 3  # of `centered_clip`, each from where the one before led
NO_DIRECTION = 1e-6  # largest length of a mean of unit vectors that is rounding only
AVERAGED = "embed"  # the group whose rows few peers share: its directions are not orthogonal


def norm_clip(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean of values whose norms are clipped to the median of the peers' norms.

        mean of x_p * min(1, median(||x||) / ||x_p||)

    A liar's pull is bounded, not its direction.

    References:
      Sun et al., Can You Really Backdoor Federated Learning?, https://arxiv.org/abs/1911.07963
    """

    def of_leaf(x: jax.Array) -> jax.Array:
        sent_P = is_sent(x, weight)
        x = jnp.where(sent_P, x, 0.0)
        norm_P = _norms(x)
        return _scaled(x, _at_most(norm_P, middle(norm_P, _is_there(sent_P))))

    return mean(jax.tree.map(of_leaf, values), weight)


def centered_clip(values: Tree, weight: jax.Array) -> Tree:
    """Return the point that peers' clipped differences from it lead to, from their median.

        v <- v + mean of (x_p - v) * min(1, r / ||x_p - v||)        3 times

    with r the median of the peers' distances from v. In the paper v begins at the last round's, and
    r is a constant.

    References:
      Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization,
        https://arxiv.org/abs/2012.10333
    """

    def off(x: jax.Array, v: jax.Array) -> jax.Array:
        sent_P = is_sent(x, weight)
        apart = jnp.where(sent_P, x - v, 0.0)
        norm_P = _norms(apart)
        return _scaled(apart, _at_most(norm_P, middle(norm_P, _is_there(sent_P))))

    centre = median(values, weight)
    for _ in range(CLIPS):
        moves = mean(jax.tree.map(off, values, centre), weight)
        centre = jax.tree.map(jnp.add, centre, moves)
    return centre


def multi_krum(liars: int) -> AggregateFn:
    """Return the mean of the peers that are closest to their neighbours: all but `liars`.

    A peer's score is the sum of its squared distances from the n - liars - 2 peers closest to it,
    of n that are present; the n - liars peers with the lowest scores count.

    References:
      Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
        https://arxiv.org/abs/1703.02757
    """

    def of_tree(values: Tree, weight: jax.Array) -> Tree:
        there_P = _is_there(weight)
        count, peers = jnp.sum(there_P), jnp.arange(len(weight))
        apart_PP = sum(_apart(x, is_sent(x, weight)) for x in jax.tree.leaves(values))
        others_PP = there_P[:, None] & there_P[None, :] & (peers[:, None] != peers[None, :])
        near_PP = jnp.sort(jnp.where(others_PP, apart_PP, jnp.inf), axis=1)
        counted_PP = (peers < jnp.maximum(count - liars - 2, 1)) & jnp.isfinite(near_PP)
        score_P = jnp.sum(jnp.where(counted_PP, near_PP, 0.0), axis=1)
        best_P = jnp.argsort(jnp.where(there_P, score_P, jnp.inf), stable=True)
        rank_P = jnp.zeros_like(best_P).at[best_P].set(peers)
        kept_P = rank_P < jnp.maximum(count - liars, 1)
        kept = kept_P.reshape(-1, *[1] * (weight.ndim - 1))
        return mean(values, jnp.where(kept, weight, jnp.zeros_like(weight)))

    return of_tree


def rda(values: Tree, weight: jax.Array) -> Tree:
    """Return the radial-directional average: mean direction times mean norm, per parameter.

        (sum_p w_p ||x_p|| / sum_p w_p) * phi(sum_p w_p phi(x_p)),  phi(x) = x / ||x||, phi(0) = 0

    The mean of P orthogonal vectors is shorter than each by sqrt(P); this is not. The group embed
    gets the plain mean, as in the paper. One peer's norm moves the length as far as it likes.

    References:
      Douillard et al., Decoupled DiLoCo, https://arxiv.org/abs/2604.21428
    """
    return _radial(values, weight, _mean_norm)


def rda_median_norm(values: Tree, weight: jax.Array) -> Tree:
    """Return `rda` with the median of the peers' norms in place of their mean."""
    return _radial(values, weight, lambda norm_P, weight_P: middle(norm_P, weight_P > 0))


def _mean_norm(norm_P: jax.Array, weight_P: jax.Array) -> jax.Array:
    found: jax.Array = mean(norm_P, weight_P)
    return found


def _radial(
    values: Tree, weight: jax.Array, length: Callable[[jax.Array, jax.Array], jax.Array]
) -> Tree:
    def of_leaf(path: KeyPath, x: jax.Array) -> jax.Array:
        if group_of(path) == AVERAGED:
            averaged: jax.Array = mean(x, weight)
            return averaged
        x = jnp.where(is_sent(x, weight), x, 0.0)
        norm_P = _norms(x)
        direction = mean(_scaled(x, _inverse(norm_P)), weight)
        long = jnp.sqrt(jnp.sum(jnp.square(direction)))
        of_all = length(norm_P, weight if weight.ndim == 1 else _is_there(weight))
        unit: jax.Array = direction / jnp.maximum(long, NO_DIRECTION)
        return of_all * jnp.where(long > NO_DIRECTION, unit, 0.0)

    return jax.tree.map_with_path(of_leaf, values)


# ---- Parts; a trailing _P is a number of each peer ----


def _is_there(sent_P: jax.Array) -> jax.Array:
    """Return the peers of whom anything counts: bool [P]."""
    return jnp.any(sent_P.reshape(len(sent_P), -1) > 0, axis=1)


def _norms(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(jnp.square(x.reshape(len(x), -1)), axis=1))


def _inverse(norm_P: jax.Array) -> jax.Array:
    return jnp.where(norm_P > 0, 1.0 / jnp.where(norm_P > 0, norm_P, 1.0), 0.0)


def _at_most(norm_P: jax.Array, bound: jax.Array) -> jax.Array:
    """Return the factors that bring norms down to the bound."""
    return jnp.where(norm_P > bound, bound * _inverse(norm_P), 1.0)


def _scaled(x: jax.Array, factor_P: jax.Array) -> jax.Array:
    return x * factor_P.reshape(-1, *[1] * (x.ndim - 1))


def _apart(x: jax.Array, sent_P: jax.Array) -> jax.Array:
    """Return the squared distances of peers from each other, [P, P]; in memory of P arrays."""
    x = jnp.where(sent_P, x, 0.0).reshape(len(x), -1)

    def from_all(x: jax.Array, one: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x - one), axis=1)

    apart_PP: jax.Array = jax.lax.map(partial(from_all, x), x)
    return apart_PP
