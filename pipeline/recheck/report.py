"""Stage report again: the model card has no word that is not made of what is published.

Its numbers are those of the rounds, the verdict and evaluate.json; its tables of the run file, as
they were written, are those that the made files have; of the data and the checkpoint it says what
shards.json and source.json say. What of these is proven, the line of `verify` says of each. A run
without stage report has the card of stage export, without results.
"""

import json
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError

from lockstep.errors import LockstepError, brief, expecting
from lockstep.files import read_json
from lockstep.machine.progress import size
from lockstep.transcript import curves
from pipeline import runfile
from pipeline.audit.verdict_text import HELD_OUT, HELD_OUT_SPLIT
from pipeline.pages import card, results_card
from pipeline.pages.stage_results import Results
from pipeline.recheck import evaluate
from pipeline.recheck.claim import PublicClaim
from pipeline.recheck.convert import check_source
from pipeline.recheck.evaluate import Evaluated
from pipeline.recheck.outputs import (
    CARD,
    EVALUATED,
    PROOF,
    RESULTS,
    RUN,
    SHARDS,
    SOURCE,
    VERDICT,
    MadeFile,
)
from pipeline.recheck.published import PublishedRun
from pipeline.stage.keys import PINS, STAGES, pinned, tracked, upstream
from pipeline.stage.untrusted_files import load_yaml
from pipeline.toml_file import value_at

# Of a stranger's record.
NOT_AS_WRITTEN = (ArithmeticError, AttributeError, KeyError, TypeError, ValueError)
MOST_CARD_BYTES = 2**20  # it is parsed
FENCE, INDEX = "---\n", "model-index"


def recheck(published: PublishedRun) -> list[PublicClaim]:
    """Check that the card is what stages export and report make of the published records.

    Of a card of another release, check only the hashes in it, and its results.
    """
    text = _read_card(published)
    record = evaluate.read(published) if "report" in published.made else None
    check_results(text, record)
    if not published.same_release:
        release = brief(published.release)
        words = f"the text of the card, which release {release} wrote"
        return [PublicClaim("card", "stated", words)]
    records = f"{SHARDS}, {SOURCE} and {RESULTS}"
    with expecting(records, "records that make a card", TemplateError, *NOT_AS_WRITTEN):
        expected = make_card(published)
    _compare(text, expected)
    return [PublicClaim("card", "proven", "the card says what the records say")]


def read_card(folder: Path) -> str:
    """Return the text of a publication's card, which is short enough to be parsed."""
    path = folder / CARD
    if (bytes_ := path.stat().st_size) > MOST_CARD_BYTES:
        raise LockstepError(
            f"{CARD}: {size(bytes_)}, expected a model card of at most {size(MOST_CARD_BYTES)}"
        )
    with expecting(CARD, "a model card", OSError, UnicodeDecodeError):
        return path.read_bytes().decode()


def _read_card(published: PublishedRun) -> str:
    """Return the card, which names the weights and the transcript by their SHA-256."""
    text = read_card(published.folder)
    digests = _weights(published) | {"the transcript's rounds": published.transcript.hash}
    for name, sha256 in digests.items():
        if sha256 not in text:
            raise LockstepError(
                f"{CARD}: does not have the SHA-256 of {name}, expected {sha256[:12]}"
            )
    return text


def _weights(published: PublishedRun) -> dict[str, str]:
    exported = sorted(published.exported.items())
    return {name: sha256 for name, sha256 in exported if name.endswith(".safetensors")}


def _compare(card: str, due: str) -> None:
    """Compare a published card with the one that is due, and name the first line that differs."""
    if card == due:
        return
    lines = zip(card.split("\n"), due.split("\n"), strict=False)
    number, pair = next(
        ((n, pair) for n, pair in enumerate(lines, start=1) if pair[0] != pair[1]),
        (min(len(text.split("\n")) for text in (card, due)) + 1, ("other lines", "the end")),
    )
    line, expected = (brief(repr(text)) for text in pair)
    raise LockstepError(
        f"{CARD}: line {number} is {line}, expected {expected} as the stages write it from {PROOF}/"
    )


# ---- The whole card ----


def make_card(published: PublishedRun) -> str:
    """Return the card that follows from the published records.

    Raises:
      LockstepError: A made file has other tables than the run file.
    """
    made, transcript, folder = published.made, published.transcript, published.folder
    _check_names(made)
    source, shards = read_json(folder / SOURCE), read_json(folder / SHARDS)
    check_source(source, published.run)
    tables = card.run_file(lambda stage, name: made[stage].tables[name], shards, source)
    _check_tables(tables, published)
    params, local_steps = published.setup.start.state.params, published.run.llm.inner_steps
    metrics = curves.metrics(curves.rows(transcript), transcript, params, local_steps)
    header = read_json(transcript.folder / "header.json")
    text = card.render(
        card.Facts(
            keys={stage: made[stage].key for stage in STAGES if stage in upstream("export")},
            run_file=tables,
            results=Results(header, metrics, read_json(folder / VERDICT)),
            transcript=transcript,
            shards=shards,
            start=source,
            packages=made["train"].environment,
            folder=folder,
            has_tokenizer=any(name.startswith("tokenizer") for name in published.exported),
            sha256=_weights(published) | {"shards.json": published.files[SHARDS]},
        )
    )
    if "report" in made:
        results, name = read_json(folder / RESULTS), f"lockstep-{made['train'].key}"
        text = results_card.with_results(text, results, name, made["download"].key)
    return text if published.commit is None else card.with_commit(text, published.commit)


def _check_names(made: dict[str, MadeFile]) -> None:
    for stage in upstream("export"):
        if (tables := made[stage].tables).keys() != {*tracked(stage)}:
            raise LockstepError(
                f"{PROOF}/made/{stage}.json: tables {brief(str(sorted(tables)))}, expected those "
                f"that stage {stage} depends on"
            )


def _check_tables(document: dict[str, Any], published: PublishedRun) -> None:
    """Check that the tables as written mean the same as the published run file."""
    copy = json.loads(json.dumps(document))
    written = runfile.parse(copy, "tables of proof/made").model_dump(mode="json")
    run_file = published.run.model_dump(mode="json")
    for stage in upstream("export"):
        for name in (*tracked(stage), *(f"{PINS}{key}" for key in pinned(stage))):
            found, due = (value_at(tables, name) for tables in (written, run_file))
            if found != due and not (name.startswith(PINS) and due == ""):
                raise LockstepError(
                    f"{PROOF}/made/{stage}.json: [{name}] is {brief(str(found))}, expected "
                    f"{brief(str(due))} as in {RUN}"
                )


# ---- Results in the front matter ----


def check_results(text: str, record: Evaluated | None) -> None:
    """Check that the results in a card's front matter are those of evaluate.json.

    The hub shows them beside the model: all held-out numbers, and those of some or all tasks.
    A card without results has no evaluate.json: `record` is None.
    """
    from huggingface_hub.repocard_data import model_index_to_eval_results

    index = _front(text).get(INDEX)
    numbers = {} if record is None else record.model_dump(include=set(HELD_OUT))
    due = {("held_out", name): value for name, value in numbers.items() if value is not None}
    if index is None and (not due or (record is not None and record.workload is not None)):
        return  # the hub's index knows no loss that only a workload's code can explain
    with expecting(f"{CARD}: {INDEX}", "one model with results", *NOT_AS_WRITTEN):
        [_] = index
        _, results = model_index_to_eval_results(index)
    remaining = due | {
        (task, metric): value
        for task, metrics in (record.scored if record else {}).items()
        for metric, value in metrics.items()
        if value is not None
    }
    for result in results:
        which = (result.dataset_type, result.metric_type)
        value = remaining.pop(which, None) if all(isinstance(part, str) for part in which) else None
        name = brief(f"{which[1]} of {which[0]}")
        if value is None or result.metric_value != round(value, 6):
            expected = "none" if value is None else f"{value:.6f}"
            raise LockstepError(
                f"{CARD}: {name} is {brief(repr(result.metric_value))} in its {INDEX}, expected "
                f"{expected} as in {EVALUATED}"
            )
        names = HELD_OUT_SPLIT, HELD_OUT.get(which[1])
        if which in due and (result.dataset_name, result.metric_name) != names:
            found = brief(repr((result.dataset_name, result.metric_name)))
            raise LockstepError(f"{CARD}: {name} is named {found} in its {INDEX}, expected {names}")
    if missing := sorted(due.keys() & remaining.keys()):
        dataset, metric = missing[0]
        raise LockstepError(
            f"{CARD}: its {INDEX} lacks {metric} of {dataset}, expected the value in {EVALUATED}"
        )


def _front(text: str) -> dict[str, Any]:
    """Return a published card's front matter, which has one meaning only: as stages write YAML."""
    beginning, _, rest = text.partition(FENCE)
    front, fence, _ = rest.partition(f"\n{FENCE}")
    try:
        document = load_yaml(front, f"{CARD}: its front matter")
        same = yaml.safe_dump(document, sort_keys=False) == f"{front}\n"
    except (yaml.YAMLError, RecursionError, ValueError):
        document, same = None, False
    if beginning or not fence or not same or not isinstance(document, dict):
        raise LockstepError(
            f"{CARD}: cannot read its front matter, expected it as stages export and report write "
            "it"
        )
    return document
