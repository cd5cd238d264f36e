"""The task of `simulate`: any loss, of examples of any kind.

Shapes in names: M micro-batches of B examples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

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
        """Return the arrays in nested dicts, in float32 on the host."""
        arrays = (np.array(leaf, np.float32) for leaf in jax.tree.leaves(params))
        return unflatten_dict(dict(zip(self._names, arrays, strict=True)))

    def restored(self, nested: dict) -> Tree:
        """Return the tree again, of the arrays in nested dicts."""
        by_name = flatten_dict(nested)
        return jax.tree.unflatten(self._structure, [by_name[name] for name in self._names])


def _names(path: KeyPath) -> tuple[str, ...]:
    """Return the keys of a path; none is empty or has the separator of paths on disk."""
    keys = (jax.tree_util.keystr((key,), simple=True).replace("/", ".") for key in path)
    return tuple(key or "_" for key in keys) or ("params",)


LossFn = Callable[[Tree, Tree, jax.Array | None], jax.Array]
"""loss_fn(params, batch, rng) -> scalar."""


class PeerRows(NamedTuple):
    """Examples, arrays `[..., *]`, and the number of the peer that has them, int32 `[...]`."""

    examples: Tree
    peer: jax.Array


class LossTask:
    """A loss that is a function of params, a batch and a key; a `Task`.

    `loss_fn` returns the mean loss of a batch, without a key where it is measured. Params, of these
    shapes in nested dicts, and floating-point examples are cast to `dtype` before it. `seed` is of
    all randomness.
    """

    def __init__(
        self, loss_fn: LossFn, nesting: Nesting, shapes: Tree, dtype: jnp.dtype, seed: int
    ):
        self.loss_fn, self.nesting, self.shapes = loss_fn, nesting, shapes
        self.dtype, self.seed = dtype, seed

    @property
    def imprecise(self) -> "LossTask":
        """The same task in the other precision, for a peer with that fault."""
        other = jnp.dtype(OTHER_PRECISION[self.dtype.name])
        return LossTask(self.loss_fn, self.nesting, self.shapes, other, self.seed)

    def weights(
        self, rows_MB: PeerRows, count: jax.Array
    ) -> Callable[[jax.Array | int], tuple[jax.Array, jax.Array]]:
        """Return how many examples of a micro-batch are real, and their share of all."""
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
    ) -> jax.Array:
        """Return the micro-batch's mean loss times its share of the examples.

        `loss_fn` sees batches of one size: one that is not full is filled up with its own examples
        again, from the first.
        """
        real, share = weight
        at_B = jnp.arange(rows_B.peer.shape[0]) % real
        batch = jax.tree.map(lambda leaf: leaf[at_B], rows_B.examples)
        return share * self._apply(params, batch, rng)

    def key(self, rows_MB: PeerRows, step: jax.Array, local_step: jax.Array | int) -> jax.Array:
        """Return the key of (seed, round, peer, local step), so that a replay draws the same."""
        key = jax.random.key(self.seed, impl="threefry2x32")
        for number in (step, rows_MB.peer[0, 0], local_step):
            key = jax.random.fold_in(key, number)
        return key

    def measure(self, params: Tree, batch: Tree) -> jax.Array:
        """Return the mean loss of a batch, without a key."""
        return self._apply(params, batch, None)

    def check(self, batch: Tree) -> None:
        """Check that `loss_fn` returns a scalar of such a batch; computes nothing."""
        key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        tree = jax.eval_shape(self.nesting.restored, self.shapes)
        check_call(
            self.loss_fn, "loss_fn", "loss_fn(params, batch, rng) -> scalar", tree, batch, key
        )
        returned: list[Any] = []
        jax.eval_shape(lambda *args: returned.append(self.loss_fn(*args)), tree, batch, key)
        loss = returned[0]
        if not (
            isinstance(loss, jax.Array)
            and loss.shape == ()
            and jnp.issubdtype(loss.dtype, jnp.floating)
        ):
            wanted = "the loss alone, without aux" if isinstance(loss, tuple) else "a loss"
            raise LockstepError(
                f"simulate: loss_fn returns {_described(loss)}, expected {wanted}: one "
                "floating-point number that depends on params, float32[]"
            )

    def _apply(self, params: Tree, batch: Tree, rng: jax.Array | None) -> jax.Array:
        params, batch = (jax.tree.map(self._cast, tree) for tree in (params, batch))
        return self.loss_fn(self.nesting.restored(params), batch, rng).astype(jnp.float32)

    def _cast(self, x: jax.Array) -> jax.Array:
        return x.astype(self.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _described(returned: Any) -> str:
    """Return a description of what a loss function returned."""
    if isinstance(returned, jax.Array):
        return f"{returned.dtype}{list(returned.shape)}"
    if isinstance(returned, tuple):
        return f"a tuple ({', '.join(map(_described, returned))})"
    if isinstance(returned, int | float | np.generic):
        return f"the constant {returned}"
    return "nothing" if returned is None else type(returned).__name__
