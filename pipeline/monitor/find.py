"""Finds trainings on a disk, in progress, finished or in DVC's cache: by key, or by folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import read_json
from pipeline.stage import dvc_cache
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.stage.keys import OUT, RUN_FILE

HEADER = "transcript/header.json"
LOSS, HELD_OUT, TRAINED = (
    f"{METRICS}/{name}" for name in ("loss.tsv", "held_out.tsv", "train.json")
)
FINISHED = {HEADER, LOSS, HELD_OUT, TRAINED}


class FoundTraining(NamedTuple):
    """A training, wherever it lies.

    Attributes:
      key: The key of its stage train.
      files: Those of `FINISHED` that are there, and its made file, by their names in its folder.
      roots: Folders in whose `data/` what other stages left of it may be.
    """

    key: str
    files: Mapping[str, Path]
    roots: Sequence[Path]

    @property
    def is_finished(self) -> bool:
        """Whether the stage has ended."""
        return self.files.keys() >= FINISHED

    @property
    def transcript(self) -> Path:
        """The folder of its transcript, where it is not in DVC's cache."""
        return self.files[HEADER].parent


def in_progress(root: Path) -> Path:
    """Return the folder in which each training in progress has its own, named by its key."""
    return Paths("train", Path(RUN_FILE), root).runs


def find(what: str, root: Path) -> FoundTraining:
    """Return a training.

    Args:
      what: The key of its stage train, or a folder: what a stage train left, work in progress, or
        one with the former in `data/trained`.
      root: The folder where `data/` lies.

    Raises:
      LockstepError: There is no such training.
    """
    for folder in (Path(what), Path(what) / OUT["train"]):
        if (folder / HEADER).is_file():
            return _at(_files(folder), [folder.absolute().parents[1], root])
    known = _known(root)
    if what not in known:
        raise LockstepError(
            f"{what}: no such training, expected a folder, or one of the keys in {root / 'data'} "
            f"and DVC's cache: {', '.join(sorted(known)) or 'there is none'}"
        )
    return known[what]


def finished(root: Path) -> FoundTraining | None:
    """Return the training whose result is in the `data/` of a folder, if there is one."""
    files = _files(root / OUT["train"])
    return _at(files, [root]) if files.keys() >= FINISHED else None


def _known(root: Path) -> dict[str, FoundTraining]:
    """Every training, by key; one that is in several places is the same in each."""
    runs = in_progress(root)
    places = [folder for folder in runs.glob("*") if folder.is_dir()]
    found = [*dvc_cache.folders(runs.parent.parent, LOSS), *map(_files, places)]
    found.append(_files(root / OUT["train"]))
    trainings = [_at(files, [root]) for files in found if HEADER in files]
    return {training.key: training for training in trainings}


def _at(files: Mapping[str, Path], roots: Sequence[Path]) -> FoundTraining:
    return FoundTraining(str(read_json(files[HEADER]).get("key")), files, roots)


def _files(folder: Path) -> dict[str, Path]:
    names = [*FINISHED, *(path.name for path in folder.glob("made-*.json"))]
    return {name: folder / name for name in names if (folder / name).is_file()}
