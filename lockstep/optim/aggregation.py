"""How the values of all peers become one: by their mean, or by a rule that tolerates liars.

Each optimizer takes an `aggregate`, and reduces the values that peers sent by nothing else.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.optim.directions import LENGTH_UNIT, Sized, near_one
from lockstep.optim.optimizer import KeyPath, Tree, group_of

# Larger values are scaled down before they are summed over the peers, or a finite message of a
# liar could make the sum infinite, and with it everybody's params.
LARGE, FEW = 2.0**100, 2.0**-24


class AggregateFn(Protocol):
    """aggregate(values, weight) -> tree."""

    def __call__(self, values: Tree, weight: jax.Array) -> Tree:
        """Return the aggregate of all peers' values: one tree.

        Args:
          values: Arrays with a leading axis [peer], of any float; they are merged in float32. A
            value of weight 0 may be anything, NaN included, and changes no bit.
          weight: int32, bool, or float32 of at most 1 [peer]; or bool in the shape of the values,
            if peers sent only some of the elements.

        Returns:
          Shapes of a peer's values; zeros where all weights are 0.
        """


def mean(values: Tree, weight: jax.Array) -> Tree:
    """Return the aggregate by the mean over peers with their weights; see `AggregateFn`."""
    # Shares of the largest weight: equal weights become 1, and so have the bits of a plain mean.
    share = weight / jnp.maximum(jnp.max(weight), 1)
    total = jnp.maximum(jnp.sum(share, axis=0), 1.0)

    def leaf_mean(x: jax.Array) -> jax.Array:
        x = jnp.float32(x)
        share_P = share.reshape(*share.shape, *[1] * (x.ndim - share.ndim))
        return quotient(jnp.where(share_P > 0, share_P * x, 0.0), total)

    return jax.tree.map(leaf_mean, values)


def quotient(x: jax.Array, count: jax.Array) -> jax.Array:
    """Return the sum over the peers' axis divided by a count, finite even if the sum is not."""
    scale = few_of(x, axis=0)
    return jnp.sum(x * scale, axis=0) / count / scale


def few_of(x: jax.Array, axis: int | None = None) -> jax.Array:
    """Return the factor by which peers' values may be summed: 1, and less near float32's limit."""
    # It depends on x, because XLA moves a product with a constant behind the sum.
    return jnp.where(jnp.max(jnp.abs(x), axis=axis, initial=0.0) > LARGE, FEW, 1.0)


def median(values: Tree, weight: jax.Array) -> Tree:
    """Return the median of each element, half-way between the middle two of an even number.

    If fewer than half of an element's senders lie, it stays within the honest values.

    References:
      Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates,
        https://arxiv.org/abs/1803.01498
    """
    return _by_element(middle, values, weight)


def trimmed_mean(liars: int) -> AggregateFn:
    """Return the mean of each element without its `liars` largest and smallest values.

    If 2 * liars peers or fewer sent the element, fewer are left out, so that one or two remain.

    References:
      Yin et al., as in `median`
    """

    def trim(x: jax.Array, sent_P: jax.Array) -> jax.Array:
        ranked_P, count = _ranked(x, sent_P)
        cut = jnp.minimum(liars, jnp.maximum(count - 1, 0) // 2)
        rank_P = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
        kept_P = (rank_P >= cut) & (rank_P < count - cut)
        return quotient(jnp.where(kept_P, ranked_P, 0.0), jnp.maximum(count - 2 * cut, 1))

    return partial(_by_element, trim)


def min_support(liars: int) -> AggregateFn:
    """Return the mean of each element over its senders, zero where `liars` or fewer sent it.

    So liars alone move no element that nobody else sends.
    """

    def drop_unsupported(x: jax.Array, sent_P: jax.Array) -> jax.Array:
        count = jnp.sum(sent_P, axis=0)
        average = quotient(jnp.where(sent_P, x, 0.0), jnp.maximum(count, 1))
        return jnp.where(count > liars, average, 0.0)

    return partial(_by_element, drop_unsupported)


def peer_mean(values: Tree, weight: jax.Array) -> Tree:
    """Return the mean over all present peers of each element; an unsent one counts as zero.

    So a lone sender does not decide an element, but has one vote among all peers.
    """

    def leaf_mean(x: jax.Array, sent_P: jax.Array) -> jax.Array:
        present = jnp.sum(jnp.any(sent_P.reshape(len(x), -1), axis=1))
        return quotient(jnp.where(sent_P, x, 0.0), jnp.maximum(present, 1))

    return _by_element(leaf_mean, values, weight)


def _by_element(
    rule: Callable[[jax.Array, jax.Array], jax.Array], values: Tree, weight: jax.Array
) -> Tree:
    """Apply a rule of aggregation to each parameter's values and to which of them count."""
    return jax.tree.map(lambda x: rule(jnp.float32(x), is_sent(x, weight)), values)


def counts_each_once(aggregate: AggregateFn) -> bool:
    """Return whether a rule of aggregation sees only which weights are 0."""
    rule = aggregate.func if isinstance(aggregate, partial) else aggregate
    return rule in (median, peer_mean, _by_element)


def is_sent(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return which elements of peers' values count, bool in the shape of x; see `AggregateFn`."""
    sent_P = weight.reshape(*weight.shape, *[1] * (x.ndim - weight.ndim)) > 0
    return jnp.broadcast_to(sent_P, x.shape)


def middle(x: jax.Array, sent_P: jax.Array) -> jax.Array:
    """Return the median of peers' values that count, to aggregate; 0 if none does."""
    ranked_P, count = _ranked(x, sent_P)
    low, high = jnp.maximum(count - 1, 0) // 2, count // 2
    pair = jnp.take_along_axis(ranked_P, jnp.concatenate([low[None], high[None]]), axis=0)
    return quotient(jnp.where(count > 0, pair, 0.0), jnp.float32(2))


def _ranked(x: jax.Array, sent_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return peers' values in ascending order, uncounted ones last, and how many count."""
    return jnp.sort(jnp.where(sent_P, x, jnp.inf), axis=0), jnp.sum(sent_P, axis=0)


CLIP_ITERATIONS = 3  # iterations of `centered_clip`
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
    return mean(_by_element(_clipped, values, weight), weight)


def centered_clip(values: Tree, weight: jax.Array) -> Tree:
    """Return a centre that moves, from the median, by the mean of peers' clipped differences.

        v <- v + mean of (x_p - v) * min(1, r / ||x_p - v||)        3 times

    with r the median of the peers' distances from v. In the paper v starts at the last round's v,
    and r is a constant.

    References:
      Karimireddy, He, Jaggi, Learning from History for Byzantine Robust Optimization,
        https://arxiv.org/abs/2012.10333
    """
    values = jax.tree.map(lambda x: jnp.where(is_sent(x, weight), jnp.float32(x), 0.0), values)
    scales = jax.tree.map(few_of, values)
    values = jax.tree.map(jnp.multiply, values, scales)
    centre = median(values, weight)
    for _ in range(CLIP_ITERATIONS):
        moves = jax.tree.map(lambda x, v: _clipped(x - v, is_sent(x, weight)), values, centre)
        centre = jax.tree.map(jnp.add, centre, mean(moves, weight))
    return jax.tree.map(jnp.divide, centre, scales)


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
        present_P = _is_there(weight)
        count, peers = jnp.sum(present_P), jnp.arange(len(weight))
        values = jax.tree.map(jnp.float32, values)
        leaves = [jnp.where(is_sent(x, weight), x, 0.0) for x in jax.tree.leaves(values) if x.size]
        sizes = (_by_peer(jnp.max, jnp.abs(x)) for x in leaves)
        largest_P = reduce(jnp.maximum, sizes, jnp.zeros(len(weight)))
        scale = near_one(middle(largest_P, present_P))
        distance_PP = sum(_squared_distances(jnp.clip(x * scale, -MOST, MOST)) for x in leaves)
        others_PP = present_P[:, None] & present_P[None, :] & (peers[:, None] != peers[None, :])
        nearest_PP = jnp.sort(jnp.where(others_PP, distance_PP, jnp.inf), axis=1)
        counted_PP = peers < jnp.maximum(count - liars - 2, 1)
        score_P = jnp.sum(jnp.where(counted_PP, nearest_PP, 0.0), axis=1)
        score_P = jnp.where(present_P, jnp.minimum(score_P, MOST), jnp.inf)  # absent ones come last
        best_P = jnp.argsort(score_P, stable=True)
        rank_P = jnp.zeros_like(best_P).at[best_P].set(peers, unique_indices=True)
        kept_P = rank_P < jnp.maximum(count - liars, 1)
        mask = kept_P.reshape(-1, *[1] * (weight.ndim - 1))
        return mean(values, jnp.where(mask, weight, jnp.zeros_like(weight)))

    return mean_of_nearest


def rda(values: Tree, weight: jax.Array) -> Tree:
    """Return the radial-directional average: mean direction times mean norm, per parameter.

        (sum_p w_p ||x_p|| / sum_p w_p) * phi(sum_p w_p phi(x_p)),  phi(x) = x / ||x||, phi(0) = 0

    The mean of P orthogonal vectors is shorter than each by sqrt(P); this is not. The group embed
    gets the plain mean, as in the paper. One peer's norm moves the length as far as it likes.

    References:
      Douillard et al., Decoupled DiLoCo, https://arxiv.org/abs/2604.21428
    """
    return _radial(values, weight, mean)


def rda_median_norm(values: Tree, weight: jax.Array) -> Tree:
    """Return `rda` with the median of the peers' norms in place of their mean."""
    return _radial(values, weight, lambda norm_P, weight_P: middle(norm_P, weight_P > 0))


def _radial(
    values: Tree, weight: jax.Array, length: Callable[[jax.Array, jax.Array], jax.Array]
) -> Tree:
    def average_leaf(path: KeyPath, x: jax.Array) -> jax.Array:
        if group_of(path) == AVERAGED:
            averaged: jax.Array = mean(x, weight)
            return averaged
        sized = Sized(jnp.where(is_sent(x, weight), jnp.float32(x), 0.0), tuple(range(1, x.ndim)))
        direction = mean(sized.direction, weight)
        norm = jnp.sqrt(jnp.sum(jnp.square(direction)))
        length_P = sized.length.reshape(-1)
        common_length = length(length_P, weight if weight.ndim == 1 else _is_there(weight))
        unit: jax.Array = direction / (jnp.maximum(norm, NO_DIRECTION) / LENGTH_UNIT)
        return common_length * jnp.where(norm > NO_DIRECTION, unit, 0.0)

    return jax.tree.map_with_path(average_leaf, values)


# ---- Parts; a trailing _P is a number of each peer ----


def _is_there(sent_P: jax.Array) -> jax.Array:
    """Return which peers have at least one element that counts to aggregate: bool [P]."""
    return _by_peer(jnp.any, sent_P > 0)


def _by_peer(reduction: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    return reduction(x.reshape(len(x), -1), axis=1)


def _clipped(x: jax.Array, sent_P: jax.Array) -> jax.Array:
    """Return the values, each peer's norm clipped to the median of the peers' norms."""
    x = jnp.where(sent_P, x, 0.0)
    sized = Sized(x, tuple(range(1, x.ndim)))
    bound = middle(sized.length, _is_there(sent_P).reshape(sized.length.shape))
    return jnp.where(sized.length > bound, sized.with_length(bound), x)


def _squared_distances(x: jax.Array) -> jax.Array:
    """Return the squared distances between peers' values, [P, P].

    A loop over peers holds P arrays at a time; all differences at once would hold P^2.
    """
    x = x.reshape(len(x), -1)
    distance_PP: jax.Array = jax.lax.map(lambda peer: jnp.sum(jnp.square(x - peer), axis=1), x)
    return distance_PP


def _whatever(aggregate: AggregateFn) -> Callable[[int], AggregateFn]:
    """Return a factory of a rule of aggregation that needs no number of liars."""
    return lambda liars: aggregate


RULES: dict[str, Callable[[int], AggregateFn]] = {
    "mean": _whatever(mean),
    "peer_mean": _whatever(peer_mean),
    "median": _whatever(median),
    "trimmed_mean": trimmed_mean,
    "min_support": min_support,
    "norm_clip": _whatever(norm_clip),
    "centered_clip": _whatever(centered_clip),
    "multi_krum": multi_krum,
    "rda": _whatever(rda),
    "rda_median_norm": _whatever(rda_median_norm),
}
"""By its name, what makes a rule from the number of liars that are assumed."""
