"""The model card, made again of what is published: it has no word that is not one of these.

Its numbers are those of the rounds, the verdict and evaluate.json; its tables of the run file, as
they were written, are those that the made files have; of the data and the checkpoint it says what
shards.json and source.json say. What of these is proven, the line of `verify` says of each.
"""

import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from lockstep.errors import LockstepError, brief
from lockstep.files import read_json
from lockstep.transcript import curves
from lockstep.transcript.transcript import Transcript
from parts.publication import layout
from parts.publication.accepted_export import CARD
from parts.publication.checks.records import is_reported
from parts.publication.checks.results import Evaluated
from parts.publication.layout import Made, Publication
from pipeline import runfile
from pipeline.pages import card, results_card
from pipeline.pages.stage_results import Results
from pipeline.stage.keys import STAGES, needs, tracked
from pipeline.start.begin import Setup

NAMES_OF_A_CHECKPOINT = ("seed", "repo_id", "revision", "bucket", "prefix", "key")


def check(
    folder: Path,
    publication: Publication,
    setup: Setup,
    transcript: Transcript,
    made: dict[str, Made],
    evaluated: Evaluated,
) -> None:
    """Check that the card is what stages export and report make of the published records.

    Raises:
      LockstepError: It is not, or a record contradicts another.
    """
    run_file = _run_file(made)
    _check_tables(run_file, made, setup.run)
    _check_source(read_json(folder / layout.SOURCE), setup.run)
    results = read_json(folder / layout.RESULTS)
    _check_results(results, evaluated)
    try:
        due = _render(folder, publication, setup, transcript, made, run_file, results)
    except (TemplateError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise LockstepError(
            f"{CARD}: {layout.SHARDS}, {layout.SOURCE} and {layout.RESULTS} make no card: "
            f"{brief(repr(error))}"
        ) from error
    found = (folder / CARD).read_text(encoding="utf-8")
    if found == due:
        return
    lines = zip(found.split("\n"), due.split("\n"), strict=False)
    number, pair = next(
        ((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1]),
        (min(len(text.split("\n")) for text in (found, due)) + 1, ("other lines", "the end")),
    )
    here, expected = (brief(repr(text)) for text in pair)
    raise LockstepError(
        f"{CARD}: line {number} is {here}, expected {expected} as the stages make it of "
        f"{layout.PROOF}/"
    )


def _render(
    folder: Path,
    publication: Publication,
    setup: Setup,
    transcript: Transcript,
    made: dict[str, Made],
    run_file: dict[str, Any],
    evaluated: dict[str, Any],
) -> str:
    rows, upstream = curves.rows(transcript), _upstream("export")
    params, local_steps = setup.start.state.params, setup.run.llm.inner_steps
    trained = curves.metrics(rows, transcript, params, local_steps)
    header = read_json(transcript.folder / "header.json")
    verdict = read_json(folder / layout.VERDICT)
    subject = setup.subject
    model = read_json(folder / subject.model_file)
    weights = {
        name: file.sha256
        for name, file in sorted(publication.exported.items())
        if name.endswith(".safetensors")
    }
    text = card.render(
        card.Facts(
            keys={stage: made[stage].key for stage in STAGES if stage in upstream},
            run_file=run_file,
            results=Results(header, trained, verdict),
            first_loss=transcript.rounds[0].loss,
            shards=read_json(folder / layout.SHARDS),
            start=read_json(folder / layout.SOURCE),
            environment=made["train"].environment | header["environment"],
            rounds_sha256=transcript.hash,
            model=model,
            subject=subject,
            has_tokenizer=any(name.startswith("tokenizer") for name in publication.exported),
            sha256=weights | {"shards.json": publication.files[layout.SHARDS].sha256},
        )
    )
    if not is_reported(publication):
        return text
    name, data = f"lockstep-{made['train'].key}", made["download"].key
    return results_card.with_results(text, evaluated, name, data)


def _run_file(made: dict[str, Made]) -> dict[str, Any]:
    """The tables of the run file that the export depends on, as the card has them."""
    document: dict[str, Any] = {}
    for stage in sorted(_upstream("export")):
        if made[stage].tables.keys() != {*tracked(stage)}:
            raise LockstepError(
                f"{layout.made(stage)}: tables {brief(str(sorted(made[stage].tables)))}, expected "
                f"those that stage {stage} depends on"
            )
        for name in tracked(stage):
            *tables, last = name.split(".")
            inner = document
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[last] = made[stage].tables[name]
    document["pins"]["tasks"] = ""
    return {table: document[table] for table in runfile.Run.model_fields if table in document}


def _check_tables(document: dict[str, Any], made: dict[str, Made], run: runfile.Run) -> None:
    """Check that tables as they were written mean what the published run file says."""
    copy = json.loads(json.dumps(document))
    said = runfile.parse(copy, "tables of proof/made").model_dump(mode="json")
    whole = run.model_dump(mode="json")
    for stage in _upstream("export"):
        for name in tracked(stage):
            found, due = _value(said, name), _value(whole, name)
            if found != due:
                raise LockstepError(
                    f"{layout.made(stage)}: [{name}] is {brief(str(found))}, expected "
                    f"{brief(str(due))} as in {layout.RUN}"
                )


def _check_source(source: dict[str, Any], run: runfile.Run) -> None:
    """Check that the checkpoint that the card names is the run file's; its commit is stated."""
    said = run.llm.checkpoint
    due = {name: getattr(said, name, None) for name in NAMES_OF_A_CHECKPOINT}
    if isinstance(said, runfile.CheckpointEphemeral):
        due["seed"] = run.workload.seed
    due |= {"checkpoint": said.tag()}
    if due["repo_id"] is None:
        due |= {"commit": None}
    for name, value in due.items():
        if source.get(name) != value:
            raise LockstepError(
                f"{layout.SOURCE}: {name} is {brief(repr(source.get(name)))}, expected "
                f"{brief(repr(value))} as in {layout.RUN}"
            )


def _value(document: Any, name: str) -> Any:
    for part in name.split("."):
        document = document[part]
    return document


def _check_results(results: dict[str, Any], evaluated: Evaluated) -> None:
    """Check that stage evaluate's two files have the same numbers."""
    numbers = {name: results.get(name) for name in evaluated.held_out}
    tasks: dict[str, dict[str, Any]] = {}
    try:
        for task in results["tasks"]:
            metrics = task["metrics"]
            for name, metric in metrics.items():
                of_task = tasks.setdefault(task["name"], {})
                of_task |= {name: metric["value"], f"{name}_stderr": metric["stderr"]}
    except (AttributeError, KeyError, TypeError) as error:
        raise LockstepError(
            f"{layout.RESULTS}: {brief(repr(error))}, expected scores of tasks"
        ) from error
    scored = {name: scores for name, scores in evaluated.tasks.items() if scores is not None}
    said = (numbers, tasks, results.get("workload"))
    if said != (evaluated.held_out, scored, evaluated.workload):
        raise LockstepError(
            f"{layout.RESULTS}: other numbers than {layout.EVALUATED}, expected the same"
        )


def _upstream(stage: str) -> set[str]:
    """A stage and all that it needs."""
    return {stage}.union(*(_upstream(need) for need in needs(stage)))
