"""A publication that is another one while it is read, and afterwards the same as before."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from pipeline.recheck import export, outputs
from pipeline.weights import hf
from tests.parts.publication.published_run import forge, refusal

pytestmark = pytest.mark.long


def swapping(change: Callable, one: Path, other: Path) -> Callable:
    """Has another folder's name stand for a folder while it is read."""

    def swap() -> None:
        aside = one.with_name("aside")
        os.rename(one, aside)
        os.rename(other, one)
        os.rename(aside, other)

    def read(published):
        swap()
        try:
            return change(published)
        finally:
            swap()

    return read


@pytest.mark.parametrize("name", ["folder", "above"])
def test_what_is_compared_is_what_was_hashed(published, tmp_path, monkeypatch, name):
    """Weights that are off by one ulp, and true ones for the moment in which they are compared."""
    folder, true = tmp_path / "above/folder", tmp_path / "true"
    shutil.copytree(published.whole, folder)
    config, params = hf.read_folder(folder)
    hf.write_folder(folder, config, jax.tree.map(lambda x: np.nextafter(x, 9), params), "float32")
    forge(folder)
    swapped = folder if name == "folder" else folder.parent
    shutil.copytree(published.whole, true / folder.relative_to(swapped))
    monkeypatch.setattr(export, "recheck", swapping(export.recheck, swapped, true))
    assert refusal(folder).startswith("model.safetensors: ")


def test_a_folder_of_it_that_was_renamed_meanwhile_is_refused(published, tmp_path, monkeypatch):
    folder = shutil.copytree(published.whole, tmp_path / "folder")
    shutil.copytree(folder / outputs.PROOF, tmp_path / "other")
    swap = swapping(export.recheck, folder / outputs.PROOF, tmp_path / "other")
    monkeypatch.setattr(export, "recheck", swap)
    assert refusal(folder).startswith("proof: changed while it was read")
