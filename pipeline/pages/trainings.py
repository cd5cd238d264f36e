"""Trainings side by side on a page: what is known of each, wherever it lies."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_text
from lockstep.transcript import curves
from lockstep.transcript.transcript import Transcript
from pipeline.monitor import find
from pipeline.monitor.find import FoundTraining
from pipeline.monitor.profile import times_of
from pipeline.pages import around, comparison
from pipeline.pages.comparison import ComparedRun
from pipeline.pages.known_settings import KnownSettings
from pipeline.pages.stage_results import read_tsv

PAGE = "data/comparison.html"


def compare(names: Sequence[str], root: Path, page: Path) -> None:
    """Write a page that shows trainings side by side; names are keys or folders, as for `read`."""
    runs = [read(name, root) for name in dict.fromkeys(names)]
    write_text(page, comparison.render(runs))
    print(f"report: {page}")


def read(what: str, root: Path) -> ComparedRun:
    """Return a training, finished or in progress, to be compared; arguments as of `find.find`.

    Raises:
      LockstepError: There is no such training, or it has taken no round yet.
    """
    training, runs = find.find(what, root), find.in_progress(root)
    times = times_of(runs, training.key)
    if not training.is_finished:
        return _in_progress(what, training.transcript)._replace(times=times)
    made = training.files.get(f"made-{training.key}.json")
    project = runs.parent.parent
    others = around.read(made, training.roots, project) if made else around.Around({})
    settings = KnownSettings.of(read_json(training.files[find.HEADER])["run"], others.tables)
    return finished(what, training, settings)._replace(
        times=times, verdict=others.verdict, evaluated=others.evaluated
    )


def finished(name: str, training: FoundTraining, settings: KnownSettings) -> ComparedRun:
    """Return what stage train left of a training, to be compared by a name."""
    files = training.files
    rows, held_out = read_tsv(files[find.LOSS]), read_tsv(files[find.HELD_OUT])
    return ComparedRun(name, settings, rows, held_out, read_json(files[find.TRAINED]))


def _in_progress(name: str, folder: Path) -> ComparedRun:
    """What a training that has not ended has recorded so far."""
    transcript = Transcript(folder)
    rows = curves.rows(transcript)
    if not rows:
        raise LockstepError(f"{folder}: no round is taken yet, expected at least one to compare")
    up = rows[-1]["bytes_up"] / len(rows)
    return ComparedRun(
        name,
        KnownSettings.of(transcript.header.run, {}),
        curves.trained(rows),
        curves.held_out(rows, transcript.header),
        {"rounds": len(rows), "tokens": rows[-1]["tokens"], "bytes_up": up},
    )
