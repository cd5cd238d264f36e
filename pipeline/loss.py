"""The loss: next-token cross-entropy. Shapes in names: B sequences of T tokens, V vocabulary."""

import jax
import jax.numpy as jnp


def cross_entropy(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Each sequence's mean next-token cross-entropy in nats: [B].

    The last token of a sequence is a label only, as in Psyche: T - 1 predictions.
    """
    logits_BSV, labels_BS = logits_BTV[:, :-1], tokens_BT[:, 1:]
    label_logits_BS = jnp.take_along_axis(logits_BSV, labels_BS[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_BSV, axis=-1) - label_logits_BS, axis=-1)
