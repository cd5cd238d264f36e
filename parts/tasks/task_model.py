"""A model as tasks see it: text in, log-likelihoods and text out.

It is made of an exported folder, or of params while they train. A request's score says how likely
the model finds a continuation after a context:

  log_likelihood = sum over t of log p(continuation_t | context, continuation_<t)

Requests with equal inputs, such as the one-token choices of a question, are one row. A row is
padded to one of few lengths, each of which is a program: as few as make compiling and computing
together cheapest. A padded row may have other last bits, so its length depends on the requests and
the model's size alone, on no machine, and a lot has rows of one length. The models are causal: what
follows a token does not change its features. The head multiplies the features of predicted tokens
only, some at a time, so logits need little memory.

Shapes in names: B rows of T tokens, N = B * T, of which `count` are predictions; C of these at a
time; D width, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup, side_by_side
from pipeline.language_model.text_writer import TextWriter
from pipeline.weights.exported import Exported
from pipeline.weights.text_settings import TextSettings

TOGETHER = 128  # predictions whose logits are computed at a time: a few MB, and large enough
SHORTEST_ROW = 16  # tokens of a padded row, at least
FINER_TOKENS = 64  # tokens, from which on there are more lengths to choose from
COMPILING = 2e11  # floating-point operations that take as long as to compile: 4 seconds of 2 cores
FEWEST_ROWS = 8  # rows of a lot, which has no more than it needs where one lot takes all

LikelihoodRequest = tuple[Sequence[int], Sequence[int]]  # context, continuation


class Likelihood(NamedTuple):
    """The score of one request by the task model."""

    log_likelihood: float  # log-likelihood of the continuation, in nats
    greedy: bool  # whether each token of it is the model's likeliest one
    tokens: int  # number of its tokens


class _Row(NamedTuple):
    """Requests to a task model with equal inputs: their numbers and continuations."""

    inputs: tuple[int, ...]
    requests: list[tuple[int, tuple[int, ...]]]


class _Lot(NamedTuple):
    """Rows as the task model's program takes them; prediction n is `labels_N[n]`, of a place.

    `owners` are the numbers of the requests, and the number of predictions of each.
    """

    tokens_BT: np.ndarray
    places_N: np.ndarray
    labels_N: np.ndarray
    count: int
    owners: list[tuple[int, int]]


Program = Callable[..., tuple[jax.Array, jax.Array]]


def program(features: Callable[..., jax.Array], head: Callable[[Tree], jax.Array]) -> Program:
    """Return the task model's jitted program that scores a lot; keep it: new ones compile anew.

    Args:
      features: features(params, tokens_BT) -> x_ND, the inputs of the head.
      head: head(params) -> kernel_DV.
    """

    def score(
        params: Tree, tokens_BT: jax.Array, places_N: jax.Array, labels_N: jax.Array, count: int
    ) -> tuple[jax.Array, jax.Array]:
        x_ND = features(params, tokens_BT)
        kernel_DV = head(params).astype(x_ND.dtype)
        C = min(TOGETHER, places_N.size)

        def body(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple:
            first = turn * C
            places_C = jax.lax.dynamic_slice(places_N, (first,), (C,))
            labels_C = jax.lax.dynamic_slice(labels_N, (first,), (C,))
            logits_CV = jnp.dot(x_ND[places_C], kernel_DV, preferred_element_type=jnp.float32)
            label_logits_C = jnp.take_along_axis(logits_CV, labels_C[:, None], axis=-1)[:, 0]
            logs_C = label_logits_C - jax.nn.logsumexp(logits_CV, axis=-1)
            likeliest_C = jnp.argmax(logits_CV, axis=-1) == labels_C
            put = jax.lax.dynamic_update_slice
            return put(carry[0], logs_C, (first,)), put(carry[1], likeliest_C, (first,))

        start = jnp.zeros(places_N.size), jnp.zeros(places_N.size, bool)
        return jax.lax.fori_loop(0, -(-count // C), body, start)

    return jax.jit(score)


def _rows(requests: Sequence[LikelihoodRequest], context: int) -> list[_Row]:
    """The requests to a task model as rows of inputs."""
    rows: dict[tuple[int, ...], list[_Row]] = {}
    for number, (before, continuation) in enumerate(requests):
        if not len(before) or not 0 < len(continuation) <= context:
            raise LockstepError(
                f"request {number}: a context of {len(before)} tokens and a continuation of "
                f"{len(continuation)}, expected at least 1, and 1 to {context}, the model's context"
            )
        inputs = (*before, *continuation)[-context - 1 : -1]
        same = rows.setdefault(inputs, [])
        # a lot of B x T tokens has room for as many predictions
        room = padded_length(len(inputs), context)
        total = sum(len(other) for _, other in same[-1].requests) if same else room
        if total + len(continuation) > room:
            same.append(_Row(inputs, []))
        same[-1].requests.append((number, tuple(continuation)))
    return [row for same in rows.values() for row in same]


def _lots(rows: Sequence[_Row], size: int, lengths: Sequence[int]) -> Iterator[_Lot]:
    """The task model's rows in lots of one length, longest first: the most memory fails at once."""
    padded = [min(length for length in lengths if length >= len(row.inputs)) for row in rows]
    for length in sorted(lengths, reverse=True):
        batch = [row for row, own in zip(rows, padded, strict=True) if own == length]
        for start in range(0, len(batch), size):
            yield _lot(batch[start : start + size], size, length)


def _lot(rows: Sequence[_Row], size: int, length: int) -> _Lot:
    tokens_BT = np.zeros((size, length), np.int32)
    room = -(-size * length // TOGETHER) * TOGETHER
    places_N, labels_N = np.zeros((2, room), np.int32)
    owners, count = [], 0
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row.inputs)] = row.inputs
        end = index * length + len(row.inputs)
        for request, continuation in row.requests:
            own = slice(count, count + len(continuation))
            places_N[own] = np.arange(end - len(continuation), end)
            labels_N[own] = continuation
            owners.append((request, len(continuation)))
            count += len(continuation)
    return _Lot(tokens_BT, places_N, labels_N, count, owners)


def padded_length(length: int, most: int) -> int:
    """Return the length that a task model pads a row to: `most` at most.

    16, 24, 32, 48, and from 64 on four lengths up to the next power of two: 64, 80, 96, 112.
    """
    power = SHORTEST_ROW
    while 2 * power < length:
        power *= 2
    step = power // (4 if power >= FINER_TOKENS else 2)
    return min(max(power, -(-length // step) * step), most)


def cheapest_lengths(rows_of: Mapping[int, int], compiling: float) -> tuple[int, ...]:
    """Return the padded lengths that cost the task model least, each row having the next one.

    The cost is the tokens of all rows, and `compiling` tokens for each length; `rows_of` counts the
    rows by padded length. The best lengths up to one are those up to a shorter one, and that one.
    """
    lengths = sorted(rows_of)
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for end, longest in enumerate(lengths, 1):
        tries = []
        for start, (cost, chosen) in enumerate(best):
            rows = sum(rows_of[length] for length in lengths[start:end])
            tries.append((cost + compiling + longest * rows, (*chosen, longest)))
        best.append(min(tries))
    return best[-1][1]


class TaskModel(NamedTuple):
    """The model as tasks use it."""

    score: Program  # its program, of `program`
    # writer(group), what writes texts with it on a device group
    writer: Callable[[DeviceGroup], TextWriter]
    params_on: Mapping[DeviceGroup, Tree]  # A copy of the params on each device group that may help
    tokenizer: Tokenizer
    context: int  # most tokens that it takes
    vocab_size: int  # bound of its tokens; a tokenizer may have more
    batch_size: int  # requests that are computed at once
    beginning: int  # the token that stands before a text where a task gives no context
    texts: TextSettings  # what its folder says of texts

    def log_likelihoods(
        self, requests: Sequence[LikelihoodRequest], advance: Callable[[int], None] = lambda _: None
    ) -> list[Likelihood]:
        """Return the task model's scores of requests, in their order.

        Of context and continuation, the model sees the last `context` tokens before the last one.
        `advance` is called with the number of requests that were scored since its last call.

        Raises:
          LockstepError: A context or a continuation is empty, or a continuation is too long.
        """
        if not requests:
            return []
        groups = list(self.params_on)
        parts = len(groups[0].devices)
        rows = _rows(requests, self.context)
        size = min(self.batch_size, -(-len(rows) // FEWEST_ROWS) * FEWEST_ROWS)
        size = -(-size // parts) * parts
        padded = Counter(padded_length(len(row.inputs), self.context) for row in rows)
        lengths = cheapest_lengths(padded, self._compiling)
        scores: list[Likelihood | None] = [None] * len(requests)

        def work(lot: _Lot, group: DeviceGroup) -> None:
            places = group.whole((lot.places_N, lot.labels_N, np.int32(lot.count)))
            tokens_BT = group.rows(lot.tokens_BT, axis=0)
            scored = self.score(self.params_on[group], tokens_BT, *places)
            logs_N, likeliest_N = group.fetch(scored)
            first = 0
            for request, tokens in lot.owners:
                own = slice(first, first + tokens)
                log = float(np.sum(logs_N[own], dtype=np.float64))
                scores[request] = Likelihood(log, bool(likeliest_N[own].all()), tokens)
                first += tokens
            advance(len(lot.owners))

        side_by_side(groups, list(_lots(rows, size, lengths)), work)
        return [score for score in scores if score is not None]

    @property
    def _compiling(self) -> float:
        """What compiling a task model's program costs, in tokens of a forward pass."""
        params = next(iter(self.params_on.values()))
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        return COMPILING / (2 * count)


def from_folder(
    exported: Exported, folder: Path, groups: Iterable[DeviceGroup], batch_size: int
) -> TaskModel:
    """Return the task model of an exported folder, which `exported.read` has read.

    Raises:
      LockstepError: It has no tokenizer, or no token that may begin a text.
    """

    def writer(group: DeviceGroup) -> TextWriter:
        params = group.put(exported.params_to_write)
        return TextWriter(exported, params, context=exported.context, ends=exported.ends)

    if exported.tokenizer is None:
        raise LockstepError(f"{folder}: no tokenizer.json, expected one: tasks are texts")
    if (beginning := exported.beginning) is None:
        raise LockstepError(f"{folder}: found no bos_token_id and no eos_token_id, expected one")
    return TaskModel(
        exported.by_rules(program(exported.features, exported.head)),
        writer,
        {group: group.put(exported.params) for group in groups},
        exported.tokenizer,
        exported.context,
        exported.config.vocab_size,
        batch_size,
        beginning,
        exported.texts,
    )
