"""Aggregates that judge a peer by a whole parameter: by its norm, or by its distances.

Norms and distances are L2, over one parameter; in `multi_krum` over all of them.
"""

from collections.abc import Callable
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.aggregation.aggregate import AggregateFn, few_of, mean
from lockstep.optim.aggregation.by_element import is_sent, median, middle
from lockstep.optim.magnitude import UNIT, Sized, near_one
from lockstep.optim.optimizer import KeyPath, Tree, group_of

CLIPS = 3  # iterations of `centered_clip`
NO_DIRECTION = 1e-6  # a mean of unit vectors that is shorter than this is rounding only
MOST = float(np.finfo(np.float32).max)
AVERAGED = "embed"  # few peers share a row of this group, so its directions are not orthogonal


def norm_clip(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean of values whose norms are clipped to the median of the peers' norms.

        mean of x_p * min(1, median(||x||) / ||x_p||)

    It bounds how far a liar pulls, not in which direction.

    References:
      Sun et al., Can You Really Backdoor Federated Learning?, https://arxiv.org/abs/1911.07963
    """

    def clip_leaf(x: jax.Array) -> jax.Array:
        return _clipped(x, is_sent(x, weight))

    return mean(jax.tree.map(clip_leaf, values), weight)


def centered_clip(values: Tree, weight: jax.Array) -> Tree:
    """Return a centre that moves, from the median, by the mean of peers' clipped differences.

        v <- v + mean of (x_p - v) * min(1, r / ||x_p - v||)        3 times

    with r the median of the peers' distances from v. In the paper v starts at the last round's v,
    and r is a constant.

    References:
      Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization,
        https://arxiv.org/abs/2012.10333
    """

    def off(x: jax.Array, v: jax.Array) -> jax.Array:
        return _clipped(x - v, is_sent(x, weight))

    values = jax.tree.map(lambda x: jnp.where(is_sent(x, weight), x, 0.0), values)
    few = jax.tree.map(few_of, values)
    values = jax.tree.map(jnp.multiply, values, few)
    centre = median(values, weight)
    for _ in range(CLIPS):
        moves = mean(jax.tree.map(off, values, centre), weight)
        centre = jax.tree.map(jnp.add, centre, moves)
    return jax.tree.map(jnp.divide, centre, few)


def multi_krum(liars: int) -> AggregateFn:
    """Return the mean of the peers that are closest to their neighbours: all but `liars`.

    A peer's score is the sum of its squared distances from the n - liars - 2 peers closest to it,
    where n are present; the n - liars peers with the lowest scores count. Distances are measured
    in units of the peers' median magnitude, so that squares do not overflow for honest values of
    any size; a distance that still overflows is infinite, and so is the score.

    References:
      Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent,
        https://arxiv.org/abs/1703.02757
    """

    def mean_of_nearest(values: Tree, weight: jax.Array) -> Tree:
        there_P = _is_there(weight)
        count, peers = jnp.sum(there_P), jnp.arange(len(weight))
        leaves = [jnp.where(is_sent(x, weight), x, 0.0) for x in jax.tree.leaves(values)]
        largest_P = reduce(jnp.maximum, (_by_peer(jnp.max, jnp.abs(x)) for x in leaves))
        near = near_one(middle(largest_P, there_P))
        apart_PP = sum(_apart(jnp.clip(x * near, -MOST, MOST)) for x in leaves)
        others_PP = there_P[:, None] & there_P[None, :] & (peers[:, None] != peers[None, :])
        near_PP = jnp.sort(jnp.where(others_PP, apart_PP, jnp.inf), axis=1)
        counted_PP = peers < jnp.maximum(count - liars - 2, 1)
        score_P = jnp.sum(jnp.where(counted_PP, near_PP, 0.0), axis=1)
        score_P = jnp.where(there_P, jnp.minimum(score_P, MOST), jnp.inf)  # absent ones come last
        best_P = jnp.argsort(score_P, stable=True)
        rank_P = jnp.zeros_like(best_P).at[best_P].set(peers)
        kept_P = rank_P < jnp.maximum(count - liars, 1)
        kept = kept_P.reshape(-1, *[1] * (weight.ndim - 1))
        return mean(values, jnp.where(kept, weight, jnp.zeros_like(weight)))

    return mean_of_nearest


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
    def average_leaf(path: KeyPath, x: jax.Array) -> jax.Array:
        if group_of(path) == AVERAGED:
            averaged: jax.Array = mean(x, weight)
            return averaged
        sized = Sized(jnp.where(is_sent(x, weight), x, 0.0), tuple(range(1, x.ndim)))
        direction = mean(sized.direction, weight)
        long = jnp.sqrt(jnp.sum(jnp.square(direction)))
        length_P = sized.length.reshape(-1)
        of_all = length(length_P, weight if weight.ndim == 1 else _is_there(weight))
        unit: jax.Array = direction / (jnp.maximum(long, NO_DIRECTION) / UNIT)
        return of_all * jnp.where(long > NO_DIRECTION, unit, 0.0)

    return jax.tree.map_with_path(average_leaf, values)


# ---- Parts; a trailing _P is a number of each peer ----


def _is_there(sent_P: jax.Array) -> jax.Array:
    """Return which peers have at least one element that counts: bool [P]."""
    return _by_peer(jnp.any, sent_P > 0)


def _by_peer(reduction: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    return reduction(x.reshape(len(x), -1), axis=1)


def _clipped(x: jax.Array, sent_P: jax.Array) -> jax.Array:
    """Return the values, each peer's norm clipped to the median of the peers' norms."""
    x = jnp.where(sent_P, x, 0.0)
    sized = Sized(x, tuple(range(1, x.ndim)))
    bound = middle(sized.length, _is_there(sent_P).reshape(sized.length.shape))
    return jnp.where(sized.length > bound, sized.with_length(bound), x)


def _apart(x: jax.Array) -> jax.Array:
    """Return the squared distances between peers, [P, P].

    A loop over peers holds P arrays at a time; all differences at once would hold P^2.
    """
    x = x.reshape(len(x), -1)

    def from_all(x: jax.Array, one: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(x - one), axis=1)

    apart_PP: jax.Array = jax.lax.map(partial(from_all, x), x)
    return apart_PP
