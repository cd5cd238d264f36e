"""Finds the final state of an earlier run by its key, so that a finished run can be extended."""

import shutil
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file, write_json
from pipeline.stage import artifacts
from pipeline.stage.artifacts import Paths

# data/init/earlier/ holds the final state of the run that is extended; this file, its position
EARLIER = "earlier.json"


def trained_steps(init: Path) -> int:
    """Return the rounds that the extended run had trained; 0 for a run that extends none."""
    file = init / EARLIER
    return read_json(file)["step"] if file.exists() else 0


class EarlierRun(NamedTuple):
    """A finished run: the hash of its made file, which holds all others, and what it trained."""

    sha256: str
    model: dict[str, Any]


def copy(key: str, paths: Paths, folder: Path) -> EarlierRun:
    """Copy what stage train continues from of an earlier run into `folder`.

    The key is that of the earlier run's train stage, as in data/trained/made-<key>.json.

    Raises:
      LockstepError: No run of that key is in data/trained, data/store or DVC's cache.
    """
    trained = _stored(key, paths)
    artifacts.verify(trained / f"made-{key}.json")
    final = read_json(trained / "final.json")
    snapshot = trained / "transcript" / "snapshots" / f"{final['step']:05}"
    if (trained / "hf").is_dir():  # a workload has none
        shutil.copytree(trained / "hf", folder / "hf")
    shutil.copyfile(snapshot / "params.safetensors", folder / "params.safetensors")
    (folder / "earlier").mkdir()
    for file in snapshot.glob("*.safetensors"):
        if file.name != "params.safetensors":
            shutil.copyfile(file, folder / "earlier" / file.name)
    write_json(folder / EARLIER, final | {"key": key})
    header = read_json(trained / "transcript" / "header.json")
    return EarlierRun(sha256_file(trained / f"made-{key}.json"), header["model"])


def _stored(key: str, paths: Paths) -> Path:
    """Copy the earlier run to data/store, since its data/trained is about to be replaced."""
    target, source = _copied(key, paths), find(key, paths)
    if source == target:
        return target
    temp = target.with_name(f".{key}")
    shutil.rmtree(temp, ignore_errors=True)
    if isinstance(source, Path):
        shutil.copytree(source, temp)
    else:
        artifacts.copy_cached(source, temp)
    temp.rename(target)
    return target


def find(key: str, paths: Paths) -> Path | dict[str, Path]:
    """Return the folder of a finished run, or its files in DVC's cache by their names."""
    copied, made = _copied(key, paths), f"made-{key}.json"
    for folder in (copied, paths.out("train")):
        if (folder / made).is_file():
            return folder
    files = next(artifacts.cached_folders(paths.runs.parent.parent, made), None)
    if files is None:
        raise LockstepError(
            f"model.LLM.checkpoint.Run: {key}, expected the key of a finished run: no {made} "
            f"in {paths.out('train')}, {copied.parent} or DVC's cache"
        )
    return files


def _copied(key: str, paths: Paths) -> Path:
    return paths.store / "runs" / key
