"""A model as tasks see it: text in, log-likelihoods and text out.

It is made of an exported folder, or of params while they train: whoever has them.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.optim.optimizer import Tree
from lockstep.programs.placement import DeviceGroup
from parts.tasks import likelihood
from parts.tasks.likelihood import Likelihood, LikelihoodRequest
from pipeline.language_model.text_writer import TextWriter
from pipeline.tokens.tokenizer_files import SETTINGS
from pipeline.weights.exported import Exported


class TaskModel(NamedTuple):
    """The model as tasks use it.

    Attributes:
      score: Its program, of `likelihood.program`.
      writer: writer(group), what writes texts with it on a device group.
      params_on: A copy of the params on each device group that may help.
      tokenizer: Its tokenizer.
      context: Most tokens that it takes.
      vocab_size: Bound of its tokens; a tokenizer may have more.
      batch_size: Requests that are computed at once.
      beginning: The token that stands before a text where a task gives no context.
      ends: Tokens that end a text.
    """

    score: likelihood.Program
    writer: Callable[[DeviceGroup], TextWriter]
    params_on: Mapping[DeviceGroup, Tree]
    tokenizer: Tokenizer
    context: int
    vocab_size: int
    batch_size: int
    beginning: int
    ends: Sequence[int]

    def log_likelihoods(
        self, requests: Sequence[LikelihoodRequest], advance: Callable[[int], None] = lambda _: None
    ) -> list[Likelihood]:
        """Return the scores of requests, in their order; see `likelihood.log_likelihoods`."""
        return likelihood.log_likelihoods(
            self.score,
            self.params_on,
            requests,
            context=self.context,
            batch_size=self.batch_size,
            advance=advance,
        )


def from_folder(
    exported: Exported, folder: Path, params_on: Mapping[DeviceGroup, Tree], batch_size: int
) -> TaskModel:
    """Return the model of an exported folder, which `exported.read` has read.

    Raises:
      LockstepError: It has no tokenizer, or no token that may begin a text.
    """

    def writer(group: DeviceGroup) -> TextWriter:
        params = group.put(exported.params_to_write)
        return TextWriter(exported, params, context=exported.context, ends=exported.ends)

    if exported.tokenizer is None:
        raise LockstepError(f"{folder}: no tokenizer.json, expected one: tasks are texts")
    named = _named(folder / SETTINGS, exported.tokenizer)
    beginning = next((token for token in named if token is not None), None)
    if beginning is None:
        beginning = exported.beginning
    if beginning is None:
        raise LockstepError(
            f"{folder}: found no bos_token_id and no eos_token_id in config.json, expected one"
        )
    if beginning >= (known := exported.config.vocab_size):
        raise LockstepError(
            f"{folder / SETTINGS}: a text begins with token {beginning}, expected one below the "
            f"model's vocab_size ({known})"
        )
    return TaskModel(
        likelihood.program(exported.features, exported.head),
        writer,
        params_on,
        exported.tokenizer,
        exported.context,
        known,
        batch_size,
        beginning,
        exported.ends,
    )


def _named(path: Path, tokenizer: Tokenizer) -> list[int | None]:
    """The ids of bos_token and eos_token, if tokenizer_config.json names them."""
    settings = read_json(path) if path.exists() else {}
    names = [settings.get(key) for key in ("bos_token", "eos_token")]
    texts = [name.get("content") if isinstance(name, dict) else name for name in names]
    return [tokenizer.token_to_id(text) if isinstance(text, str) else None for text in texts]
