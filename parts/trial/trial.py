"""`lockstep try`: the stages that a training needs, on a run file made of flags.

    OUT/adamw/, OUT/distro/    run.toml, data/ and metrics/ of the two trainings
    OUT/store/                 what was downloaded, for both

`--distro` says which one a command trains, as in Psyche. It prints both once both exist.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_text
from lockstep.machine.progress import size
from parts.trial import flags
from parts.trial.run_of_flags import run_of
from pipeline.command_line import run_stage
from pipeline.pages.stage_results import read_tsv
from pipeline.runfile.importer import run_file
from pipeline.stage.artifacts import METRICS, Paths
from pipeline.weights import hf

TRIAL_FILE = "run.toml"
LAST = 10  # the mean over a tenth of the rounds is a run's loss: one batch's is noise
NAMES = {"adamw": "AdamW", "distro": "DisTrO"}
TRAINED = ("download", "convert", "train")
SAVED = ("witness", "export")


def take(arguments: Sequence[str]) -> None:
    """Train what the arguments say, and print the results.

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
    trained = sum(_print_result(out / folder, name) for folder, name in NAMES.items())
    if trained == 1:
        other = "without --distro" if given.distro else "with --distro"
        print(f"try: the same command {other} trains with the other optimizer")


def _print_result(root: Path, name: str) -> bool:
    """Print the loss and the traffic of a training, and return whether it has ended."""
    file = root / TRIAL_FILE
    if not file.is_file() or not (paths := Paths("train", file, root)).is_made("train"):
        return False
    metrics = paths.out("train") / METRICS
    losses = [row["loss"] for row in read_tsv(metrics / "loss.tsv")]
    last = losses[-max(1, len(losses) // LAST) :]
    sent = size(read_json(metrics / "train.json")["bytes_up"])
    loss = f"loss {sum(last) / len(last):.3f} after {len(losses):,} rounds"
    print(f"try: {name}: {loss}, {sent} sent in each; {metrics}")
    return True


def _share_downloads(out: Path, root: Path) -> None:
    store, link = out / "store", root / "data" / "store"
    store.mkdir(exist_ok=True)
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(os.path.relpath(store, link.parent), target_is_directory=True)


def _save(paths: Paths, target: Path) -> None:
    if (paths.out("export") / hf.REFUSED).exists():
        raise LockstepError(f"--save-path {target}: the audit refused {paths.out('export')}")
    files = shutil.ignore_patterns(Path(paths.keys.made("export")).name)
    shutil.copytree(paths.out("export"), target, ignore=files)
    print(f"try: {target}")
