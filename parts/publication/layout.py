"""The layout of a publication, and its list of files; imports no JAX.

    README.md, config.json, ...    the export, with the report's card if there is one
    proof/publication.json         this list: size and SHA-256 of every other file
    proof/run.json                 the run file
    proof/verdict.json             the verdict of stage witness
    proof/evaluate.json            metrics/evaluate.json
    proof/shards.json, proof/source.json, proof/results.json
                                   what stages download, convert and evaluate say, for the card
    proof/made/STAGE.json          what each stage left, by SHA-256 (its made file)
    proof/rows/00151-003.safetensors
                                   the sequences of a published window: first round, peer
    proof/held_out.safetensors     the held-out sequences
    proof/transcript/              all rounds, hashes and messages, and what the peers of the
                                   published windows owned; some files are packed (packed.py)
    model.sig                      who signed all of these, if anybody did (signature.py)

Of a workload's export, README.md, workload.json and params.safetensors are here, and not what its
own code wrote. Where messages are not kept, whole snapshots take their place, and rows are of all
peers of a window. Docs: docs/reference/publication.md.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lockstep.errors import LockstepError, brief
from lockstep.programs.columns import Column
from lockstep.protocol.attestation import Hash
from lockstep.tables.explain import validate
from lockstep.tables.table import Count, Table
from pipeline.again.outputs import (
    CARD,
    COMPANIONS,
    EXPORTS,
    HEADER,
    HELD_OUT,
    OUTPUTS,
    PROOF,
    ROWS,
    RUN,
    TRANSCRIPT,
    WEIGHTS,
    Made,
    PublishedFile,
)
from pipeline.net.host import check_name
from pipeline.stage import artifacts
from pipeline.stage.keys import STAGES

MANIFEST = f"{PROOF}/publication.json"
SIGNATURE = "model.sig"  # beside proof/; the list, which it signs too, does not have it
ROW_FILE = rf"{ROWS}/(\d{{5,}})(?:-(\d{{3,}}))?\.safetensors"  # first round, and peer if of one
ROUNDS = f"{TRANSCRIPT}/rounds.jsonl.gz"
REPORT = "report"  # whose card has results; a run need not have one
ALWAYS = tuple(stage for stage in STAGES if stage != REPORT)  # stages that each run has
RECORDS = [  # the files of stages that are published under a name of their own
    one.published
    for stage in ALWAYS
    for one in OUTPUTS[stage]
    if one.published and one.published.startswith(PROOF) and one.published.endswith(".json")
]
REQUIRED = (*RECORDS, RUN, HEADER, ROUNDS, CARD)
MOST_MANIFEST_BYTES = 2**20  # it is read into memory before anything is known of it
MOST_SIGNATURE_BYTES = 2**22  # of as many files, in more words and in base64
# What a publication may hold: no code, no pickle, and nothing that is never looked at.
STATE_FILES = r"state\.json|(params|shared)\.safetensors|own-\d{3,}\.safetensors\.planes\.gz"
PARTS = rf"header\.json|rounds\.jsonl\.gz|payloads/\d+\.bin|snapshots/\d+/({STATE_FILES})"


class Publication(Table):
    """proof/publication.json."""

    format: Literal[2]
    """Version of the format."""
    release: str
    """Release of Lockstep that wrote it."""
    rounds: Hash
    """SHA-256 of rounds.jsonl, which windows are drawn by; that of its packed file may vary."""
    windows: Count
    """How many windows were drawn, of one peer each where messages are kept."""
    seed: str | None
    """What a reader asked the windows to be drawn with, beside the transcript's hash."""
    columns: Annotated[tuple[Column, ...], Field(min_length=1)]
    """Columns of the data's rows."""
    files: Annotated[dict[str, PublishedFile], Field(min_length=1)]
    """Every other file, by its name."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())

    @property
    def row_files(self) -> list[str]:
        """The files with the rows of the published windows, in order."""
        return sorted(name for name in self.files if re.fullmatch(ROW_FILE, name, re.ASCII))

    @property
    def exported(self) -> dict[str, PublishedFile]:
        """The files of the export."""
        return {name: file for name, file in self.files.items() if "/" not in name}


def made(stage: str) -> str:
    """Return the name of a stage's made file."""
    return f"{PROOF}/made/{stage}.json"


def read_made(folder: Path, stage: str) -> Made:
    """Return a stage's made file.

    Raises:
      LockstepError: It is missing or damaged.
    """
    return validate(Made, artifacts.read_made(folder / made(stage)), made(stage))


def check(publication: Publication, where: str) -> None:
    """Check that a publication's files may be fetched, and that none is missing.

    Raises:
      LockstepError: A file has a name that no publication has, or one that each has is not listed.
    """
    model = next((name for name in EXPORTS if name in publication.files), "config.json")
    for name in publication.files:
        check_name(name, where)
        if not _is_known(name, EXPORTS[model]):
            raise LockstepError(
                f"{where}: lists {brief(repr(name))}, expected files of an export and of {PROOF}/ "
                "alone"
            )
    for name in (*REQUIRED, *(EXPORTS[model] or (model,)), *map(made, ALWAYS)):
        if name not in publication.files:
            raise LockstepError(f"{where}: does not list {name}, expected it in a publication")
    if not publication.row_files:
        raise LockstepError(f"{where}: lists no {ROWS}/, expected the sequences of a window")


def _is_known(name: str, exported: tuple[str, ...] | None) -> bool:
    """Return whether a publication may have a file of this name, besides its list."""
    if "/" not in name and exported is not None:
        return name in exported
    return (
        name in (HELD_OUT, RUN, CARD, "config.json", *RECORDS, *COMPANIONS)
        or name in map(made, STAGES)
        or re.fullmatch(rf"{WEIGHTS}|{ROW_FILE}|{TRANSCRIPT}/({PARTS})", name, re.ASCII) is not None
    )
