"""Rows of a table whose gradient is summed in the order of their numbers, not by a scatter.

On a GPU where operations are deterministic, a scatter that adds to a row more than once takes its
updates one after the other: 8.3 of 49 ms of a gradient of 124 M parameters on an H200. In order, it
took too little to be measured.

Shapes in names: N tokens, V rows of the table, D width, K blocks of b tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # tokens


def rows_of_table(
    table_VD: jax.Array, tokens_N: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Return table_VD[tokens_N] in `dtype`, [N, D]."""
    return _rows(dtype, table_VD.shape[0], table_VD, tokens_N)


def sums_by_token(tokens_N: jax.Array, grad_ND: jax.Array, V: int) -> jax.Array:
    """Return the sum of each token's rows of grad_ND: [V, D], float32.

    Rows of equal tokens stand side by side once sorted. Those of a block are summed by a product
    with a matrix that says which tokens are equal; then what earlier blocks have of a block's first
    token is added. A token's last place has the sum of all, and is the only one that is written.
    """
    b, N, D = BLOCK, *grad_ND.shape
    padding, highest = -N % b, lax.Precision.HIGHEST
    ids_N, order_N = lax.sort_key_val(tokens_N, jnp.arange(N))
    ids_N = jnp.pad(ids_N, (0, padding), constant_values=V)
    rows_KbD = jnp.pad(grad_ND[order_N], ((0, padding), (0, 0))).reshape(-1, b, D)
    ids_Kb = ids_N.reshape(-1, b)
    equal_Kbb = (ids_Kb[:, :, None] == ids_Kb[:, None, :]).astype(rows_KbD.dtype)
    sums_KbD = jnp.matmul(
        equal_Kbb, rows_KbD, precision=highest, preferred_element_type=jnp.float32
    )
    first_K, last_K = ids_Kb[:, 0], ids_Kb[:, -1]
    before_KK = jnp.tri(len(ids_Kb), k=-1) * (first_K[:, None] == last_K)
    before_KD = jnp.matmul(before_KK, sums_KbD[:, -1], precision=highest)
    goes_on_Kb = ids_Kb == first_K[:, None]
    sums_KbD += jnp.where(goes_on_Kb[:, :, None], before_KD[:, None], 0.0)
    ends_N = ids_N != jnp.append(ids_N[1:], V)
    place_N = jnp.where(ends_N, ids_N, V + jnp.arange(len(ids_N)))  # beyond the table: dropped
    zeros_VD = jnp.zeros((V, D), jnp.float32)
    return zeros_VD.at[place_N].set(sums_KbD.reshape(-1, D), mode="drop", unique_indices=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rows(
    dtype: jax.typing.DTypeLike, V: int, table_VD: jax.Array, tokens_N: jax.Array
) -> jax.Array:
    del V
    return table_VD[tokens_N].astype(dtype)


def _forward(
    dtype: jax.typing.DTypeLike, V: int, table_VD: jax.Array, tokens_N: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _rows(dtype, V, table_VD, tokens_N), tokens_N


def _backward(
    dtype: jax.typing.DTypeLike, V: int, tokens_N: jax.Array, grad_ND: jax.Array
) -> tuple[jax.Array, None]:
    del dtype  # that of the gradient
    return sums_by_token(tokens_N, grad_ND, V), None


_rows.defvjp(_forward, _backward)
