"""Texts of an exported model: what it continues a prompt with, whole or as it is written."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from lockstep.errors import LockstepError
from lockstep.programs.placement import DeviceGroup
from pipeline.language_model.sampling import Sampling
from pipeline.language_model.text_writer import TextWriter
from pipeline.tokens.tokenizer_files import TOKENIZER, encode
from pipeline.weights import exported, hf

AT_ONCE = 8  # tokens between two looks at a text that streams
CUT = "\ufffd"  # what stands for bytes that are no character, such as the first of several


class Continuations:
    """The model of an exported folder, continuing texts.

    Raises:
      LockstepError: The folder is no export, it was refused, or it has no tokenizer.
    """

    def __init__(self, folder: Path, max_new_tokens: int, sampling: Sampling, seed: int):
        if why := hf.why_refused(folder):
            refused = folder / hf.REFUSED
            raise LockstepError(f"{refused}: {why}; expected an export that was accepted")
        model = exported.read(folder)
        if model.tokenizer is None:
            raise LockstepError(
                f"{folder}: found no tokenizer.json, expected one to read and write text with"
            )
        params = DeviceGroup((jax.devices()[0],)).put(model.params_to_write)
        self._folder, self._model = folder, model
        self._writer = TextWriter(model, params, context=model.context, ends=model.ends)
        self._max_new_tokens, self._sampling, self._seed = max_new_tokens, sampling, seed
        if undone := model.texts.not_done(drawn=sampling.temperature > 0):
            print(f"note: {folder} says {undone}: not done here", file=sys.stderr)

    def generate(self, prompts: Sequence[str]) -> list[dict]:
        """Return the continuation of each prompt, in one batch, as `--json` prints it."""
        ids = [self._ids(prompt) for prompt in prompts]
        written = self._writer.write(
            ids,
            max_new_tokens=self._max_new_tokens,
            sampling=self._sampling,
            seeds=[self._seed] * len(ids),
        )
        return [
            {
                "prompt": prompt,
                "text": self._text(before, new),
                "tokens": new,
                "ended": bool(new) and new[-1] in self._model.ends,
            }
            for prompt, before, new in zip(prompts, ids, written, strict=True)
        ]

    def stream(self, prompt: str) -> Iterator[str]:
        """Yield a prompt, and its continuation as it is written, each character once complete."""
        before, new, yielded = self._ids(prompt), [], ""
        yield prompt
        for [piece] in self._writer.pieces(
            [before],
            max_new_tokens=self._max_new_tokens,
            size=AT_ONCE,
            sampling=self._sampling,
            seeds=[self._seed],
        ):
            new += piece
            text = self._text(before, new).rstrip(CUT)
            yield text[len(yielded) :]
            yielded = text
        yield self._text(before, new)[len(yielded) :]

    def _ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt to continue; for an empty one, that which begins a text."""
        ids = encode(self._model.tokenizer, prompt, f"{self._folder}/{TOKENIZER}, the prompt")
        if not ids and self._model.beginning is None:
            raise LockstepError(
                f"the prompt is empty, expected text: {self._folder} has no bos_token_id to begin "
                "with"
            )
        vocab_size = self._model.config.vocab_size
        if ids and max(ids) >= vocab_size:
            raise LockstepError(
                f"{self._folder}/tokenizer.json has token {max(ids)} in the prompt, expected ids "
                f"below the model's vocab_size ({vocab_size})"
            )
        return ids or [self._model.beginning]

    def _text(self, before: list[int], new: list[int]) -> str:
        """Return the generated text of the new tokens, with those before, since some join words."""
        decode = self._model.tokenizer.decode
        start, whole = decode(before), decode(before + new)
        return whole[len(start) :] if whole.startswith(start) else decode(new)
