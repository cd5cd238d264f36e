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
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import LockstepError, brief
from lockstep.programs.columns import Column
from lockstep.protocol.dispute import Hash
from lockstep.tables.explain import validate
from lockstep.tables.table import Count, Table
from pipeline.stage import artifacts
from pipeline.stage.given_files import check_name
from pipeline.tokens.tokenizer_files import TOKENIZER_FILES
from pipeline.weights import generation_config

PROOF = "proof"
MANIFEST = f"{PROOF}/publication.json"
SIGNATURE = "model.sig"  # beside proof/; the list, which it signs too, does not have it
RUN, VERDICT, EVALUATED, SHARDS, SOURCE, RESULTS = (
    f"{PROOF}/{name}.json" for name in ("run", "verdict", "evaluate", "shards", "source", "results")
)
ROWS, HELD_OUT = f"{PROOF}/rows", f"{PROOF}/held_out.safetensors"
ROW_FILE = rf"{ROWS}/(\d{{5,}})(?:-(\d{{3,}}))?\.safetensors"  # first round, and peer if of one
TRANSCRIPT = f"{PROOF}/transcript"
ROUNDS = f"{TRANSCRIPT}/rounds.jsonl.gz"
REQUIRED = ("README.md", f"{TRANSCRIPT}/header.json", ROUNDS)
RECORDS = (RUN, VERDICT, EVALUATED, SHARDS, SOURCE, RESULTS)
MODEL, WORKLOAD = "config.json", "workload.json"  # one of them says what was trained
WORKLOADS = ("README.md", WORKLOAD, "params.safetensors")  # all of a workload's export: no code
REPORT = "report"  # whose card has results; a run need not have one
STAGES = ("download", "convert", "train", "witness", "export", "evaluate")
MOST_MANIFEST_BYTES = 2**20  # it is read into memory before anything is known of it
MOST_SIGNATURE_BYTES = 2**22  # of as many files, in more words and in base64
# What a publication may hold: no code, no pickle, and nothing that is never looked at.
COMPANIONS = (generation_config.NAME, *TOKENIZER_FILES)  # of the weights; nothing proves them
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
STATE_FILES = r"state\.json|(params|shared)\.safetensors|own-\d{3,}\.safetensors\.planes\.gz"
PARTS = rf"header\.json|rounds\.jsonl\.gz|payloads/\d+\.bin|snapshots/\d+/({STATE_FILES})"


class PublishedFile(Table):
    """A file of a publication."""

    bytes: Annotated[int, Field(ge=0, lt=2**50)]
    """Its size."""
    sha256: Hash
    """Its SHA-256."""


class Made(Table, extra="ignore"):
    """A stage's made file, as far as it is compared."""

    key: str
    """Key of the stage."""
    needs: dict[str, Hash]
    """SHA-256 of the made files of the stages that it read."""
    content: dict[str, str]
    """What the key digests."""
    tables: dict[str, Any]
    """The stage's tables of the run file, as they were written."""
    environment: dict[str, str]
    """Versions of packages."""
    files: dict[str, PublishedFile]
    """The files that it left."""


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
    def is_workload(self) -> bool:
        """Whether a workload was trained."""
        return WORKLOAD in self.files

    @property
    def row_files(self) -> list[str]:
        """The files with the rows of the published windows, in order."""
        return sorted(name for name in self.files if re.fullmatch(ROW_FILE, name, re.ASCII))

    @property
    def companions(self) -> list[str]:
        """The files beside the weights that nothing proves, by their names."""
        return sorted(self.files.keys() & set(COMPANIONS))

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


def _is_known(name: str) -> bool:
    """Return whether a publication may have a file of this name, besides its list."""
    return (
        name in (HELD_OUT, MODEL, *RECORDS, *REQUIRED, *COMPANIONS)
        or name in map(made, (*STAGES, REPORT))
        or re.fullmatch(rf"{WEIGHTS}|{ROW_FILE}|{TRANSCRIPT}/({PARTS})", name, re.ASCII) is not None
    )


def check(publication: Publication, where: str) -> None:
    """Check that a publication's files may be fetched, and that none is missing.

    Raises:
      LockstepError: A file has a name that no publication has, or one that each has is not listed.
    """
    of_workload = publication.is_workload
    for name in publication.files:
        check_name(name, where)
        known = name in WORKLOADS if of_workload and "/" not in name else _is_known(name)
        if not known:
            raise LockstepError(
                f"{where}: lists {brief(repr(name))}, expected files of an export and of {PROOF}/ "
                "alone"
            )
    model = WORKLOADS if of_workload else (MODEL,)
    for name in (*RECORDS, *REQUIRED, *model, *map(made, STAGES)):
        if name not in publication.files:
            raise LockstepError(f"{where}: does not list {name}, expected it in a publication")
    if not publication.row_files:
        raise LockstepError(f"{where}: lists no {ROWS}/, expected the sequences of a window")
