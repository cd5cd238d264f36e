"""The data of `lockstep new`: what `--data` may be, and the table of a run file that it becomes.

`KINDS` has a row for each, in the order in which they are asked. To add one, add a row.
"""

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.tables.validation import meant
from pipeline.preflight.model import StartingModel
from pipeline.sources.text.documents import ENDINGS
from pipeline.sources.token_files.listing import EXTENSIONS
from pipeline.stage.untrusted_files import expand

OF_PACKAGES = "corpus"
HELD_OUT_PERCENT = 5.0
DOCUMENTS_HELD_OUT = 1.0  # percent, where documents are many
PACKAGES_HELD_OUT = 9.0  # percent: two of those that the default run reads
MOST_SEEN_PERCENT = 5.0  # of a held-out document that may stand in the train text
TEXT, TOKENS = "text:", "tokens:"  # what an address or a dataset on the hub has
HUB_REPO = r"[\w-][\w.-]*/[\w.-]+"
HUB_SUBSET = re.compile(HUB_REPO + r":[\w.-]+")
LEAST_VOCABULARY, MOST_VOCABULARY = 258, 2**16
SEEDED = {"Seeded": list(range(1, 33))}  # of params/run.toml


class NewData(NamedTuple):
    """The data of a new run."""

    table: dict[str, Any]  # its table in a run file
    label: str  # what it is, for people
    far: bool = False  # it is fetched from elsewhere: no more of it than the run needs


class LocationKind(NamedTuple):
    """A kind of data location that `--data` may mean."""

    form: str  # what a user writes
    fits: Callable[[str], object]  # whether what a user wrote is one
    make: Callable[[str, StartingModel], NewData]  # text needs the model's tokenizer


def data_named(name: str, model: StartingModel) -> NewData:
    """Return the data that `--data` names."""
    expand(name, "--data")  # or one line, where ~ names nobody's home
    for kind in KINDS:
        if kind.fits(name):
            return kind.make(name, model)
    forms = ", ".join(kind.form for kind in KINDS)
    known = (OF_PACKAGES, *beside(name))
    raise LockstepError(f"--data {name}: not found, expected one of: {forms}{meant(known, name)}")


def beside(name: str) -> list[str]:
    """Return what of the data lies in the folder in which a path would be, named as the path."""
    folder, slash, _ = name.rpartition("/")
    with suppress(OSError, ValueError):
        inside = islice(Path(folder or slash).expanduser().iterdir(), 1000)
        return sorted(f"{folder}{slash}{path.name}" for path in inside)
    return []


# ---- What fits ----


def _has(name: str, *endings: str) -> bool:
    folder = Path(name).expanduser()
    return folder.is_dir() and any(path.name.endswith(endings) for path in folder.rglob("*"))


def _has_rows(name: str) -> bool:
    """Return whether a folder of `--data` has parquet files of token ids, not of text."""
    first = next(iter(sorted(Path(name).expanduser().rglob("*.parquet"))), None)
    if first is None:
        return False
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        return False  # stage download says what is missing
    try:
        return "inputs" in parquet.read_schema(first).names
    except (ArrowException, OSError):
        return False


def _is_text(name: str) -> bool:
    return Path(name).expanduser().exists() and not name.endswith((*EXTENSIONS, ".parquet"))


# ---- The tables ----


def _tokens(model: StartingModel) -> dict[str, Any]:
    """Return the size of the data's stored token: two bytes, unless the vocabulary needs more."""
    most = model.config["vocab_size"]
    return {"token_size_in_bytes": "TwoBytes" if most <= MOST_VOCABULARY else "FourBytes"}


def _in_order(model: StartingModel) -> dict[str, Any]:
    return _tokens(model) | {"shuffle": "DontShuffle"}


def _local(name: str, model: StartingModel) -> NewData:
    table = {"Local": {"path": name, **_tokens(model), "shuffle": SEEDED}}
    return NewData(table, f"token files in {name}")


def _preprocessed(name: str, model: StartingModel) -> NewData:
    return NewData({"Preprocessed": name}, f"packed sequences in the Parquet files of {name}")


def _packages(name: str, model: StartingModel) -> NewData:
    tokens, in_tokens = _tokenizer(model)
    held_out = {"held_out_percent": PACKAGES_HELD_OUT, "most_seen_percent": MOST_SEEN_PERCENT}
    table = tokens | held_out | {"shuffle": SEEDED}
    source = "the source of packages that constraints.txt pins"
    return NewData({"Corpus": table}, f"{source}, {in_tokens}")


def _text(name: str, model: StartingModel) -> NewData:
    new = _documents(name, model)
    table = new.table["Text"] | {"held_out_percent": HELD_OUT_PERCENT}
    if Path(name).expanduser().is_dir() and not _has(name, *ENDINGS):
        table["files"] = [
            f"*{_usual_ending(name)}"
        ]  # an ending that is read only where it is named
    return new._replace(table={"Text": table})


def _usual_ending(name: str) -> str:
    """Return the ending that most files of a data folder have, such as .md."""
    files = (path for path in Path(name).expanduser().rglob("*") if path.is_file())
    endings = Counter(path.suffix for path in files if path.suffix)
    return max(endings, key=lambda ending: (endings[ending], ending), default=".txt")


def _documents(name: str, model: StartingModel) -> NewData:
    """Return the data table for documents anywhere; `owner/name:SUBSET` is a hub subset."""
    tokens, in_tokens = _tokenizer(model)
    source, _, subset = name.partition(":") if HUB_SUBSET.fullmatch(name) else (name, "", "")
    table = {"source": source, **({"subset": subset} if subset else {}), **tokens}
    held_out = {"held_out_percent": DOCUMENTS_HELD_OUT, "most_seen_percent": MOST_SEEN_PERCENT}
    table |= held_out | {"shuffle": SEEDED}
    far = not Path(source).expanduser().exists()
    return NewData({"Text": table}, f"documents of {name}, {in_tokens}", far=far)


def _tokenizer(model: StartingModel) -> tuple[dict[str, Any], str]:
    """Return the data's keys of the tokenizer that text needs, and why they are so."""
    vocabulary = model.config["vocab_size"]
    if model.tokenizer is not None:
        pinned = {"tokenizer_revision": model.revision} if model.revision else {}
        return {"tokenizer": model.tokenizer} | pinned, f"in the tokens of {model.tokenizer}"
    if LEAST_VOCABULARY <= vocabulary <= MOST_VOCABULARY:
        reason = f"in {vocabulary:,} tokens of a tokenizer that is trained on it"
        return {"vocab_size": vocabulary}, reason
    raise LockstepError(
        f"--data: text, but the model has a vocabulary of {vocabulary:,} tokens and no tokenizer, "
        f"expected a tokenizer in its folder, or a vocabulary of {LEAST_VOCABULARY} to "
        f"{MOST_VOCABULARY} tokens, so that a tokenizer can be trained"
    )


def _rows(name: str, model: StartingModel) -> NewData:
    """Return the data table for rows that are not tokens, of arrays:PATH or files:FOLDER."""
    if "workload" not in model.config:
        raise LockstepError(f"--data {name}: has no tokens, expected --workload")
    kind, _, path = name.partition(":")
    table = {"path": path, "shuffle": SEEDED}
    if not (expand(path, f"--data {kind}") / "held_out").is_dir():
        table["held_out_percent"] = HELD_OUT_PERCENT
    return NewData({kind.capitalize(): table}, f"{kind} in {path}")


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
    repo = name.removeprefix(TOKENS)
    table = {"Hub": {"repo_id": repo, **_in_order(model)}}
    return NewData(table, f"token files of {repo} on the hub", far=True)


KINDS = (
    LocationKind(
        f"{OF_PACKAGES} (source of the pinned packages)",
        lambda name: name == OF_PACKAGES,
        _packages,
    ),
    LocationKind(f"a folder of {' or '.join(EXTENSIONS)}", lambda n: _has(n, *EXTENSIONS), _local),
    LocationKind("a folder of .parquet", _has_rows, _preprocessed),
    LocationKind("a folder of .parquet with text", lambda n: _has(n, ".parquet"), _documents),
    LocationKind("a file or folder of text or JSON lines", _is_text, _text),
    LocationKind(
        "text:ADDRESS",
        re.compile(r"text:[a-z0-9+]+://.").match,
        lambda name, model: _documents(name.removeprefix(TEXT), model),
    ),
    LocationKind("https://.../mixture.json", re.compile(r"https?://.*\.json$").match, _mixture),
    LocationKind(
        "https://.../file.parquet or .jsonl",
        lambda n: re.match(r"https?://.", n) and n.lower().endswith(ENDINGS),
        _documents,
    ),
    LocationKind("https://.../file.ds", re.compile(r"https?://.").match, _web),
    LocationKind("gs://bucket/folder", re.compile(r"gs://.").match, _bucket),
    LocationKind("scheme://...", re.compile(r"[a-z0-9+]+://.").match, _url),
    LocationKind("tokens:owner/name on the hub", re.compile(f"{TOKENS}{HUB_REPO}$").match, _hub),
    LocationKind(
        "owner/name or owner/name:SUBSET of text on the hub",
        re.compile(HUB_REPO + r"(:[\w.-]+)?$").match,
        _documents,
    ),
    LocationKind(
        "arrays:PATH or files:FOLDER, with --workload", re.compile("(arrays|files):.").match, _rows
    ),
)
