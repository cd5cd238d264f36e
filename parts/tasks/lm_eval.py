"""A task model with the methods by which lm-evaluation-harness asks a model.

Truncation and stopping are those of lm_eval's own `hf` backend on the exported folder, and so are
tokens, but where one joins a context to its continuation (`two_parts`); numbers differ by rounding.
"""

import json
import logging
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as cut_at_stops

from lockstep.errors import LockstepError
from lockstep.machine.progress import Progress
from lockstep.programs.placement import DeviceGroup, side_by_side
from parts.tasks import two_parts
from parts.tasks.task_model import TaskModel
from pipeline.language_model.sampling import Sampling
from pipeline.weights import text_settings

log = logging.getLogger(__name__)

NEW_TOKENS = 256  # of a text, where a task names no number: as in the backend `hf`
KNOWN = {"until", "do_sample", "max_gen_toks"}  # settings of a text, and those that are drawn with


class LmEvalModel(TemplateLM):
    """A model of ours, with lm_eval's methods; `seed` is that of texts that a task samples."""

    def __init__(self, model: TaskModel, seed: int = 0):
        super().__init__()
        self.model, self.seed = model, seed
        self.tokenizer = model.tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, for lm_eval."""
        return next(iter(self.model.texts.ends), self.model.beginning)

    @property
    def prefix_token_id(self) -> int:
        """The token that lm_eval puts before a text without context."""
        return self.model.beginning

    @property
    def max_length(self) -> int:
        """Largest number of tokens that the model takes, for lm_eval."""
        return self.model.context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return lm_eval the tokens of a text, see `two_parts.encode`."""
        ids = two_parts.encode(self.tokenizer, self.model.beginning, string, add_special_tokens)
        if ids and max(ids) >= self.model.vocab_size:
            raise LockstepError(
                f"tokenizer.json has token {max(ids)} in a text, expected ids below the model's "
                f"vocab_size ({self.model.vocab_size})"
            )
        return ids

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return lm_eval the text of tokens."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens)

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Return lm_eval each continuation's log-likelihood, and whether the model chooses it."""
        asked: list[tuple] = []
        for (*_, context), choices in groupby(  # the choices of a question together
            requests, lambda one: (one.task_name, one.doc_id, one.args[0])
        ):
            texts = [one.args[1] for one in choices]
            parts = two_parts.in_two_parts(self.tok_encode, self.model.beginning, context, texts)
            asked += [(None, *pair) for pair in parts]
        return self._loglikelihood_tokens(asked)

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        with Progress("evaluate", total=len(requests), unit="request") as bar:
            scores = self.model.log_likelihoods(
                [(context, continuation) for _, context, continuation in requests], bar.advance
            )
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return lm_eval each text's log-likelihood: every token of it is predicted once.

        Too long a text is cut into windows; all but the first have at least one token of context.
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
        scores = self._loglikelihood_tokens(windows)
        for number, (log_likelihood, _) in zip(owners, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Return lm_eval what the model writes after each context, up to a text that stops it.

        A context is cut on the left to leave room for what is asked for. Request n is sampled with
        the seed + n, so that a document that is asked several times gets several answers.
        """
        texts = [""] * len(requests)
        writers = {group: self.model.writer(group) for group in self.model.params_on}
        with Progress("evaluate", total=len(requests), unit="request") as bar:

            def write(lot: _Prompts, group: DeviceGroup) -> None:
                written = writers[group].write(
                    lot.prompts,
                    max_new_tokens=lot.max_new_tokens,
                    sampling=lot.sampling,
                    seeds=[self.seed + number for number in lot.numbers],
                    is_done=lambda _, tokens: self._stops(tokens, lot.stops),
                )
                for number, tokens in zip(lot.numbers, written, strict=True):
                    end = bisect_left(
                        range(len(tokens)), True, key=lambda n: self._stops(tokens[:n], lot.stops)
                    )
                    texts[number] = cut_at_stops(self.tok_decode(tokens[:end]), lot.stops, None)
                bar.advance(len(lot.numbers))

            side_by_side(list(writers), self._prompts(requests), write)
        return texts

    def _stops(self, tokens: list[int], stops: list[str]) -> bool:
        """Whether a text for lm_eval has a stop, which may be a special token or have one in it."""
        text = self.tok_decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in stops)

    def _settings(self, given: dict[str, Any]) -> tuple[dict[str, Any], Sampling]:
        """Return a task's settings of a text from lm_eval, and how its tokens are drawn.

        What it does not say of a drawn text is as the folder or else transformers has it.
        """
        settings = normalize_gen_kwargs(given, NEW_TOKENS)
        drawn = settings["do_sample"]
        if undone := ", ".join(text_settings.not_done(settings, drawn=drawn, known=KNOWN)):
            raise LockstepError(
                f"[evaluate] tasks: generation_kwargs has {undone}, which is not done here, "
                f"expected some of {', '.join(sorted(KNOWN | set(text_settings.DRAWN)))}"
            )
        if undone := self.model.texts.not_done(drawn=drawn):
            log.warning(f"evaluate: texts of tasks go without {undone} of the model's files")
        if not drawn:
            return settings, Sampling()
        own = text_settings.DRAWN | dict(self.model.texts.generation) | settings
        return settings, Sampling(*(own[key] for key in text_settings.DRAWN))

    def _prompts(self, requests: list[Instance]) -> list["_Prompts"]:
        """lm_eval's requests in lots of equal settings, the longest prompts first."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        lots = []
        for numbers in by_settings.values():
            settings, sampling = self._settings(requests[numbers[0]].args[1])
            room = self.max_length - settings["max_gen_toks"]
            if room < 1:
                raise LockstepError(
                    f"[evaluate] tasks: a task asks for {settings['max_gen_toks']} new tokens, "
                    f"expected fewer than {self.max_length}, the model's context"
                )
            end = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
            stops = [stop for stop in handle_stop_sequences(settings["until"], end) if stop]
            prompts = {n: self.tok_encode(requests[n].args[0])[-room:] for n in numbers}
            ordered = sorted(numbers, key=lambda n: -len(prompts[n]))  # noqa: B023 - used at once
            for start in range(0, len(ordered), self.model.batch_size):
                batch = ordered[start : start + self.model.batch_size]
                contexts = [prompts[n] or [self.prefix_token_id] for n in batch]
                lots.append(_Prompts(batch, contexts, stops, settings["max_gen_toks"], sampling))
        return lots


class _Prompts(NamedTuple):
    """lm_eval's requests whose texts are written together: numbers, and what they share."""

    numbers: list[int]
    prompts: list[list[int]]
    stops: list[str]
    max_new_tokens: int
    sampling: Sampling
