"""The data of `lockstep new`: what `--data` may be, and the table of a run file that it becomes.

`KINDS` has a row for each, in the order in which they are asked. To add one, add a row.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import LockstepError
from pipeline.new.starting_model import StartingModel
from pipeline.sources.listing import EXTENSIONS

OF_PACKAGES = "corpus"
HELD_OUT_PERCENT = 5.0
LEAST_VOCABULARY, MOST_VOCABULARY = 258, 2**16
SEEDED = {"Seeded": list(range(1, 33))}  # of params/run.toml


class NewData(NamedTuple):
    """The data of a new run.

    Attributes:
      table: Its table in a run file.
      said: What it is, for people.
      far: Whether it is fetched from elsewhere, so that no more is fetched than the run needs.
    """

    table: dict[str, Any]
    said: str
    far: bool = False


class LocationKind(NamedTuple):
    """A kind of data location.

    Attributes:
      form: What a user writes.
      fits: Whether what a user wrote is one.
      make: The data, of what a user wrote and the model, whose tokenizer the text needs.
    """

    form: str
    fits: Callable[[str], object]
    make: Callable[[str, StartingModel], NewData]


def data_named(name: str, model: StartingModel) -> NewData:
    """Return the data that `--data` names.

    Raises:
      LockstepError: It is none of `KINDS`, or text without a tokenizer that fits the model.
    """
    for kind in KINDS:
        if kind.fits(name):
            return kind.make(name, model)
    forms = ", ".join(kind.form for kind in KINDS)
    raise LockstepError(f"--data {name}: expected what exists of these: {forms}")


# ---- What fits ----


def _has(name: str, *endings: str) -> bool:
    folder = Path(name).expanduser()
    return folder.is_dir() and any(path.name.endswith(endings) for path in folder.rglob("*"))


def _is_text(name: str) -> bool:
    return Path(name).expanduser().exists() and not name.endswith((*EXTENSIONS, ".parquet"))


# ---- The tables ----


def _tokens(model: StartingModel) -> dict[str, Any]:
    """How tokens are stored: in two bytes, unless the model has more of them than fit."""
    most = model.config["vocab_size"]
    return {"token_size_in_bytes": "TwoBytes" if most <= MOST_VOCABULARY else "FourBytes"}


def _in_order(model: StartingModel) -> dict[str, Any]:
    return _tokens(model) | {"shuffle": "DontShuffle"}


def _local(name: str, model: StartingModel) -> NewData:
    table = {"Local": {"path": name, **_tokens(model), "shuffle": SEEDED}}
    return NewData(table, f"token files in {name}")


def _preprocessed(name: str, model: StartingModel) -> NewData:
    return NewData({"Preprocessed": name}, f"packed sequences in the Parquet files of {name}")


def _text(name: str, model: StartingModel) -> NewData:
    return _corpus({"path": name}, f"text of {name}", model)


def _packages(name: str, model: StartingModel) -> NewData:
    return _corpus({}, "the source of packages that constraints.txt pins", model)


def _corpus(source: dict[str, Any], said: str, model: StartingModel) -> NewData:
    vocabulary = model.config["vocab_size"]
    if model.tokenizer is not None:
        tokens = {"tokenizer": model.tokenizer}
        said += f", in the tokens of {model.tokenizer}"
    elif LEAST_VOCABULARY <= vocabulary <= MOST_VOCABULARY:
        tokens = {"vocab_size": vocabulary}
        said += f", in {vocabulary:,} tokens of a tokenizer that is trained on it"
    else:
        raise LockstepError(
            f"--data: text, and the model has {vocabulary:,} tokens and no tokenizer, expected one "
            f"in its folder, or {LEAST_VOCABULARY} to {MOST_VOCABULARY} tokens, for one to train"
        )
    table = source | tokens | {"held_out_percent": HELD_OUT_PERCENT, "shuffle": SEEDED}
    return NewData({"Corpus": table}, said)


def _mixture(name: str, model: StartingModel) -> NewData:
    return NewData({"WeightedHttp": name}, f"the mixture that {name} lists", far=True)


def _bucket(name: str, model: StartingModel) -> NewData:
    bucket, _, folder = name.removeprefix("gs://").partition("/")
    where = {"Gcp": {"bucket_name": bucket, "filter_directory": folder}}
    return NewData({"Http": {**_in_order(model), "location": where}}, f"tokens in {name}", far=True)


def _web(name: str, model: StartingModel) -> NewData:
    table = {"Http": {**_in_order(model), "location": {"SingleUrl": name}}}
    return NewData(table, f"tokens of {name}", far=True)


def _url(name: str, model: StartingModel) -> NewData:
    return NewData({"Url": {"url": name, **_in_order(model)}}, f"tokens of {name}", far=True)


def _hub(name: str, model: StartingModel) -> NewData:
    table = {"Hub": {"repo_id": name, **_in_order(model)}}
    return NewData(table, f"token files of {name} on the hub", far=True)


KINDS = (
    LocationKind(
        f"{OF_PACKAGES} (source of the pinned packages)",
        lambda name: name == OF_PACKAGES,
        _packages,
    ),
    LocationKind(f"a folder of {' or '.join(EXTENSIONS)}", lambda n: _has(n, *EXTENSIONS), _local),
    LocationKind("a folder of .parquet", lambda name: _has(name, ".parquet"), _preprocessed),
    LocationKind("a file or folder of text or JSON lines", _is_text, _text),
    LocationKind("https://.../mixture.json", re.compile(r"https?://.*\.json$").match, _mixture),
    LocationKind("https://.../file.ds", re.compile(r"https?://.").match, _web),
    LocationKind("gs://bucket/folder", re.compile(r"gs://.").match, _bucket),
    LocationKind("scheme://...", re.compile(r"[a-z0-9+]+://.").match, _url),
    LocationKind("owner/name on the hub", re.compile(r"[\w-][\w.-]*/[\w.-]+$").match, _hub),
)
