"""Text generation: one token at a time, each a pure function of the tokens before it.

Shapes: L tokens of context, V vocabulary.
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
    """Return the tokens that continue `prompt`.

    token_t ~ softmax(logits / temperature), drawn with the key `fold_in(key(seed), t)`, where t is
    its position in the whole text: no state is carried from token to token.

    Each token takes a whole forward pass over one padded shape, so a single program is compiled.
    The model is causal: what follows a token does not change its logits.

    Args:
      apply: Model, as apply(params, tokens_BL) -> logits_BLV.
      params: Params of the model.
      prompt: Token ids, at least one.
      max_new_tokens: Largest number of new tokens.
      context: Largest number of tokens that the model sees; earlier ones are cut off.
      temperature: Temperature of the softmax; 0 takes the likeliest token each time.
      seed: Seed of the draws.
      ends: Tokens that end a text; the one that does is returned as well.
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
