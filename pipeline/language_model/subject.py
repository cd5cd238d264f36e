"""A language model of `models/` as what a run trains; its model is a config.json."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.files import read_json
from lockstep.machine.progress import Progress
from lockstep.optim.optimizer import Tree
from lockstep.programs.train_step import Programs
from pipeline import runfile
from pipeline.language_model import held_out, language_model
from pipeline.language_model.held_out import HeldOutRows, MeanLoss
from pipeline.tokens.shards import Shards
from pipeline.weights import exported, hf, model_folder
from pipeline.weights.exported import Exported
from pipeline.weights.hf import param_shapes
from pipeline.weights.model_folder import TrainedModel

HEADER = "the model"  # what errors call one that was checked before


class LanguageModelExports:
    """A Hugging Face folder; `pipeline.subject.Exports`."""

    model_file, card = hf.CONFIG, None

    def export(self, run: runfile.Run, trained: TrainedModel, folder: Path) -> None:
        """Write a language model as a Hugging Face folder."""
        with Progress("export", total=trained.params.nbytes, unit="byte") as bar:
            model_folder.write(folder, run, trained, bar.advance)

    def export_weights(
        self, run: runfile.Run, model: dict[str, Any], params: Tree, folder: Path
    ) -> None:
        """Write a language model's config.json and safetensors."""
        config = model_folder.with_context(model, run.llm.max_seq_len)
        hf.write_folder(folder, config, params, run.export.dtype)

    def exported_params(self, model: dict[str, Any], folder: Path) -> Tree:
        """Return the params of an exported language model, of a Hugging Face folder."""
        return hf.read_folder(folder)[1]

    def open_export(
        self, run: runfile.Run, model: dict[str, Any], folder: Path, shards: Path | None = None
    ) -> "OpenedLanguageModel":
        """Read an exported language model's folder with layers as the run has them."""
        return OpenedLanguageModel(run, folder, exported.read(folder, run.peers))


class LanguageModelSubject:
    """A language model; a `pipeline.subject.Subject`."""

    checkpoints = "Hub", "P2P", "Gcs", "P2PGcs", "Init", "Run"
    begins, exports = None, LanguageModelExports()
    described_in, any_rows = f"hf/{hf.CONFIG}", False
    loss_unit, has_perplexity = "nats per token", True
    draws, memory_unknown = False, ""

    def trains(self, run: runfile.Run) -> bool:
        """Return true: whether a run trains a language model is asked after all others."""
        return True

    def check_public(self, run: runfile.Run, where: object) -> None:
        """Do nothing: what is published of a language model has all that it needs."""

    def describes(self, model: dict[str, Any]) -> bool:
        """Return whether the model is the config.json of a language model."""
        return "model_type" in model

    # ---- What it says of itself ----

    def read_model(self, run: runfile.Run, path: Path, listed: Shards | None) -> dict[str, Any]:
        """Return the language model's config.json."""
        return read_json(path)

    def check_model(self, run: runfile.Run, model: dict[str, Any], where: object) -> None:
        """Check that `models/` has the language model's architecture."""
        hf.model_of(model, where)

    def title(self, model: dict[str, Any]) -> str:
        """Return the language model's architecture."""
        return model["model_type"]

    def parameters(self, model: dict[str, Any]) -> int:
        """Return how many parameters the language model has."""
        return sum(map(math.prod, param_shapes(*hf.model_of(model, HEADER)).values()))

    def vocab_size(self, model: dict[str, Any]) -> int | None:
        """Return the size of the language model's vocabulary."""
        return model["vocab_size"]

    def code(self, model: dict[str, Any]) -> None:
        """Return None: all code of a language model is of models/."""

    def repeats(self, run: runfile.Run) -> bool:
        """Return True: a language model's step that does not is a fault of this machine."""
        return True

    def computed_by(
        self, run: runfile.Run, model: dict[str, Any], environment: dict[str, str]
    ) -> str:
        """Return how the language model computes attention, and in which precision."""
        return f"attention by {run.peers.attention}, in {run.peers.precision}"

    # ---- How it is trained ----

    def extend(self, run: runfile.Run, earlier: dict[str, Any], where: str, folder: Path) -> None:
        """Check that the earlier run trained a language model of this architecture."""
        if not self.describes(earlier):
            raise LockstepError(
                f"{where} trained no model of models/, expected one, or what it trained in "
                "[workload]"
            )
        hf.check_architecture(run.llm.architecture, hf.read_config(folder / "hf"), where)

    programs = staticmethod(language_model.programs_of)

    def row_weights(
        self, programs: Programs, params: Tree, rows_NW: np.ndarray
    ) -> np.ndarray | None:
        """Return how many predictions of a language model count in each row, if they differ."""
        del params
        return held_out.weights_of(rows_NW, programs.task.columns)

    def counted_rows(self, run: runfile.Run, model: dict[str, Any], shards: Path) -> None:
        """Return None: a language model's loss needs the held-out rows alone."""


class OpenedLanguageModel:
    """An exported language model; a `pipeline.subject.OpenedExport`."""

    def __init__(self, run: runfile.Run, folder: Path, texts: Exported):
        self._run, self._folder, self.texts = run, folder, texts

    def held_out_loss(self, data: HeldOutRows) -> MeanLoss:
        """Return the language model's cross-entropy of held-out text."""
        texts, run = self.texts, self._run
        loss = held_out.exported_loss(texts, data, run.peers)
        if not np.isfinite(np.exp(loss.mean)):
            raise LockstepError(
                f"{self._folder}: held-out loss is {loss}, expected a number; [export] dtype = "
                f"{run.export.dtype} may be too narrow for these weights"
            )
        return loss

    def numbers(
        self, loss: MeanLoss, data: HeldOutRows, notes: list[str]
    ) -> dict[str, float | int | None]:
        """Return the language model's loss, perplexity and bits per byte."""
        return held_out.numbers(loss, data, self.texts.tokenizer, notes)

    def own_metrics(self) -> None:
        """Return None: a language model has no metrics of its own."""

    def close(self) -> None:
        """Do nothing: a language model has no process."""


LANGUAGE_MODEL = LanguageModelSubject()
