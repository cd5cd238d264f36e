"""A language model writes: one token at a time, each a pure function of the tokens before it.

Shapes: L tokens that the model sees, V vocabulary.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.optim.optimizer import Tree


def generate(
    apply: Callable[[Tree, jax.Array], jax.Array],
    params: Tree,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    context: int,
    temperature: float,
    seed: int,
    ends: Sequence[int],
) -> list[int]:
    """Continues `prompt`, and returns the new tokens.

    token_t ~ softmax(logits / temperature), drawn with the key `fold_in(key(seed), t)`, where t is
    its position in the whole text: nothing is carried from token to token, so any can be redrawn.

    Each token takes a whole forward pass over one padded shape, so one program is compiled. What
    stands after a token does not change its logits, for the model is causal.

    Args:
      apply: apply(params, tokens_BL) -> logits_BLV.
      params: of the model.
      prompt: token ids, at least one.
      max_new_tokens: after which it stops.
      context: the most tokens the model is shown; beyond it, the first ones drop out of sight.
      temperature: 0 takes the likeliest token each time.
      seed: of the draws.
      ends: tokens that end a text; the one that does is returned as well.
    """
    length = min(context, len(prompt) + max_new_tokens)

    @jax.jit
    def next_token(
        params: Tree, tokens_L: jax.Array, last: jax.Array, position: jax.Array
    ) -> jax.Array:
        logits_V = apply(params, tokens_L[None])[0, last]
        if temperature == 0:
            return jnp.argmax(logits_V)
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.categorical(key, logits_V / temperature)

    tokens = list(prompt)
    for position in range(len(prompt), len(prompt) + max_new_tokens):
        seen = tokens[-length:]
        tokens_L = np.zeros(length, np.int32)
        tokens_L[: len(seen)] = seen
        tokens.append(int(next_token(params, tokens_L, len(seen) - 1, position)))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]
