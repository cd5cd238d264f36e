"""The loss: next-token cross-entropy, from the last layer's output and the head's kernel.

Logits are the largest array of a model with a large vocabulary: V for each position of a text.
Where they would be more than `LARGEST` numbers, they are computed for some positions at a time,
and in training turned into gradients of features and kernel at once, so no more are ever held. A
run may say for how many: each part adds to a sum as large as the kernel, so that few large parts
move fewer bytes.

Shapes in names: B sequences of T tokens, N = B * T, S = T - 1 predictions of each, C tokens at a
time, M such parts, D width, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp

from lockstep.programs.columns import UNCOUNTED, Columns

LARGEST = 2**25  # logits at a time: 128 MiB of float32


def cross_entropy(x_ND: jax.Array, kernel_DV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return each sequence's mean next-token cross-entropy in nats: [B], float32.

    The last token of a sequence is a label only, as in Psyche: T - 1 predictions.

    Args:
      x_ND: Features that the head's kernel multiplies, in the dtype of that product.
      kernel_DV: The head's kernel; cast to that dtype.
      tokens_BT: Token ids, int32.
    """
    return jnp.mean(_predicted(x_ND, kernel_DV, tokens_BT), axis=-1)


def targets(rows: Columns) -> jax.Array:
    """Return the tokens that a loss predicts, [B, T]: labels, any where UNCOUNTED; or inputs."""
    return rows.inputs if rows.labels is None else jnp.maximum(rows.labels, 0)


def measured(x_ND: jax.Array, kernel_DV: jax.Array, rows: Columns) -> jax.Array:
    """Return each row's loss: mean cross-entropy over its tokens that count: [B]; 0 without any.

    Labels mark the tokens that count; without labels all but the first do.
    """
    if rows.labels is None:
        return cross_entropy(x_ND, kernel_DV, rows.inputs)
    counted_BS = rows.labels[:, 1:] != UNCOUNTED
    losses_BS = _predicted(x_ND, kernel_DV, targets(rows))
    return jnp.sum(losses_BS * counted_BS, axis=-1) / jnp.maximum(counted_BS.sum(axis=-1), 1)


def weighted_cross_entropy(
    x_ND: jax.Array,
    kernel_DV: jax.Array,
    tokens_BT: jax.Array,
    weight: jax.Array,
    at_once: int | None = None,
) -> jax.Array:
    """Return the weighted sum of cross-entropies; for gradients.

    `weight` is of each sequence's mean, [B], or of each prediction, [B, S], 0 if UNCOUNTED; it is
    not differentiated. `at_once` is how many tokens have logits at a time, which decides the last
    bits; by default as many as `LARGEST` allows.
    """
    N, V = x_ND.shape[0], kernel_DV.shape[1]
    if at_once is None and N * V <= LARGEST:
        return _total(x_ND, kernel_DV, tokens_BT, weight)
    at_once = _allowed(N, V) if at_once is None else min(at_once, N)
    return _in_parts(x_ND, kernel_DV, tokens_BT, weight, at_once)


def _allowed(N: int, V: int) -> int:
    """Return how many of a loss's N tokens have at most `LARGEST` logits, in parts about alike."""
    return -(-N // -(-N * V // LARGEST))


def _total(
    x_ND: jax.Array, kernel_DV: jax.Array, tokens_BT: jax.Array, weight: jax.Array
) -> jax.Array:
    loss = cross_entropy if weight.ndim == 1 else _predicted
    return jnp.sum(weight * loss(x_ND, kernel_DV, tokens_BT))


def _predicted(x_ND: jax.Array, kernel_DV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the loss of each prediction, its cross-entropy: [B, S]."""
    B, T = tokens_BT.shape
    if x_ND.shape[0] * kernel_DV.shape[1] <= LARGEST:
        logits_BTV = _logits(x_ND, kernel_DV).reshape(B, T, kernel_DV.shape[1])
        logits_BSV, labels_BS = logits_BTV[:, :-1], tokens_BT[:, 1:]
        label_logits_BS = jnp.take_along_axis(logits_BSV, labels_BS[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits_BSV, axis=-1) - label_logits_BS
    parts = _parts(x_ND, tokens_BT, _allowed(B * T, kernel_DV.shape[1]))
    kernel_DV = kernel_DV.astype(x_ND.dtype)  # once, and not for each part
    losses_N = jax.lax.map(lambda part: _losses(*part, kernel_DV)[0], parts)
    return losses_N.reshape(-1)[: B * T].reshape(B, T)[:, :-1]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _in_parts(
    x_ND: jax.Array, kernel_DV: jax.Array, tokens_BT: jax.Array, weight: jax.Array, at_once: int
) -> jax.Array:
    del at_once
    return _total(x_ND, kernel_DV, tokens_BT, weight)


def _forward(
    x_ND: jax.Array, kernel_DV: jax.Array, tokens_BT: jax.Array, weight: jax.Array, at_once: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Return the loss and its gradients, up to the factor that multiplies the loss.

    Three products of N x D x V, as many as without parts; no logits are computed twice.
    """
    B, T = tokens_BT.shape
    # weight of each token's prediction; the last one predicts nothing
    if weight.ndim == 1:  # a share of its sequence's
        weight_BT = jnp.broadcast_to(weight[:, None] / (T - 1), (B, T)).at[:, -1].set(0.0)
    else:
        weight_BT = jnp.pad(weight, ((0, 0), (0, 1)))
    kernel_DV = kernel_DV.astype(x_ND.dtype)  # once, and not for each part
    x_MCD, labels_MC = _parts(x_ND, tokens_BT, at_once)
    padding = x_MCD.shape[0] * x_MCD.shape[1] - B * T
    weight_MC = jnp.pad(weight_BT.reshape(-1), (0, padding)).reshape(labels_MC.shape)

    def add(sums: tuple[jax.Array, jax.Array], part: tuple) -> tuple[tuple, jax.Array]:
        total, grad_DV = sums
        x_CD, labels_C, weight_C = part
        losses_C, logits_CV, sum_C = _losses(x_CD, labels_C, kernel_DV)
        share_CV = jnp.exp(logits_CV - sum_C[:, None])
        hit_CV = labels_C[:, None] == jnp.arange(kernel_DV.shape[1])
        slope_CV = (weight_C[:, None] * (share_CV - hit_CV)).astype(x_CD.dtype)
        grad_CD = jnp.dot(slope_CV, kernel_DV.T)
        grad_DV += jnp.dot(x_CD.T, slope_CV, preferred_element_type=jnp.float32)
        return (total + jnp.sum(weight_C * losses_C), grad_DV), grad_CD

    zero = jnp.zeros(()), jnp.zeros(kernel_DV.shape, jnp.float32)
    (total, grad_DV), grad_MCD = jax.lax.scan(add, zero, (x_MCD, labels_MC, weight_MC))
    return total, (grad_MCD.reshape(-1, x_ND.shape[1])[: B * T], grad_DV)


def _backward(at_once: int, grads: tuple[jax.Array, jax.Array], scale: jax.Array) -> tuple:
    del at_once
    grad_ND, grad_DV = grads
    return (grad_ND * scale).astype(grad_ND.dtype), grad_DV * scale, None, None


_in_parts.defvjp(_forward, _backward)


def _logits(x: jax.Array, kernel_DV: jax.Array) -> jax.Array:
    return jnp.dot(x, kernel_DV.astype(x.dtype), preferred_element_type=jnp.float32)


def _losses(
    x_CD: jax.Array, labels_C: jax.Array, kernel_DV: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each token's loss, the cross-entropy, its logits, and their log-sum-exp."""
    logits_CV = _logits(x_CD, kernel_DV)
    sum_C = jax.nn.logsumexp(logits_CV, axis=-1)
    label_logits_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=-1)[:, 0]
    return sum_C - label_logits_C, logits_CV, sum_C


def _parts(x_ND: jax.Array, tokens_BT: jax.Array, C: int) -> tuple[jax.Array, jax.Array]:
    """Return features [M, C, D] and labels [M, C] of a loss, C tokens at a time, padded with zeros.

    A token's label is the next token; the last of a sequence has none.
    """
    N, D = x_ND.shape
    parts = -(-N // C)
    padding = parts * C - N
    labels_N = jnp.roll(tokens_BT, -1, axis=1).reshape(N)
    x_MCD = jnp.pad(x_ND, ((0, padding), (0, 0))).reshape(parts, C, D)
    return x_MCD, jnp.pad(labels_N, (0, padding)).reshape(parts, C)
