"""The exported folder of `tests/pipeline/exported.py`, as tasks read it."""

from pathlib import Path

import jax

from lockstep.programs.placement import device_groups
from parts.tasks import task_model
from parts.tasks.task_model import TaskModel
from pipeline.weights import exported
from tests.pipeline.exported import CONTEXT, END, HF_CONFIG, make_params, make_tokenizer, write

__all__ = ["CONTEXT", "END", "HF_CONFIG", "make_params", "make_tokenizer", "write"]


def model(folder: Path, batch_size: int = 4) -> TaskModel:
    """The folder's model, as stage evaluate has it."""
    read = exported.read(folder)
    return task_model.from_folder(read, folder, device_groups(jax.devices()[:1], 1), batch_size)


def go_offline(monkeypatch) -> None:
    """Let no test ask the network: the libraries read these at their import.

    They are imported where they are used: every process of the tests reads the files of tests.
    """
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
