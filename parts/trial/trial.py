"""`lockstep try`: the stages that a training needs, on a run file made of flags, and one page.

    OUT/adamw/, OUT/distro/    run.toml, data/ and metrics/ of the two trainings
    OUT/store/                 what was downloaded, for both
    OUT/try.html               the one or the two of them, side by side

`--distro` says which one a command trains, as in Psyche. The page has both once both are there.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import write_text
from parts.trial import flags
from parts.trial.run_of_flags import run_of
from pipeline import runfile
from pipeline.command_line import run_stage
from pipeline.monitor import find
from pipeline.pages import comparison, trainings
from pipeline.pages.comparison import ComparedRun
from pipeline.pages.known_settings import KnownSettings
from pipeline.runfile.importer import run_file
from pipeline.stage.artifacts import Paths
from pipeline.stage.progress import size
from pipeline.weights import hf

PAGE, TRIAL_FILE = "try.html", "run.toml"
NAMES = {"adamw": "AdamW", "distro": "DisTrO"}
TRAINED = ("download", "convert", "train")
SAVED = ("witness", "export")


def take(arguments: Sequence[str]) -> None:
    """Train what the arguments say, and render the page.

    Raises:
      LockstepError: The arguments do not describe a run, or a stage fails.
    """
    given = flags.parse(arguments)
    if given.cpu or given.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    if given.save_path is not None and Path(given.save_path).exists():
        raise LockstepError(f"--save-path {given.save_path}: exists, expected a new folder")
    out = Path(given.out)
    root = out / ("distro" if given.distro else "adamw")
    file = root / TRIAL_FILE
    write_text(file, run_file(run_of(given), f"Made by `lockstep try` for {root.name}."))
    _share_downloads(out, root)
    for name in TRAINED if given.save_path is None else (*TRAINED, *SAVED):
        run_stage(name, file, root)
    if given.save_path is not None:
        _save(Paths("export", file, root), Path(given.save_path))
    runs = _trained(out)
    write_text(out / PAGE, comparison.render(runs))
    for run in runs:
        rounds, sent = len(run.rows), size(run.trained["bytes_up"])
        print(f"try: {run.name}: loss {run.loss:.3f} after {rounds:,} rounds, {sent} sent in each")
    if len(runs) == 1:
        other = "without --distro" if given.distro else "with --distro"
        print(f"try: the same command {other} puts the other optimizer on the page too")
    print(f"try: {out / PAGE}")


def _share_downloads(out: Path, root: Path) -> None:
    store, link = out / "store", root / "data" / "store"
    store.mkdir(exist_ok=True)
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.relpath(store, link.parent), target_is_directory=True)


def _trained(out: Path) -> list[ComparedRun]:
    """The trainings in the folder that are finished, by the names of their optimizers."""
    runs = []
    for folder, name in NAMES.items():
        file = out / folder / TRIAL_FILE
        found = find.finished(file.parent)
        if file.is_file() and found and Paths("train", file, file.parent).is_made("train"):
            run = runfile.load(file).model_dump(mode="json", exclude={"runtime"})
            runs.append(trainings.finished(name, found, KnownSettings.of(run, {})))
    return runs


def _save(paths: Paths, target: Path) -> None:
    if (paths.out("export") / hf.REFUSED).exists():
        raise LockstepError(f"--save-path {target}: the audit refused {paths.out('export')}")
    files = shutil.ignore_patterns(Path(paths.keys.made("export")).name)
    shutil.copytree(paths.out("export"), target, ignore=files)
    print(f"try: {target}")
