"""AdaDistro, this project's own extension of DisTrO: DisTrO's bytes, with step sizes by group.

Its gradients are divided by the root of their factored second moment, before DisTrO sees them.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from lockstep.optim import expect
from lockstep.optim.compressed.distro import CompressedMomentum, distro
from lockstep.optim.optimizer import KeyPath, Optimizer, Tree, clip_scale, group_of, inside

EPS = 1e-8  # as in Adam: a gradient smaller than this stays small
LEAST_MEAN = 1e-30  # a first gradient of zeros would otherwise be 0 / 0


def ada_distro(
    momentum: CompressedMomentum, second_moment_decay: float, overlap: int = 0
) -> Optimizer:
    """Return DisTrO on normalized gradients, with orthogonal updates of layers and steps by group.

    With the names of `distro`, whose messages these are, v_p the factored second moment of the
    peer's gradient (`normalized`), O(.) the nearest orthogonal matrix (`orthogonal`), and G
    the group of a parameter:

        delta_p <- compression_decay * delta_p + lr(t) * g_p / sqrt(v_p);  send q_p;  remove D(q_p)
        theta   <- theta - lr(t) * scale[G] * O(D(Q(t)))        matrices of layers
        theta   <- theta - lr(t) * scale[G] * sign(D(Q(t)))     embeddings, head and norms

    Each peer normalizes by its own gradients, so params rest where normalized gradients cancel.
    That is the minimum of the mean loss where peers draw from the same data, as here; where their
    data differ, peers with small gradients count for more than in DisTrO.

    A sign moves all elements equally, and so a layer's matrix along all of its singular directions,
    noise included. Layers need much shorter steps than embeddings and head; an orthogonal matrix
    spreads a layer's step evenly. No committed table has the gain of each part alone.

    Args:
      momentum: DisTrO's settings, with the `direction` of the equations above. Its
        compression_decay is best shorter than DisTrO's 0.999, such as 0.95: normalized gradients of
        long ago are as large as today's. Gradients are clipped before they are normalized.
      second_moment_decay: Decay of v_p per round, such as 0.95.
      overlap: Rounds that messages travel, 0 to 2; see `distro`.
    """
    expect.kind(CompressedMomentum, momentum=momentum)
    return normalized(
        distro(replace(momentum, clip_grad_norm=None), overlap),
        second_moment_decay,
        momentum.clip_grad_norm,
        momentum.compressor.stacked,
    )


class MatrixMoment(NamedTuple):
    """AdaDistro's second moment of a matrix: decayed squares of its gradient.

    Attributes:
      column: Their mean over rows, [..., 1, columns].
      row: Their mean over columns, [..., rows, 1].
    """

    column: jax.Array
    row: jax.Array


class VectorMoment(NamedTuple):
    """AdaDistro's second moment of a vector: decayed squares of its gradient, by element."""

    element: jax.Array


class NormalizedState(NamedTuple):
    """A peer's own state in AdaDistro's `normalized`.

    Attributes:
      optimizer: The state of the optimizer that takes the normalized gradients.
      second: `MatrixMoment` or `VectorMoment` of each parameter.
      weight: float32 [], sum of the decayed weights of `second`.
    """

    optimizer: Tree
    second: Tree
    weight: jax.Array


def normalized(
    optimizer: Optimizer,
    decay: float,
    clip_grad_norm: float | None = None,
    stacked: tuple[str, ...] = (),
) -> Optimizer:
    """Return AdaDistro's optimizer on gradients whose elements are all about as large as 1.

    Each peer keeps decayed means of its squared gradients, over the columns and over the rows of
    each matrix. From them Adafactor estimates the second moment of each element:

        R   <- decay * R + (1 - decay) * mean over columns of g^2
        C   <- decay * C + (1 - decay) * mean over rows of g^2
        v    = R C^T / mean(R)
        g   <- g / (sqrt(v / w) + 1e-8)

    where w, the sum of the decayed weights, corrects the bias as in Adam. A vector's v is its own
    decayed square. So a peer needs memory for a row and a column of each matrix, not for another
    copy of the params.

    Gradients are clipped to `clip_grad_norm` before that. Leaves of the top-level groups in
    `stacked` carry a leading layer axis.

    References:
      Shazeer, Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost,
      https://arxiv.org/abs/1804.04235
    """
    expect.decay("second_moment_decay", decay)
    expect.kind(Optimizer, optimizer=optimizer)
    expect.clip(clip_grad_norm)
    expect.groups(stacked=stacked)
    moment = _SecondMoment(decay, stacked)

    def init(params: Tree) -> tuple[Tree, Tree]:
        own, shared = optimizer.init(params)
        return NormalizedState(own, moment.zeros(params), jnp.zeros(())), shared

    def accumulate(grads: Tree, own: Tree, params: Tree, step: jax.Array) -> Tree:
        if clip_grad_norm is not None:
            scale = clip_scale(grads, clip_grad_norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        weight = decay * own.weight + (1 - decay)
        second = moment.add(own.second, grads)
        grads = moment.divide(grads, second, weight)
        state = optimizer.accumulate(grads, own.optimizer, params, step)
        return NormalizedState(state, second, weight)

    return inside(optimizer)._replace(init=init, accumulate=accumulate)


@dataclass(frozen=True)
class _SecondMoment:
    """Adafactor's estimate of the second moment, from the settings of `normalized`."""

    decay: float
    stacked: tuple[str, ...]

    def zeros(self, params: Tree) -> Tree:
        """Return AdaDistro's first moments, one `MatrixMoment` or `VectorMoment` a parameter."""
        return jax.tree.map_with_path(
            lambda path, p: self._squares(path, jnp.zeros_like(p)), params
        )

    def add(self, second: Tree, grads: Tree) -> Tree:
        """Return AdaDistro's second moments after these gradients."""
        return jax.tree.map(
            lambda old, new: self.decay * old + (1 - self.decay) * new,
            second,
            jax.tree.map_with_path(self._squares, grads),
        )

    def divide(self, grads: Tree, second: Tree, weight: jax.Array) -> Tree:
        """Return AdaDistro's normalized gradient g / (sqrt(v / w) + 1e-8), with w in `weight`."""

        def normalized_leaf(g: jax.Array, moment: MatrixMoment | VectorMoment) -> jax.Array:
            if isinstance(moment, VectorMoment):
                return g / (jnp.sqrt(moment.element / weight) + EPS)
            # roots before their product: the square of a small gradient's square would be zero
            row = moment.row / (jnp.mean(moment.row, axis=-2, keepdims=True) + LEAST_MEAN)
            return g / (jnp.sqrt(row) * jnp.sqrt(moment.column / weight) + EPS)

        return jax.tree.map(normalized_leaf, grads, second)

    def _squares(self, path: KeyPath, g: jax.Array) -> MatrixMoment | VectorMoment:
        square = jnp.square(g)
        if g.ndim - (group_of(path) in self.stacked) < 2:
            return VectorMoment(square)
        return MatrixMoment(
            row=jnp.mean(square, axis=-1, keepdims=True),
            column=jnp.mean(square, axis=-2, keepdims=True),
        )
