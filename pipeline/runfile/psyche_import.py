"""A Psyche configuration, or the state file of its coordinator, converted to a run file."""

import os
from pathlib import Path

from lockstep.errors import LockstepError, shown
from lockstep.tables.table import Count, Table
from lockstep.tables.validation import validate
from pipeline import runfile
from pipeline.runfile.as_text import run_file
from pipeline.runfile.data import Seed, TokenSize
from pipeline.runfile.psyche import STATE_KEYS
from pipeline.toml_file import read_toml

SERVED = "data.toml"  # beside a state file: what Psyche's data server serves


class ServedData(Table):
    """Psyche's data.toml: the token files that a data server serves."""

    dir: str
    """Their folder; a relative path is relative to the file's own folder."""
    token_size: TokenSize
    """Size of a token in the files."""
    seq_len: Count
    """Length of the served sequences in tokens."""
    shuffle_seed: Seed
    """Seed of the sequences' order."""


def import_psyche(source: Path) -> str:
    """Convert a Psyche configuration or coordinator state file to a run file.

    Psyche's tables keep their spelling and values; Lockstep's own tables that the source lacks get
    their defaults. Each key has its meaning above it. A data server is replaced by the files that
    the data.toml beside the source says it serves.
    """
    document = read_toml(source)
    dropped = [key for key in STATE_KEYS if key in document]
    run = runfile.parse(
        {key: value for key, value in document.items() if key not in dropped}, str(source)
    )
    comments = [f"Imported from {shown(source.name)}."]
    if dropped:
        left_out = ", ".join(dropped)
        comments += [f"Left out, as the state of a run and not its configuration: {left_out}."]
    served, location = source.with_name(SERVED), run.llm.data_location
    if isinstance(location, runfile.DataServer) and served.is_file():
        run = _with_files(run, served)
        comments += [f"The files of {SERVED}, in place of a data server at {location.address}."]
    return run_file(run, *comments)


def _with_files(run: runfile.Run, source: Path) -> runfile.Run:
    """Return the run with the files of a data.toml as its data location."""
    served = validate(ServedData, read_toml(source), str(source))
    if served.seq_len != run.llm.max_seq_len:
        raise LockstepError(
            f"{source}: seq_len is {served.seq_len}, expected {run.llm.max_seq_len}, the value of "
            "model.LLM.max_seq_len"
        )
    local = {
        "path": os.path.normpath(source.parent / served.dir),
        "token_size_in_bytes": served.token_size,
        "shuffle": {"Seeded": served.shuffle_seed},
    }
    location = validate(runfile.DataLocal, local, str(source))
    llm = run.llm.model_copy(update={"data_location": location})
    return run.model_copy(update={"model": run.model.model_copy(update={"LLM": llm})})
