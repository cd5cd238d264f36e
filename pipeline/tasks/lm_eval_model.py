"""A model of ours as a model of lm-evaluation-harness.

Tokens, truncation and stopping are those of lm_eval's own `hf` backend on the exported folder, so
requests get the same numbers but for rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as cut_at_stops

from pipeline.errors import LockstepError
from pipeline.programs.generate import generate
from pipeline.stage.progress import Progress
from pipeline.tasks.task_model import TaskModel

NEW_TOKENS = 256  # of a text, where a task names no number: as in the backend `hf`
REMEMBERED = 64  # texts whose tokens are kept: the choices of a question share their context


class LmEvalModel(TemplateLM):
    """A model of ours, with lm_eval's methods.

    Args:
      model: The model.
      seed: Seed of texts that a task samples.
    """

    def __init__(self, model: TaskModel, seed: int = 0):
        super().__init__()
        self.model, self.seed = model, seed
        self.tokenizer = model.tokenizer
        beginning = self.tok_decode([model.beginning], skip_special_tokens=False)

        @lru_cache(REMEMBERED)
        def encode(text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
            if add_special_tokens is None:
                add_special_tokens = not text.startswith(beginning)
            return tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

        self._encode = encode

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.model.ends[0] if self.model.ends else self.model.beginning

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        return self.model.beginning

    @property
    def max_length(self) -> int:
        """Most tokens that the model takes."""
        return self.model.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text, with special ones as the tokenizer adds them.

        None are added to a text that begins with them already.
        """
        return list(self._encode(string, add_special_tokens))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether the model would choose it."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        with _bar(len(requests)) as advance:
            found = self.model.log_likelihoods(
                [(context, continuation) for _, context, continuation in requests], advance
            )
        return [(score.log_likelihood, score.greedy) for score in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return each text's log-likelihood: every token of it is predicted once.

        A text longer than the model is cut into windows; all but the first have one token of
        context at least.
        """
        windows, owners = [], []
        for number, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, rolling):
                windows.append((None, *window))
                owners.append(number)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows)
        for number, (log_likelihood, _) in zip(owners, found, strict=True):
            totals[number] += log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return what the model writes after each context, up to a text that stops it."""
        with _bar(len(requests)) as advance:
            return [self._write(*request.args, advance) for request in requests]

    def _write(self, context: str, given: dict, advance: Callable[[int], None]) -> str:
        wanted = normalize_gen_kwargs(given, NEW_TOKENS)
        stops = handle_stop_sequences(
            wanted["until"], self.tok_decode([self.eot_token_id], skip_special_tokens=False)
        )
        room = self.max_length - wanted["max_gen_toks"]
        if room < 1:
            raise LockstepError(
                f"a task asks for {wanted['max_gen_toks']} new tokens, expected fewer than "
                f"{self.max_length}, the model's context"
            )
        group, params = next(iter(self.model.params_on.items()))
        del group
        written = generate(
            self.model.apply,
            params,
            self.tok_encode(context)[-room:],
            max_new_tokens=wanted["max_gen_toks"],
            context=self.max_length,
            temperature=wanted["temperature"] if wanted["do_sample"] else 0.0,
            seed=self.seed,
            ends=self.model.ends,
        )
        advance(1)
        return cut_at_stops(self.tok_decode(written), stops, None)


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    with Progress("evaluate", total=total, unit="request") as bar:
        yield bar.advance
