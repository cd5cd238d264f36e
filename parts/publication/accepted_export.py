"""The export that is published or pushed: only one that the audit accepted."""

from pathlib import Path

from lockstep.errors import LockstepError
from pipeline.stage.artifacts import Paths, verify
from pipeline.weights import hf

CARD = "README.md"


def accepted(paths: Paths) -> list[Path]:
    """Return the files of a run's export, checked against their hashes.

    Raises:
      LockstepError: There is no current export, or the witness refused it.
    """
    folder = paths.need("export")
    if why := hf.why_refused(folder):
        raise LockstepError(
            f"{folder / hf.REFUSED}: {why}; expected an export that the witness accepted"
        )
    made = paths.root / paths.keys.made("export")
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.name != made.name)


def with_results(files: list[Path], paths: Paths) -> list[Path]:
    """Return the files of an export, with the report's card, which has results, if there is one."""
    if not paths.is_made("report"):
        return files
    verify(paths.made("report"), [CARD])
    card, own = paths.out("report") / CARD, paths.out("export") / CARD
    return [card if file == own else file for file in files]
