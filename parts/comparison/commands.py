"""The command `lockstep compare`, and what Snakemake's rules ask of it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.errors import LockstepError
from lockstep.files import write_named
from parts.comparison import plan_file
from pipeline import version
from pipeline.command_options import RUN_FILES
from pipeline.stage.artifacts import write_sealed

if TYPE_CHECKING:
    from pipeline.runfile import Run

app = typer.Typer()

NOT_NEEDED = {"status": "not needed", "loss": None}  # of a training after a search's end
OF_THE_PEAK = 0.5  # of the speed of a matrix product, about what a training reaches on a CPU


@app.command(rich_help_panel=RUN_FILES)
def compare(
    file: Annotated[Path, typer.Argument(help="What to compare.")] = plan_file.COMPARE_FILE,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only say how many trainings there are, and write them.")
    ] = False,
    training: Annotated[
        str | None, typer.Option(help="Only this training, by its name in the plan.")
    ] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Only the table, of methods whose trainings are done.")
    ] = False,
    run_files: Annotated[
        Path | None,
        typer.Option(help="Only write the run files of trainings whose values are known, here."),
    ] = None,
) -> None:
    """Train methods at equal tokens, one after the other, and say which is better by how much.

    `snakemake compare --cores all` does the same in parallel.
    """
    plan_file.check_tables_are_of(file)
    path = plan_file.plan_path(file)
    if plan or not path.is_file():
        _plan(file, path)
    if training is not None:
        _train(file, path, training)
    if run_files is not None:
        _write_run_files(file, path, run_files)
    is_part = plan or training is not None or run_files is not None
    if not (is_part or table):
        for name in plan_file.planned(path):
            if not plan_file.result_path(name).is_file():
                _train(file, path, name)
    if table or not is_part:
        _table(file, path)


def _plan(file: Path, path: Path) -> None:
    """Write a comparison's list of trainings; print their number and about how long they take."""
    from parts.comparison.trainings import changed, loaded, plan_of

    comparison, base = loaded(file)
    plan = plan_of(comparison, base)
    write_sealed(path, {"trainings": plan})
    left = sum(not plan_file.result_path(name).is_file() for name in plan)
    most = "at most " if comparison.tuning.trainings > 1 else ""
    count = f"{most}{len(plan)} trainings of {comparison.tokens:,} tokens"
    print(f"compare: {count}, {left} of them to do")
    if left:
        print(f"compare: {_hours(changed(base, comparison), left * comparison.tokens)}")


def _hours(base: "Run", tokens: int) -> str:
    """Return a line on how long a comparison's tokens take, over all peers."""
    import numpy as np

    from lockstep.machine import cores
    from pipeline.preflight.model import model_of_run

    if (model := model_of_run(base, Path())) is None:
        return "how long they take is not known before stage convert"
    matrix_NN = np.ones((1024, 1024), np.float32)
    seconds = []
    for _ in range(10):
        began = time.process_time()  # all threads': what else runs here takes none of it
        matrix_NN @ matrix_NN
        seconds.append(time.process_time() - began)
    speed = cores.count() * 2 * 1024**3 / min(seconds)
    hours = 6 * model.params * tokens / (OF_THE_PEAK * speed) / 3600
    return (
        f"about {hours:.2g} hours here, an estimate: {model.params:,} params, at half of the "
        f"{speed / 1e9:,.0f} GFLOP/s of a matrix product on {cores.count()} cores of their own"
    )


def _train(file: Path, path: Path, name: str) -> None:
    from lockstep.tables.validation import meant
    from parts.comparison import training_process
    from parts.comparison.trainings import PlannedTraining, checked_plan, loaded, name_of, tables_of

    comparison, base = loaded(file)
    if (entry := (plan := checked_plan(comparison, path)).get(name)) is None:
        raise LockstepError(
            f"{path}: found no training {name}, expected the name of one in it{meant(plan, name)}"
        )
    job = PlannedTraining.in_plan(entry)
    if (today := name_of(comparison, base, job, entry["needs"], {})) != name:
        raise LockstepError(
            f"{path}: {name} would now be {today}, expected {file} and what it names as planned; "
            "repeat the command"
        )
    if (tables := tables_of(comparison, base, entry)) is None:
        result, came = NOT_NEEDED, "not needed, the best is bracketed"
    else:
        result = training_process.trained(tables)
        came = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.3f}"
    print(f"compare: {job.label}: {came}", flush=True)
    write_sealed(plan_file.result_path(name), result)


def _write_run_files(file: Path, path: Path, folder: Path) -> None:
    from parts.comparison.trainings import checked_plan, loaded, tables_of, text

    comparison, base = loaded(file)
    plan = checked_plan(comparison, path)
    for other in folder.glob("*.toml"):
        if other.stem not in plan:  # who trains all files of the folder would train it
            raise LockstepError(f"{other}: not of this plan, expected a folder without others")
    known = {
        name: tables
        for name, entry in plan.items()
        if all(plan_file.result_path(need).is_file() for need in entry["needs"])
        and (tables := tables_of(comparison, base, entry)) is not None
    }
    for name, tables in known.items():
        write_named(folder / f"{name}.toml", text(tables))
    print(f"compare: {folder}: {len(known)} run files of {len(plan)}")


def _table(file: Path, path: Path) -> None:
    from parts.comparison import output_files, results_table, training_result
    from parts.comparison.trainings import PlannedTraining, by_seed, checked_plan, loaded

    comparison, base = loaded(file)
    plan, made_of = checked_plan(comparison, path), f"code {version.with_commit()}"
    missing = [name for name in plan if not plan_file.result_path(name).is_file()]
    waiting = {plan[name]["method"] for name in missing}
    if waiting == set(comparison.methods):
        raise LockstepError(
            f"{plan_file.result_path(missing[0])}: missing, and so are {len(missing) - 1} more of "
            f"{len(plan)} results, expected all of a method; `lockstep compare {file}` trains them"
        )
    if waiting:
        made_of += f"; left out, since they wait for trainings: {', '.join(sorted(waiting))}"
        done = {name: method for name, method in comparison.methods.items() if name not in waiting}
        comparison = comparison.model_copy(update={"methods": done})
    results = {
        PlannedTraining.in_plan(entry): training_result.read(plan_file.result_path(name))
        for name, entry in plan.items()
        if entry["method"] in comparison.methods
    }
    table = results_table.rows(comparison, results)
    _, split_size = next((row.first("held_out_rows") for row in table if row.losses), (0, 0))
    made_of = f"{by_seed(base, split_size)}; {made_of}"
    files = output_files.write(file, comparison, table, made_of, base)
    print(files[0].read_text(encoding="utf-8"), end="")
    print(f"compare: {', '.join(map(str, files))}")
