"""What `dvc plots show` and editors draw: every curve with a title, and units at its axes."""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import yaml

from lockstep.transcript.curves import COLUMNS
from pipeline.monitor import training_scores
from pipeline.stage.keys import PROJECT
from tests import tiny

DOCUMENT = yaml.safe_load((PROJECT / "dvc.yaml").read_text())
FILES = {f"metrics/{name}.tsv": columns for name, columns in COLUMNS.items()}
TASKS = f"metrics/{training_scores.FILE}"


def plots() -> Iterator[tuple[str, str, dict]]:
    """Each plot of dvc.yaml: its name, its file, and what it says of itself."""
    for stage in DOCUMENT["stages"].values():
        for entry in stage.get("plots", []):
            for file, said in entry.items():
                yield file, file, said
    for entry in DOCUMENT["plots"]:
        for name, said in entry.items():
            ((file, column),) = said["y"].items()
            yield name, file, said | {"y": column}


PLOTS = {name: (file, said) for name, file, said in plots()}


def test_every_table_of_curves_has_a_plot_and_no_plot_is_empty_in_the_default_run():
    assert {file for file, _ in PLOTS.values()} == {*FILES}
    for file in FILES:
        assert len((PROJECT / file).read_text().splitlines()) > 2, file


def test_held_out_loss_and_training_loss_have_the_same_axes():
    axes = {
        file: {said["x"] for of, said in PLOTS.values() if of == file and said["y"] == y}
        for file, y in (("metrics/loss.tsv", "loss"), ("metrics/held_out.tsv", "held_out_loss"))
    }
    assert axes["metrics/loss.tsv"] == axes["metrics/held_out.tsv"]
    assert len(axes["metrics/loss.tsv"]) == 4


def drawn(content: dict) -> Iterator[tuple[str, str]]:
    """The field and the title of every axis in a Vega document."""
    encoding = content.get("encoding", {})
    for axis in ("x", "y"):
        if "title" in encoding.get(axis, {}):
            yield encoding[axis]["field"], encoding[axis]["title"]
    for parts in ("layer", "hconcat", "vconcat"):
        for part in content.get(parts, []):
            yield from drawn(part)


def dvc_plots(project: Path, *arguments: str) -> dict:
    """What `dvc plots show` draws."""
    command = ("-m", "dvc", "plots", "show", "--json", *arguments)
    shown = json.loads(tiny.python(*command, cwd=project).stdout)
    assert "errors" not in shown
    return {name: picture["content"] for name, (picture,) in shown["data"].items()}


def test_dvc_draws_each_of_them_as_editors_read_it(tmp_path):
    for name in ("dvc.yaml", ".dvc/config", ".dvc/plots"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (PROJECT / name).is_dir() else shutil.copy
        copy(PROJECT / name, tmp_path / name)
    tiny.git(tmp_path, "init", "-q")
    (tmp_path / "metrics").mkdir()
    for file, columns in (FILES | {TASKS: training_scores.SCORE_COLUMNS}).items():
        rows = (columns, *([str(n)] * len(columns) for n in (1, 2)))
        (tmp_path / file).write_text("".join("\t".join(row) + "\n" for row in rows))
    shown = dvc_plots(tmp_path)
    assert shown.keys() == PLOTS.keys()
    for name, (_, said) in PLOTS.items():
        content = shown[name]
        title = content["title"] if isinstance(content["title"], str) else content["title"]["text"]
        assert title == said["title"]
        axes = {(said["x"], said["x_label"]), (said["y"], said["y_label"])}
        assert axes <= {*drawn(content)}, name
    # as docs/how-to/watch-a-run.md shows scores over time
    page = (PROJECT / "docs/how-to/watch-a-run.md").read_text()
    (command,) = re.findall(rf"^dvc plots show ({TASKS} .*?) *(?:#|$)", page, re.MULTILINE)
    (content,) = dvc_plots(tmp_path, *shlex.split(command)).values()
    assert content["encoding"]["y"]["field"] == "value" and len(content["data"]["values"]) == 2
