"""The model card of an export, README.md: what was trained, on what, how, and how to reproduce it.

It contains what the stages left and nothing else, neither a date nor a folder of this machine, so
equal exports have equal cards. Paths and addresses of the run file stay as the user wrote them,
without anything that may be a credential.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
import yaml
from jinja2 import Environment

from lockstep import __version__
from lockstep.files import read_json
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit import verdict_text
from pipeline.pages.stage_results import Results
from pipeline.pages.templates import code, environment, without_folders, without_secrets
from pipeline.stage.keys import tracked, upstream
from pipeline.subject import subject_of_model
from pipeline.weights import hf

TEMPLATE = Path(__file__).with_name("card.md.jinja")
SHAPE = (  # keys of config.json that most models have; absent ones are left out
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
    "rope_parameters",
    "tie_word_embeddings",
)
HUB_NAME = r"(?a:[\w.-]+(/[\w.-]+)?)"
REPRODUCE = "## Reproduce it\n\n"  # before what whoever publishes a card adds
LISTED = 40  # token files that the card lists; a large data set has thousands


class Facts(NamedTuple):
    """The facts that a model card shows."""

    keys: dict[str, str]  #: Keys of the export and of the stages before it.
    #: Tables of the run file that the export's key depends on, as they were written, and pins.
    run_file: dict[str, Any]
    results: Results  #: Header, numbers and verdict.
    transcript: Transcript
    shards: dict[str, Any]  #: shards.json.
    start: dict[str, Any]  #: source.json of the checkpoint.
    packages: dict[str, str]  #: Versions of the packages that stage train ran with.
    folder: Path  #: Of the export.
    has_tokenizer: bool  #: Whether the export has a tokenizer.
    sha256: dict[str, str]  #: SHA-256 of its weights, and of shards.json, by file name.


def run_file(
    value: Callable[[str, str], Any], shards: dict[str, Any], start: dict[str, Any]
) -> dict[str, Any]:
    """Return the run file of a model card: tables that the export's key depends on, as written.

    With defaults filled in they would mean the same but have another key. Data and checkpoint are
    pinned to what was read, so that nobody reproduces the run on something else. The pin of tasks
    is empty: engines ask for that key, and the export does not depend on its value.

    Args:
      value: Returns what a stage's key has for a dotted name.
      shards: shards.json.
      start: source.json of the checkpoint.
    """
    document: dict[str, Any] = {}
    for stage in sorted(upstream("export")):
        for name in tracked(stage):
            *tables, last = name.split(".")
            inner = document
            for table in tables:
                inner = inner.setdefault(table, {})
            inner[last] = value(stage, name)
    read = {"data": shards["source"]["sha256"], "checkpoint": start["sha256"], "tasks": ""}
    document["pins"] = read
    return {table: document[table] for table in runfile.Run.model_fields if table in document}


def render(facts: Facts) -> str:
    """Return the model card: front matter in YAML as the hub reads it, and Markdown."""
    public = without_secrets(facts.run_file)
    header, files = facts.results.header, facts.shards["files"]
    llm, subject = header["run"]["model"]["LLM"], subject_of_model(header["model"])
    model = read_json(facts.folder / subject.exports.model_file)
    return (
        _environment(subject.exports.card)
        .get_template((subject.exports.card or TEMPLATE).name)
        .render(
            facts._asdict(),
            model=model,
            title=subject.title(header["model"]),
            release=__version__,
            front=yaml.safe_dump(_front(facts, model), sort_keys=False),
            shape=[(key, model[key]) for key in SHAPE if key in model],
            # what transformers does differently with such a model
            caveat=hf.model_of(model, hf.CONFIG)[1].caveat if "model_type" in model else None,
            environment=facts.packages | header["environment"],
            first_loss=facts.transcript.rounds[0].loss,
            rounds_sha256=facts.transcript.hash,
            run=header["run"],
            splits={
                split: [file for file in files if file["split"] == split]
                for split in dict.fromkeys(file["split"] for file in files)
            },
            listed=files[:LISTED],
            absences=verdict_text.absences(facts.results.verdict),
            stated=verdict_text.stated(facts.results.verdict),
            optimizer=_variant(llm["optimizer"]),
            schedule=_variant(llm["lr_schedule"]),
            faults=facts.run_file["faults"].get("schedule", []),
            toml=_toml(public),
            left_out=public != facts.run_file,
        )
    )


def with_commit(card: str, commit: str) -> str:
    """Return a model card that says which commit the source is of, as whoever publishes it states.

    No stage writes it: a result has one key for equal source, whatever commits have that.
    """
    before, heading, after = card.partition(REPRODUCE)
    return f"{before}{heading}{_commit_line(commit)}{after}"


def without_commit(card: str, commit: str) -> str | None:
    """Return a card as a stage wrote it; None if it does not say this commit, or not there."""
    before, heading, after = card.partition(REPRODUCE)
    line = _commit_line(commit)
    return f"{before}{heading}{after.removeprefix(line)}" if after.startswith(line) else None


def _commit_line(commit: str) -> str:
    return f"Stated by whoever published it: the source is that of commit `{commit}`.\n\n"


def _front(facts: Facts, model: dict[str, Any]) -> dict[str, Any]:
    """Return the card's front matter, without a license: a run does not know that of its data."""
    optimizer, _ = _variant(facts.results.header["run"]["model"]["LLM"]["optimizer"])
    if "model_type" not in model:  # nothing that transformers knows
        return {"tags": ["lockstep", "workload", optimizer.lower()]}
    front = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    repo_id = facts.start.get("repo_id", "")
    if facts.start.get("commit") and re.fullmatch(HUB_NAME, repo_id):  # it came from the hub
        front["base_model"] = repo_id
    return front | {"tags": ["lockstep", model["model_type"], optimizer.lower()]}


def _variant(value: str | dict[str, dict]) -> tuple[str, dict[str, Any]]:
    """Return an enum in the card as serde writes it: the variant's name, settings but for None."""
    if isinstance(value, str):
        return value, {}
    ((name, settings),) = value.items()
    return name, {key: setting for key, setting in settings.items() if setting is not None}


# ---- Markdown ----


def _environment(card: Path | None) -> Environment:
    env = environment(
        *([card.parent] if card else []), escape=False
    )  # Markdown: `code` is what keeps text from being markup
    env.globals["measured_on"] = verdict_text.measured_on
    env.globals["seen_in_train"] = verdict_text.seen_in_train
    env.filters |= {
        "code": code,
        "json": lambda value: json.dumps(value, ensure_ascii=False),
        "number": "{:,}".format,
        "public": without_secrets,
        "verdict": verdict_text.summarize,
        "reason": verdict_text.reason,
        "without_folders": without_folders,
        "cannot_be_audited": verdict_text.cannot_be_audited,
        "compared": verdict_text.compared,
    }
    return env


def _toml(document: dict[str, Any]) -> str:
    """Return a card's document as TOML in which every character is visible."""
    text = tomlkit.dumps(document)
    # outside of strings, where an escape means the same, TOML has no such characters
    return "".join(c if c.isprintable() or c == "\n" else f"\\U{ord(c):08x}" for c in text)
