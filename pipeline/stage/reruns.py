"""Which stages would run again, and why: what has changed since their last result."""

from pathlib import Path

from lockstep.errors import LockstepError
from pipeline.stage import dvc_cache
from pipeline.stage.artifacts import Paths, read_made
from pipeline.stage.keys import STAGES


def reasons(run: Path, root: Path) -> dict[str, str | None]:
    """Return why each stage would run again; None for a stage that has a current result."""
    return {stage: _reason(Paths(stage, run, root)) for stage in STAGES}


def _reason(paths: Paths) -> str | None:
    stage, made = paths.stage, paths.root / paths.keys.made(paths.stage)
    if paths.is_made(stage):
        return None
    if made.is_file():
        return f"its result is {paths.problem(stage, made)}"
    if any(dvc_cache.folders(paths.runs.parent.parent, made.name)):
        return "its result is not here, but may be in DVC's cache"
    earlier = next(iter(sorted(paths.out(stage).glob("made-*.json"))), None)
    if earlier is None:
        return "it has no result yet"
    try:
        before = read_made(earlier)["content"]
    except (LockstepError, KeyError):
        return "its result is damaged, or of an older release"
    now = paths.keys.content(stage)
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    return f"changed since its result: {', '.join(changed)}"
