"""`lockstep` as a model of lm-evaluation-harness: an exported folder in its command line and API.

    python -m parts.tasks.lm_eval run --model lockstep --model_args pretrained=data/export --tasks T

    import lm_eval, parts.tasks.lm_eval
    lm_eval.simple_evaluate("lockstep", "pretrained=data/export", tasks=["arc_easy"])

lm_eval finds no models of other packages by itself, so this module registers it as it is imported.
Tokens, truncation and stopping are those of lm_eval's own `hf` backend on the exported folder, so
requests get the same numbers but for rounding.
"""

import json
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from lm_eval import utils
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.models.utils import postprocess_generated_text as cut_at_stops

from lockstep.errors import LockstepError
from lockstep.machine.jax_settings import check_settings
from lockstep.machine.progress import Progress
from lockstep.programs.placement import DeviceGroup, device_groups, side_by_side
from parts.tasks import task_model
from parts.tasks.task_model import TaskModel
from pipeline.language_model.draw import Sampling
from pipeline.weights import exported

BATCH_SIZE = 32  # as `[evaluate] batch_size`


NEW_TOKENS = 256  # of a text, where a task names no number: as in the backend `hf`
REMEMBERED = 64  # texts whose tokens are kept: the choices of a question share their context


class LmEvalModel(TemplateLM):
    """A model of ours, with lm_eval's methods; `seed` is that of texts that a task samples."""

    def __init__(self, model: TaskModel, seed: int = 0):
        super().__init__()
        self.model, self.seed = model, seed
        self.tokenizer = model.tokenizer
        beginning = self.tok_decode([model.beginning], skip_special_tokens=False)

        @lru_cache(REMEMBERED)
        def encode(text: str, add_special_tokens: bool | None) -> tuple[int, ...]:
            if add_special_tokens is None:
                add_special_tokens = not text.startswith(beginning)
            ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            if ids and max(ids) >= model.vocab_size:
                raise LockstepError(
                    f"tokenizer.json has token {max(ids)} in a text, expected ids below the "
                    f"model's vocab_size ({model.vocab_size})"
                )
            return tuple(ids)

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
        """Largest number of tokens that the model takes."""
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
        with Progress("evaluate", total=len(requests), unit="request") as bar:
            scores = self.model.log_likelihoods(
                [(context, continuation) for _, context, continuation in requests], bar.advance
            )
        return [(score.log_likelihood, score.greedy) for score in scores]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Return each text's log-likelihood: every token of it is predicted once.

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
        """Return what the model writes after each context, up to a text that stops it.

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
                    is_done=lambda _, tokens: any(
                        stop in self.tok_decode(tokens) for stop in lot.stops
                    ),
                )
                for number, tokens in zip(lot.numbers, written, strict=True):
                    texts[number] = cut_at_stops(self.tok_decode(tokens), lot.stops, None)
                bar.advance(len(lot.numbers))

            side_by_side(list(writers), self._prompts(requests), write)
        return texts

    def _prompts(self, requests: list[Instance]) -> list["_Prompts"]:
        """The requests in lots of equal settings, the longest prompts first."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        lots = []
        for numbers in by_settings.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], NEW_TOKENS)
            room = self.max_length - settings["max_gen_toks"]
            if room < 1:
                raise LockstepError(
                    f"[evaluate] tasks: a task asks for {settings['max_gen_toks']} new tokens, "
                    f"expected fewer than {self.max_length}, the model's context"
                )
            end = self.tok_decode([self.eot_token_id], skip_special_tokens=False)
            stops = [stop for stop in handle_stop_sequences(settings["until"], end) if stop]
            sampling = Sampling(
                settings["temperature"] if settings["do_sample"] else 0.0,
                settings.get("top_k"),
                settings.get("top_p", 1.0),
            )
            prompts = {n: self.tok_encode(requests[n].args[0])[-room:] for n in numbers}
            ordered = sorted(numbers, key=lambda n: -len(prompts[n]))  # noqa: B023 - used at once
            for start in range(0, len(ordered), self.model.batch_size):
                batch = ordered[start : start + self.model.batch_size]
                contexts = [prompts[n] or [self.prefix_token_id] for n in batch]
                lots.append(_Prompts(batch, contexts, stops, settings["max_gen_toks"], sampling))
        return lots


class _Prompts(NamedTuple):
    """Requests whose texts are written together: their numbers, and what they have in common."""

    numbers: list[int]
    prompts: list[list[int]]
    stops: list[str]
    max_new_tokens: int
    sampling: Sampling


@register_model("lockstep")
class LockstepModel(LmEvalModel):
    """An exported folder, computed by JAX on all devices that it sees.

    Args:
      pretrained: The folder.
      batch_size: Requests that are computed at once; "auto": 32.
      max_batch_size: The same, where batch_size is "auto".
      device: Of no effect, since lm_eval's command line always names one; `JAX_PLATFORMS` chooses.
      seed: Seed of texts that a task samples.

    Raises:
      LockstepError: The folder is no export, or has no tokenizer; or JAX is set to 64 bits.
    """

    def __init__(
        self,
        pretrained: str,
        batch_size: int | str = "auto",
        max_batch_size: int | None = None,
        device: str | None = None,
        seed: int = 0,
    ):
        try:
            size = max_batch_size or BATCH_SIZE if batch_size == "auto" else int(batch_size)
        except ValueError:
            raise LockstepError(f"batch_size is {batch_size}, expected a number or auto") from None
        check_settings("lm_eval --model lockstep")
        folder = Path(pretrained)
        export = exported.read(folder)
        groups = device_groups(jax.devices(), 1)
        super().__init__(task_model.from_folder(export, folder, groups, size), seed)


def main() -> None:
    """Run lm_eval's command line, with this model among the others."""
    try:
        cli_evaluate()
    except LockstepError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
