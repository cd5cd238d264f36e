"""Text generation: a batch of prompts, each token a pure function of its row's tokens before it.

A prompt passes through the model once, and fills a cache of keys and values. From there on the
model gets one new token of each row at a time, in a loop that stays on the device.

Shapes: B rows, P slots of prompts, T tokens at once, C new tokens, E end tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lockstep.optim.optimizer import Tree
from pipeline.language_model.sampling import GREEDY, Draws, Sampling

PROMPT_CHUNK = 256  # tokens of a prompt that pass through the model at once
FEWEST_SLOTS = 16  # slots of the shortest prompt, and new tokens between two looks at them
NO_END = -1
IsDone = Callable[[int, list[int]], bool]


class Steps(Protocol):
    """A model as generation calls it; `pipeline.weights.exported.Exported` is one."""

    @property
    def cache(self) -> Callable[[jax.Array, int], Any]:
        """The writer's function of an empty cache of (first_B, length), as `Architecture.cache`."""

    @property
    def next_logits(self) -> Callable[[Tree, jax.Array, Any], tuple[jax.Array, Any]]:
        """The writer's function from (params, tokens_BT, cache) to next logits_BV and cache."""

    @property
    def by_rules(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What the writer's functions become before they are compiled, as `Exported.by_rules`."""


class _Growing(NamedTuple):
    """The state of a batch of texts that the writer continues, on the device."""

    cache: Any
    last_B: jax.Array
    """Last token of each, which the model has not been given yet."""
    position_B: jax.Array
    """Its position in the whole text."""


class TextWriter:
    """Writes on from prompts, with one model.

    A program is compiled for each size of a batch (powers of two), of prompts and of what is
    written (powers of two up to 256, then multiples of 256), and for greedy and drawn texts.

    Args:
      model: The model.
      params: Its params, as `next_logits` takes them.
      context: Largest number of tokens that the model sees. Where a text has more, its first ones
        are cut off, a quarter of the context at a time, and the rest passes through the model again
        from position 0. Which ones the model sees follows from the length of the text alone.
      ends: Tokens that end a text.
    """

    def __init__(self, model: Steps, params: Tree, *, context: int, ends: Sequence[int] = ()):
        self._params, self._context, self._ends = params, context, frozenset(ends)
        self._ends_E = np.array(sorted(self._ends) or [NO_END], np.int32)
        self._begin = _program(_begin, model)
        self._continue = _program(_continue, model, donate_argnums=1)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        is_done: IsDone | None = None,
    ) -> list[list[int]]:
        """Return the tokens with which the writer continues each prompt; see `pieces`."""
        written: list[list[int]] = [[] for _ in prompts]
        for piece in self.pieces(
            prompts,
            max_new_tokens=max_new_tokens,
            size=max_new_tokens if is_done is None else FEWEST_SLOTS,
            sampling=sampling,
            seeds=seeds,
            is_done=is_done,
        ):
            for text, new in zip(written, piece, strict=True):
                text += new
        return written

    def pieces(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        size: int,
        sampling: Sampling = GREEDY,
        seeds: Sequence[int] | None = None,
        is_done: IsDone | None = None,
    ) -> Iterator[list[list[int]]]:
        """Yield the tokens with which the writer continues each prompt, some at a time.

        A token is drawn as `Draws.draw` says, from the row's seed and the token's position in the
        row's whole text: no state is carried from token to token, and nothing of other rows. The
        logits do depend on the batch, by rounding: other shapes may sum in another order.

        Args:
          prompts: Token ids of each row, at least one; of any lengths.
          max_new_tokens: Largest number of new tokens of a row.
          size: Largest number of tokens of a row in a piece.
          sampling: How tokens are drawn.
          seeds: Seed of each row's draws; None: 0 for all.
          is_done: is_done(row, all its new tokens), called after each piece; true ends the row.

        Yields:
          The new tokens of each row since the last piece, none of a row that has ended. The token
          that ends a text is the last of its row.
        """
        batch = 1 << (len(prompts) - 1).bit_length()
        texts = [list(prompt) for prompt in prompts] + [[0]] * (batch - len(prompts))
        seeds = [*(seeds or [0] * len(prompts)), *[0] * (batch - len(prompts))]
        draws = Draws.seeded(sampling, seeds)
        ended_B = np.arange(batch) >= len(prompts)
        left = max_new_tokens
        while left and not ended_B.all():
            for new_BC in self._window(texts, ended_B, draws, left, size):
                left -= new_BC.shape[1]
                piece = []
                for row, prompt in enumerate(prompts):
                    new = [] if ended_B[row] else self._until_end(new_BC[row].tolist())
                    texts[row] += new
                    ended_B[row] |= not new or new[-1] in self._ends
                    if is_done is not None and not ended_B[row]:
                        ended_B[row] = is_done(row, texts[row][len(prompt) :])
                    piece.append(new)
                yield piece

    def _window(
        self, texts: list[list[int]], ended_B: np.ndarray, draws: Draws, most: int, size: int
    ) -> Iterator[np.ndarray]:
        """Yield up to `most` written tokens of each row, [B, C], until one fills the context.

        `ended_B` may change between two of them; the tokens of a row that has ended mean nothing.
        """
        seen = [
            [0] if ended else text[_first_seen(len(text), self._context) :]
            for text, ended in zip(texts, ended_B, strict=True)
        ]
        longest = max(map(len, seen))
        P = _rounded(longest)
        tokens_BP = np.zeros((len(seen), P), np.int32)
        for row, tokens in enumerate(seen):
            tokens_BP[row, P - len(tokens) :] = tokens
        first_B = np.array([P - len(tokens) for tokens in seen], np.int32)
        position_B = np.array([len(text) for text in texts], np.int32)
        left = min(most, self._context + 1 - longest) - 1
        rows = self._begin(self._params, tokens_BP, first_B, position_B, draws, room=_rounded(left))
        yield np.asarray(rows.last_B)[:, None]
        room = _rounded(min(left, size))
        while left and not ended_B.all():
            rows, count, new_BC = self._continue(
                self._params, rows, ended_B, min(left, size), self._ends_E, draws, room=room
            )
            left -= int(count)
            yield np.asarray(new_BC)[:, : int(count)]

    def _until_end(self, tokens: list[int]) -> list[int]:
        """Return the written tokens up to and including the first that ends a text."""
        stops = (place for place, token in enumerate(tokens, 1) if token in self._ends)
        return tokens[: next(stops, len(tokens))]


def _first_seen(count: int, context: int) -> int:
    """Return the first of `count` tokens that the writer's model sees when it draws the next."""
    at_once = max(1, context // 4)
    return -(-max(0, count - context) // at_once) * at_once


def _rounded(count: int) -> int:
    """Round a number of tokens to write up, so that few shapes are compiled."""
    if count > PROMPT_CHUNK:
        return -(-count // PROMPT_CHUNK) * PROMPT_CHUNK
    return max(FEWEST_SLOTS, 1 << max(0, count - 1).bit_length())


def _program(function: Callable[..., Any], model: Steps, **settings: Any) -> Callable[..., Any]:
    """Return the writer's jitted function of a model; `settings` are those of `jax.jit`."""

    def sized(*given: Any, room: int) -> Any:
        return model.by_rules(partial(function, model, room=room))(*given)

    return jax.jit(sized, static_argnames="room", **settings)


def _begin(
    model: Steps,
    params: Tree,
    tokens_BP: jax.Array,
    first_B: jax.Array,
    position_B: jax.Array,
    draws: Draws,
    *,
    room: int,
) -> _Growing:
    """Pass prompts through the model, and draw the first token of each, at `position_B`."""
    P = tokens_BP.shape[1]
    cache = model.cache(first_B, P + room)
    *chunks, last_BT = jnp.split(tokens_BP, max(1, P // PROMPT_CHUNK), axis=1)
    if chunks:  # scores of all at once would be [B, heads, P, P + room]

        def chunk(cache: Any, tokens_BT: jax.Array) -> tuple[Any, None]:
            return model.next_logits(params, tokens_BT, cache)[1], None

        cache, _ = lax.scan(chunk, cache, jnp.stack(chunks))
    logits_BV, cache = model.next_logits(params, last_BT, cache)
    return _Growing(cache, draws.draw(logits_BV, position_B), position_B)


def _continue(
    model: Steps,
    params: Tree,
    rows: _Growing,
    ended_B: jax.Array,
    limit: jax.Array,
    ends_E: jax.Array,
    draws: Draws,
    *,
    room: int,
) -> tuple[_Growing, jax.Array, jax.Array]:
    """Write up to `limit` tokens, fewer where all rows end; return their count, and [B, room]."""

    def goes_on(state: tuple) -> jax.Array:
        _, ended_B, count, _ = state
        return (count < limit) & ~ended_B.all()

    def step(state: tuple) -> tuple:
        (cache, last_B, position_B), ended_B, count, new_BC = state
        logits_BV, cache = model.next_logits(params, last_B[:, None], cache)
        next_B = draws.draw(logits_BV, position_B + 1)
        ended_B |= (next_B[:, None] == ends_E).any(axis=1)
        new_BC = lax.dynamic_update_slice(new_BC, next_B[:, None], (0, count))
        return _Growing(cache, next_B, position_B + 1), ended_B, count + 1, new_BC

    new_BC = jnp.zeros((len(ended_B), room), jnp.int32)
    rows, _, count, new_BC = lax.while_loop(goes_on, step, (rows, ended_B, jnp.int32(0), new_BC))
    return rows, count, new_BC
