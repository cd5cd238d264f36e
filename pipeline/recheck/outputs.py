"""What each stage leaves, under which name it is published, and how others know that it is so.

`publish` refuses a run of which a stage left a file that no line here has. So whoever adds an
output says here how it is checked, and has STAGE.py in this folder check it. Imports no JAX.
"""

import re
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError, brief
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import Table
from pipeline.recheck.claim import Kind
from pipeline.stage.keys import OUT
from pipeline.tokens.tokenizer_files import GENERATION, TOKENIZER_FILES

PROOF = "proof"
RUN = f"{PROOF}/run.json"
VERDICT, EVALUATED, SHARDS, SOURCE, RESULTS = (
    f"{PROOF}/{name}.json" for name in ("verdict", "evaluate", "shards", "source", "results")
)
ROWS, HELD_OUT = f"{PROOF}/rows", f"{PROOF}/held_out.safetensors"
TRANSCRIPT = f"{PROOF}/transcript"
HEADER = f"{TRANSCRIPT}/header.json"
CARD = "README.md"
COMPANIONS = (GENERATION, *TOKENIZER_FILES)  # of the weights
WEIGHTS = r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"


class Output(NamedTuple):
    """Some files that a stage leaves, and how a reader knows that they are so."""

    names: str  # in the stage's folder, as a regular expression
    published: str | None  # in a publication, as `re.sub` makes it; None where they are not in one
    kind: Kind | None  # how others know that they are so; None where they are not published
    how: str  # what shows it, or what is published instead

    def name(self, left: str) -> str | None:
        """Return the published name of a file that a stage left; None where it is not published."""
        return self.published and re.sub(self.names, self.published, left)


def _left(names: str, how: str) -> Output:
    return Output(names, None, None, how)


OUTPUTS: dict[str, tuple[Output, ...]] = {
    "download": (
        Output(r"shards\.json", SHARDS, "stated", "a reader's own data show it, if there are any"),
        _left(r"(train|held_out|files)/.+", "the rows of drawn windows, and the held-out ones"),
        _left(r"tokenizer/.+", "the export's tokenizer"),
    ),
    "convert": (
        Output(r"source\.json", SOURCE, "stated", "what it names is compared with the run file"),
        _left(r"params\.safetensors|hf/.+|workload\.json", "the hash of the params before round 1"),
        _left(r"earlier\.json|earlier/.+", "the first snapshot"),
    ),
    "train": (
        Output(r"transcript/(.+)", rf"{TRANSCRIPT}/\1", "proven", "every round is computed again"),
        _left(r"metrics/.+|final\.json", "the rounds, of which the card has the numbers"),
        _left(r"hf/.+", "the export's files"),
        _left(r"signed/.+", "the store of the run, where anybody reads who signed what"),
    ),
    "witness": (
        Output(r"verdict\.json", VERDICT, "sampled", "the drawn windows are replayed"),
        _left(r"verdict\.txt|metrics/witness\.json|bundles/.+", "the verdict, of which they are"),
    ),
    "export": (
        Output(rf"({WEIGHTS}|config\.json)", r"\1", "proven", "made of the last params"),
        Output(r"(params\.safetensors|workload\.json)", r"\1", "proven", "made of the last params"),
        Output(f"({'|'.join(map(re.escape, COMPANIONS))})", r"\1", "stated", "came with the data"),
        Output(r"(README\.md)", r"\1", "proven", "made of the published records"),
    ),
    "evaluate": (
        Output(r"metrics/evaluate\.json", EVALUATED, "proven", "held-out text is measured again"),
        Output(r"evaluate\.json", RESULTS, "proven", "has the same numbers"),
        _left(r"sample\.txt|tasks/.+", "scores, which a reader can have repeated"),
    ),
    "report": (
        Output(r"(README\.md)", r"\1", "proven", "made of the published records"),
        _left(r"report\.html|\w+\.png", "the rounds, of which they are drawn"),
    ),
}
# By the file that says what was trained, the only files of such an export that are published: what
# a user's own code wrote is not. None: all that OUTPUTS has.
EXPORTS = {"config.json": None, "workload.json": (CARD, "workload.json", "params.safetensors")}


class PublishedFile(Table):
    """A file of a publication, or of a stage."""

    bytes: Annotated[int, Field(ge=0, lt=2**50)]
    """Its size."""
    sha256: Hash
    """Its SHA-256."""


class MadeFile(Table, extra="ignore"):
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


def find(stage: str, name: str) -> Output | None:
    """Return the output that a file of a stage belongs to, or None."""
    outputs = OUTPUTS.get(stage, ())
    return next((output for output in outputs if re.fullmatch(output.names, name, re.ASCII)), None)


def need(stage: str, name: str) -> Output:
    """Return the output that a file of a stage belongs to."""
    if (output := find(stage, name)) is None:
        raise LockstepError(
            f"{OUT[stage]}/{brief(name)}: not in the table of pipeline/recheck/outputs.py, "
            f"expected a line there that says how others check this output of stage {stage}"
        )
    return output
