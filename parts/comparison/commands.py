"""The command `lockstep compare`, and what Snakemake's rules ask of it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.errors import LockstepError, expecting
from lockstep.files import write_named
from parts.comparison import plan_file
from pipeline import version
from pipeline.command_options import RUN_FILES
from pipeline.stage.artifacts import write_sealed

if TYPE_CHECKING:
    from parts.comparison.compare_file import Compare
    from parts.comparison.trainings import PlannedTraining
    from pipeline.runfile import Run

app = typer.Typer()

TrainKeys = dict[tuple[object, ...], str]  # of stage train, by what of a training decides it
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


def _loaded(file: Path) -> "tuple[Compare, Run]":
    from parts.comparison import compare_file
    from pipeline import runfile

    comparison = compare_file.load(file)
    return comparison, runfile.load(Path(comparison.base))


def _plan(file: Path, path: Path) -> None:
    """Write a comparison's list of trainings; print their number and about how long they take."""
    from parts.comparison.trainings import changed, needed, trainings

    comparison, base = _loaded(file)
    names: dict[PlannedTraining, str] = {}
    plan: dict[str, dict[str, Any]] = {}
    keys: TrainKeys = {}
    for job in trainings(comparison):
        needs = [names[other] for other in needed(comparison, job)]
        names[job] = name = _name(comparison, base, job, needs, keys)
        plan[name] = {**job._asdict(), "needs": needs}
    write_sealed(path, {"trainings": plan})
    left = sum(not plan_file.result_path(name).is_file() for name in plan)
    most = "at most " if comparison.tuning.trainings > 1 else ""
    count = f"{most}{len(plan)} trainings of {comparison.tokens:,} tokens"
    print(f"compare: {count}, {left} of them to do")
    if left:
        print(f"compare: {_hours(changed(base, comparison), left * comparison.tokens)}")


def _planned(comparison: "Compare", path: Path) -> dict[str, dict[str, Any]]:
    """Return the plan of a comparison, which has all of its trainings and nothing else."""
    from parts.comparison.trainings import PlannedTraining, needed, trainings

    plan, due = plan_file.planned(path), {}
    with expecting(path, plan_file.A_PLAN, KeyError, TypeError, AttributeError):
        names = {PlannedTraining.in_plan(entry): name for name, entry in plan.items()}
        for job in trainings(comparison):
            needs = [names[other] for other in needed(comparison, job)]
            due[names[job]] = {**job._asdict(), "needs": needs}
    if plan != due:
        raise LockstepError(f"{path}: has others, expected {plan_file.A_PLAN}")
    return plan


def _name(
    comparison: "Compare", base: "Run", job: "PlannedTraining", needs: list[str], keys: TrainKeys
) -> str:
    """Return the name of a comparison's training, by all that its result depends on; adds a key."""
    from parts.comparison.compare_file import NO_FAILURE
    from parts.comparison.training_process import keys_of
    from parts.comparison.trainings import Decided, digest, document, text

    method, shared = comparison.methods[job.method], (*job[:1], job.trial is None, *job[2:])
    if shared not in keys:  # trainings of a search begin as one
        tables = document(comparison, base, job, Decided(method.search))
        (keys[shared],) = keys_of(text(tables), "train")
    limits = (comparison.timeout, method.grace) if job.failure != NO_FAILURE else ()
    search = list(method.search.items())  # ordered as its steps
    return f"{job.method}-{job.seed}-{digest(keys[shared], needs, job.trial, search, *limits)}"


def _hours(base: "Run", tokens: int) -> str:
    """Return a line on how long a comparison's tokens take, over all peers."""
    import numpy as np

    from pipeline.preflight.model import model_of_run

    if (model := model_of_run(base, Path())) is None:
        return "how long they take is not known before stage convert"
    matrix_NN = np.ones((1024, 1024), np.float32)
    matrix_NN @ matrix_NN
    began = time.perf_counter()
    for _ in range(10):
        matrix_NN @ matrix_NN
    speed = 10 * 2 * 1024**3 / (time.perf_counter() - began)
    hours = 6 * model.params * tokens / (OF_THE_PEAK * speed) / 3600
    return (
        f"about {hours:.2g} hours here, an estimate: {model.params:,} params, at half of the "
        f"{speed / 1e9:,.0f} GFLOP/s of a matrix product timed now"
    )


def _document(comparison: "Compare", base: "Run", entry: dict[str, Any]) -> dict[str, Any] | None:
    """Return the run file of a comparison's training, decided by the results that it needs.

    None: the search is over before it.
    """
    from parts.comparison import training_result
    from parts.comparison.trainings import PlannedTraining, decided, document

    training = PlannedTraining.in_plan(entry)
    before = [training_result.read(plan_file.result_path(need)) for need in entry["needs"]]
    found = decided(comparison, training, before)
    return None if found is None else document(comparison, base, training, found)


def _train(file: Path, path: Path, name: str) -> None:
    from lockstep.tables.validation import meant
    from parts.comparison import training_process
    from parts.comparison.trainings import PlannedTraining

    comparison, base = _loaded(file)
    if (entry := (plan := _planned(comparison, path)).get(name)) is None:
        raise LockstepError(
            f"{path}: found no training {name}, expected the name of one in it{meant(plan, name)}"
        )
    job = PlannedTraining.in_plan(entry)
    if (today := _name(comparison, base, job, entry["needs"], {})) != name:
        raise LockstepError(
            f"{path}: {name} would now be {today}, expected {file} and what it names as planned; "
            "repeat the command"
        )
    if (tables := _document(comparison, base, entry)) is None:
        result, came = NOT_NEEDED, "not needed, the best is bracketed"
    else:
        result = training_process.trained(tables)
        came = "diverged" if result["loss"] is None else f"held-out loss {result['loss']:.3f}"
    print(f"compare: {job.label}: {came}", flush=True)
    write_sealed(plan_file.result_path(name), result)


def _write_run_files(file: Path, path: Path, folder: Path) -> None:
    from parts.comparison.trainings import text

    comparison, base = _loaded(file)
    plan = _planned(comparison, path)
    for other in folder.glob("*.toml"):
        if other.stem not in plan:  # who trains all files of the folder would train it
            raise LockstepError(f"{other}: not of this plan, expected a folder without others")
    known = {
        name: tables
        for name, entry in plan.items()
        if all(plan_file.result_path(need).is_file() for need in entry["needs"])
        and (tables := _document(comparison, base, entry)) is not None
    }
    for name, tables in known.items():
        write_named(folder / f"{name}.toml", text(tables))
    print(f"compare: {folder}: {len(known)} run files of {len(plan)}")


def _table(file: Path, path: Path) -> None:
    from parts.comparison import output_files, results_table, training_result
    from parts.comparison.trainings import PlannedTraining, by_seed

    comparison, base = _loaded(file)
    plan, made_of = _planned(comparison, path), f"code {version.with_commit()}"
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
