"""The task of `simulate`: any loss, of examples of any kind.

Shapes in names: M micro-batches of B examples.
"""

import copy
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.interpreters import partial_eval as pe

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import KeyPath, Tree
from lockstep.programs.task import OTHER_PRECISION
from lockstep.simulation.arguments import check_call


class Nesting:
    """How the arrays of a tree of params are named in nested dicts."""

    def __init__(self, params: Tree):
        leaves, self._structure = jax.tree.flatten_with_path(params)
        self._names = [_names(path) for path, _ in leaves]
        if not leaves:
            raise LockstepError("simulate: params is an empty tree, expected arrays")
        for name, (_, leaf) in zip(self._names, leaves, strict=True):
            dtype = getattr(leaf, "dtype", type(leaf).__name__)
            if not (hasattr(leaf, "dtype") and jnp.issubdtype(dtype, jnp.floating)):
                raise LockstepError(
                    f"simulate: params {'/'.join(name)} is {dtype}, expected an array of "
                    "floating-point numbers; what is not trained goes into loss_fn"
                )
            if not leaf.size:
                raise LockstepError(
                    f"simulate: params {'/'.join(name)} has the shape {leaf.shape}, expected "
                    "elements in it"
                )
        if len(set(self._names)) < len(self._names):
            raise LockstepError(
                "simulate: params has two arrays of one name, expected unique names"
            )

    def nested(self, params: Tree) -> dict:
        """Return the arrays of a tree of params in nested dicts, in float32 on the host."""
        arrays = (np.array(leaf, np.float32) for leaf in jax.tree.leaves(params))
        return unflatten_dict(dict(zip(self._names, arrays, strict=True)))

    def restored(self, nested: dict) -> Tree:
        """Return the tree of params again, of the arrays in nested dicts."""
        by_name = flatten_dict(nested)
        return jax.tree.unflatten(self._structure, [by_name[name] for name in self._names])


def _names(path: KeyPath) -> tuple[str, ...]:
    """Return the keys of a path in a tree of params; none is empty or has the disk's separator."""
    keys = (jax.tree_util.keystr((key,), simple=True).replace("/", ".") for key in path)
    return tuple(key or "_" for key in keys) or ("params",)


LossFn = Callable[[Tree, Tree, jax.Array | None], jax.Array | tuple[jax.Array, jax.Array]]
"""loss_fn(params, batch, rng) -> the mean over the examples, or a sum and how much counts in it."""
LOSS_FORM = "loss_fn(params, batch, rng) -> scalar, or (sum, count)"


class PeerRows(NamedTuple):
    """Examples, arrays `[..., *]`, and the number of the peer that has them, int32 `[...]`."""

    examples: Tree
    peer: jax.Array


class LossTask:
    """A loss that is a function of params, a batch and a key; a `Task`.

    `loss_fn` returns the mean loss over the examples of a batch, or a sum and how much counts in
    it; without a key where it is measured. Params, of these shapes in nested dicts, and
    floating-point examples are cast to `dtype` before it. `seed` is of all randomness, `rows` are
    the examples of a local step.
    """

    sums = False  # until `check` sees what `loss_fn` returns

    def __init__(
        self,
        loss_fn: LossFn,
        nesting: Nesting,
        shapes: Tree,
        dtype: jnp.dtype,
        seed: int,
        rows: int,
    ):
        self.loss_fn, self.nesting, self.shapes = loss_fn, nesting, shapes
        self.dtype, self.seed, self.rows = dtype, seed, rows

    @property
    def imprecise(self) -> "LossTask":
        """The same task of a loss in the other precision, for a peer with that fault."""
        other = copy.copy(self)
        other.dtype = jnp.dtype(OTHER_PRECISION[self.dtype.name])
        return other

    def weights(
        self, rows_MB: PeerRows, count: jax.Array
    ) -> Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]:
        """Return how many of a micro-batch's examples are real, for the loss, and their share."""
        size = rows_MB.peer.shape[1]

        def weight(micro: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            real = jnp.clip(count - micro * size, 0, size)
            return jnp.maximum(real, 1), real / jnp.maximum(count, 1)

        return weight

    def loss(
        self,
        params: Tree,
        rows_B: PeerRows,
        weight: tuple[jax.Array, jax.Array],
        rng: jax.Array | None,
    ) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Return the micro-batch's mean loss times its share of the examples, or sum and count.

        `loss_fn` sees whole micro-batches, and the rest of a local step as a batch of its own size.
        A lazy liar's last micro-batch is filled up with its first examples.
        """
        real, share = weight
        size = rows_B.peer.shape[0]
        rest = self.rows % size

        def of(chosen: Any) -> Any:
            batch = jax.tree.map(lambda leaf: leaf[chosen], rows_B.examples)
            return self._apply(params, batch, rng)

        at_B = jnp.arange(size) % real
        whole = partial(of, at_B)
        loss = jax.lax.cond(real == rest, lambda: of(slice(rest)), whole) if rest else whole()
        return loss if self.sums else share * loss

    def key(self, rows_MB: PeerRows, step: Any, local_step: Any) -> jax.Array:
        """Return the loss's key, of (seed, round, peer, local step): a replay draws the same."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in (step, rows_MB.peer[0, 0], local_step):
            key = jax.random.fold_in(key, number)
        return key

    def count(self, params: Tree, rows_N: PeerRows, size: int, step: int, local_step: int) -> float:
        """Return how much counts in a local step's loss, in micro-batches of `size`; for `sums`."""
        key = self.key(jax.tree.map(lambda x: x[None], rows_N), step, local_step)
        parts = [
            jax.tree.map(lambda x, at=at: x[at : at + size], rows_N.examples)
            for at in range(0, len(rows_N.peer), size)
        ]
        keys = (jax.random.fold_in(key, micro) for micro in range(len(parts)))
        return sum(float(self._count(params, *of)) for of in zip(parts, keys, strict=True))

    @cached_property
    def _count(self) -> Callable[..., jax.Array]:
        """Return what counts in a batch's loss: what only the loss needs is not computed."""
        return jax.jit(lambda *arguments: self._apply(*arguments)[1])

    def measure(self, params: Tree, batch: Tree) -> jax.Array | tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch by `loss_fn`, or sum and count, without a key."""
        return self._apply(params, batch, None)

    def check(self, batch: Tree) -> None:
        """Check that `loss_fn` returns a loss of such a batch, and see which; computes nothing."""
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        tree = jax.eval_shape(self.nesting.restored, self.shapes)
        check_call(self.loss_fn, "loss_fn", LOSS_FORM, tree, batch, key)
        returned: list[Any] = []
        jax.eval_shape(lambda *args: returned.append(self.loss_fn(*args)), tree, batch, key)
        pair = isinstance(returned[0], tuple) and len(returned[0]) == 2
        loss, count = returned[0] if pair else (returned[0], 1)
        number = isinstance(loss, jax.Array) and jnp.issubdtype(loss.dtype, jnp.floating)
        if not (number and loss.shape == () and _is_count(count)):
            raise LockstepError(
                f"simulate: loss_fn returns {_described(returned[0])}, expected the mean loss over "
                "the examples, one floating-point number that depends on params, float32[]; or the "
                "sum of losses and the number of what counts in it; without aux"
            )
        self.sums = pair
        if pair:
            made = jax.make_jaxpr(lambda *args: self._apply(*args)[1])(self.shapes, batch, key)
            used = pe.dce_jaxpr(made.jaxpr, [True])[1]
            if any(used[: len(jax.tree.leaves(self.shapes))]):
                raise LockstepError(
                    "simulate: loss_fn returns (sum, count) with a count that depends on params, "
                    "expected the number of what counts in a batch; without aux"
                )

    def _apply(self, params: Tree, batch: Tree, rng: jax.Array | None) -> Any:
        params, batch = (jax.tree.map(self._cast, tree) for tree in (params, batch))
        loss = self.loss_fn(self.nesting.restored(params), batch, rng)
        if not self.sums:
            return loss.astype(jnp.float32)
        return loss[0].astype(jnp.float32), jax.lax.stop_gradient(jnp.float32(loss[1]))

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _is_count(x: Any) -> bool:
    is_scalar = isinstance(x, jax.Array) and x.shape == ()
    return (is_scalar or isinstance(x, int | float | np.number)) and not jnp.iscomplexobj(x)


def _described(returned: Any) -> str:
    """Return a description of what a loss function returned."""
    if isinstance(returned, jax.Array):
        return f"{returned.dtype}{list(returned.shape)}"
    if isinstance(returned, tuple):
        return f"a tuple ({', '.join(map(_described, returned))})"
    if isinstance(returned, int | float | np.generic):
        return f"the constant {returned}"
    return "nothing" if returned is None else type(returned).__name__
