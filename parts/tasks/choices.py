"""Questions with several choices, scored as lm-evaluation-harness does: the likeliest one counts.

acc_mutual_info: the choice of the highest gain by the context, log p(choice | context) -
log p(choice), so that a common one has no advantage. acc: of the highest log-likelihood after the
context. acc_bytes: of the highest per byte of the choice, so that a long one has a chance. The
first is the main one: by the others, a small model chooses what is common, whatever the context.

Shapes in names: N questions of C choices.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from parts.tasks.likelihood import Likelihood, LikelihoodRequest
from parts.tasks.next_line import Question
from pipeline.scores import Metric
from pipeline.tokens.tokenizer_files import library_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TRIED = 8  # questions that are looked at for each that is asked


class Scores(NamedTuple):
    """Log-likelihoods in nats of each question's choices, [N, C]: after its context, and alone."""

    after_NC: np.ndarray
    alone_NC: np.ndarray


class AskedQuestions(NamedTuple):
    """Questions as requests: C of each question after its context, then C of the choices alone."""

    questions: list[Question]
    requests: list[LikelihoodRequest]


def ask(
    questions: Iterable[Question], tokenizer: "Tokenizer", beginning: int, context: int, count: int
) -> AskedQuestions:
    """Return the requests of the first `count` questions whose choices fit into a model.

    Context and choice are encoded together, so a choice's tokens are those of the whole text. A
    choice alone follows the token that begins a text.

    Args:
      questions: Questions; at most `TRIED` times as many are looked at.
      tokenizer: Tokenizer of the model.
      beginning: The token that begins a text.
      context: Most tokens that the model takes.
      count: Number of questions, at most.

    Raises:
      LockstepError: The tokenizer has no token for a word.
    """
    asked = AskedQuestions([], [])
    for question in islice(questions, TRIED * count):
        wholes = [question.context, *(question.context + choice for choice in question.choices)]
        with library_errors("next_line: expected a tokenizer that encodes any line"):
            before, *whole = (encoding.ids for encoding in tokenizer.encode_batch(wholes))
            parts = tokenizer.encode_batch(list(question.choices), add_special_tokens=False)
        requests = [(before, ids[len(before) :]) for ids in whole]
        requests += [([beginning], part.ids) for part in parts]
        if all(0 < len(continuation) <= context for _, continuation in requests):
            asked.questions.append(question)
            asked.requests.extend(requests)
        if len(asked.questions) == count:
            break
    return asked


def scores_of(asked: AskedQuestions, found: Sequence[Likelihood]) -> Scores:
    """Return the scores of all choices, given those of the requests."""
    logs = [one.log_likelihood for one in found]
    both_N2C = np.reshape(logs, (len(asked.questions), 2, -1))
    return Scores(both_N2C[:, 0], both_N2C[:, 1])


def metrics(questions: Sequence[Question], scores: Scores) -> dict[str, Metric]:
    """Return the shares of right answers, and their standard errors over questions."""
    bytes_NC = np.array([[len(c.encode()) for c in q.choices] for q in questions])
    answers_N = np.array([question.answer for question in questions])
    chosen = {
        "acc_mutual_info": scores.after_NC - scores.alone_NC,
        "acc": scores.after_NC,
        "acc_bytes": scores.after_NC / bytes_NC,
    }
    return {name: _share(x_NC.argmax(axis=1) == answers_N) for name, x_NC in chosen.items()}


def _share(right_N: np.ndarray) -> Metric:
    share, count = float(np.mean(right_N)), len(right_N)
    return Metric(share, (share * (1 - share) / (count - 1)) ** 0.5)
