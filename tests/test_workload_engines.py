"""An edit of a workload's code trains again under either engine, and of nobody else's run."""

import shutil
from pathlib import Path

import pytest

from pipeline.stage.keys import WORKLOADS
from tests import tiny

pytestmark = pytest.mark.long

STRANGE = Path(__file__).parent / "parts" / "workload" / "strange.py"
WORKLOAD = {
    "workload__factory": "pull:Pull",
    "model__LLM__architecture": "HfAuto",
    "model__LLM__checkpoint": "Ephemeral",
    "config__total_steps": 1,
    "config__global_batch_size_start": 2,
    "config__global_batch_size_end": 2,
}
ENGINES = {
    "dvc": ("dvc", "repro", "-q", "train"),
    "snakemake": ("snakemake", "-q", "all", "--", "train"),
}


def made(project: Path) -> str:
    """The made file of stage train."""
    (file,) = (project / "data" / "trained").glob("made-*.json")
    return file.name


def edit(project: Path) -> None:
    with open(project / WORKLOADS / "pull.py", "a") as file:
        file.write("# edited\n")


def test_an_edit_of_workloads_trains_again_and_both_engines_see_it(tmp_path):
    project = tiny.make_project(tmp_path, **WORKLOAD)
    shutil.copyfile(STRANGE, project / WORKLOADS / "pull.py")
    tiny.run(project, *ENGINES["dvc"])
    first = made(project)
    assert first == Path(tiny.keys_of(project)["train"]).name

    edit(project)
    tiny.run(project, *ENGINES["snakemake"])
    second = made(project)
    assert second != first
    before = (project / "data" / "trained" / second).stat().st_mtime_ns
    tiny.run(project, *ENGINES["dvc"])  # what Snakemake made is there
    assert (project / "data" / "trained" / second).stat().st_mtime_ns == before

    edit(project)
    assert "train:" in tiny.run(project, "dvc", "status", "train")


def test_a_run_without_a_workload_keeps_its_keys_whatever_lies_in_the_folder(tmp_path):
    project = tiny.make_project(tmp_path)
    keys = tiny.keys_of(project)
    shutil.copyfile(STRANGE, project / WORKLOADS / "pull.py")
    assert tiny.keys_of(project) == keys
