"""Trainings on this disk, by key or by folder: finished, in DVC's cache, or in progress."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.monitor.profile import times_of
from pipeline.pages import around, comparison
from pipeline.pages.comparison import ComparedRun
from pipeline.pages.known_settings import KnownSettings
from pipeline.pages.report_page import read_tsv
from pipeline.stage import dvc_cache
from pipeline.stage.artifacts import METRICS, Paths, read_json, write_text
from pipeline.stage.keys import OUT, RUN_FILE
from pipeline.transcript import curves
from pipeline.transcript.transcript import Transcript

PAGE = "data/comparison.html"
HEADER = "transcript/header.json"
LOSS, HELD_OUT, TRAINED = (
    f"{METRICS}/{name}" for name in ("loss.tsv", "held_out.tsv", "train.json")
)
FINISHED = {HEADER, LOSS, HELD_OUT, TRAINED}


def compare(names: Sequence[str], root: Path, page: Path) -> None:
    """Write a page that shows trainings side by side.

    Args:
      names: Keys or folders, as `find` takes them.
      root: The folder where `data/` lies.
      page: The page.
    """
    runs = [find(name, root) for name in dict.fromkeys(names)]
    write_text(page, comparison.render(runs))
    print(f"report: {page}")


def find(what: str, root: Path) -> ComparedRun:
    """Return a training, to be compared.

    Args:
      what: The key of its stage train, or a folder: what a stage train left, work in progress, or
        one with the former in `data/trained`.
      root: The folder where `data/` lies.

    Raises:
      LockstepError: There is no such training, or it has taken no round yet.
    """
    runs = Paths("train", Path(RUN_FILE), root).runs
    for folder in (Path(what), Path(what) / OUT["train"]):
        if (folder / HEADER).is_file():
            return _read(what, _files(folder), runs, [folder.absolute().parents[1], root])
    known = _known(root, runs)
    if what not in known:
        raise LockstepError(
            f"{what}: no such training, expected a folder, or one of the keys in {root / 'data'} "
            f"and DVC's cache: {', '.join(sorted(known)) or 'there is none'}"
        )
    return _read(what, known[what], runs, [root])


def _known(root: Path, runs: Path) -> dict[str, Mapping[str, Path]]:
    """The files of every training, by key; one that is in several places is the same in each."""
    places = [folder for folder in runs.glob("*") if folder.is_dir()]
    found = [*dvc_cache.folders(runs.parent.parent, LOSS), *map(_files, places)]
    found.append(_files(root / OUT["train"]))
    return {_key(files[HEADER]): files for files in found if HEADER in files}


def _files(folder: Path) -> dict[str, Path]:
    names = [*FINISHED, *(path.name for path in folder.glob("made-*.json"))]
    return {name: folder / name for name in names if (folder / name).is_file()}


def _key(header: Path) -> str:
    return str(read_json(header).get("key"))


def _read(name: str, files: Mapping[str, Path], runs: Path, roots: Sequence[Path]) -> ComparedRun:
    key = _key(files[HEADER])
    times = times_of(runs, key)
    if not files.keys() >= FINISHED:
        return _in_progress(name, files[HEADER].parent)._replace(times=times)
    made = files.get(f"made-{key}.json")
    others = around.read(made, roots, runs.parent.parent) if made else around.Around({})
    return ComparedRun(
        name,
        KnownSettings.of(read_json(files[HEADER])["run"], others.tables),
        read_tsv(files[LOSS]),
        read_tsv(files[HELD_OUT]),
        read_json(files[TRAINED]),
        times,
        others.verdict,
        others.evaluated,
    )


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
        curves.held_out(rows, transcript.header.held_out_loss),
        {"rounds": len(rows), "tokens": rows[-1]["tokens"], "bytes_up": up},
    )
