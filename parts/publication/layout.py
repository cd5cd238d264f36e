"""The layout of a publication, its list of files, and which windows it has; imports no JAX.

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
    proof/counted.safetensors      the sequences that batch norms' statistics are computed over
    proof/transcript/              all rounds, hashes and messages, and what the peers of the
                                   published windows owned; some files are packed (transcript.py)
    model.sig                      who signed all of these, if anybody did (signature.py)

Of a workload's export, README.md, workload.json and params.safetensors are here, and not what its
own code wrote. Where messages are not kept, whole snapshots take their place, and rows are of all
peers of a window. Docs: docs/reference/publication.md.

The author's draw of the windows follows from the transcript's hash. A reader draws among the
published ones, with a seed that their author did not know. What is drawn and repeated as one is a
window of one peer or, where messages are not kept, of all its peers together.
"""

import json
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import Field

from lockstep.errors import LockstepError, RequestError, brief
from lockstep.files import read_json
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import U32, Table
from lockstep.tables.validation import validate, validate_json
from lockstep.transcript.windows import Window
from pipeline.net.errors import check_name
from pipeline.recheck.outputs import (
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
    MadeFile,
    PublishedFile,
)
from pipeline.stage import artifacts
from pipeline.stage.keys import STAGES
from pipeline.tokens.shards import RowColumns

if TYPE_CHECKING:
    from lockstep.transcript.transcript import Transcript
    from pipeline.audit.sample import Beacon

FORMAT = 3  # of the list; verdicts of earlier ones may rest on a tolerance
MANIFEST = f"{PROOF}/publication.json"
SIGNATURE = "model.sig"  # beside proof/; the list, which it signs too, does not have it
ROUND, PEER = r"\d{5}|[1-9]\d{5,}", r"\d{3}|[1-9]\d{3,}"  # each has one name
ROW_FILE = rf"{ROWS}/({ROUND})(?:-({PEER}))?\.safetensors"  # first round, and peer if of one
GZIP, PLANES = ".gz", ".planes.gz"
ROUNDS_FILE = "rounds.jsonl"
ROUNDS = f"{TRANSCRIPT}/{ROUNDS_FILE}{GZIP}"
REPORT = "report"  # whose card has results; a run need not have one
ALWAYS = tuple(stage for stage in STAGES if stage != REPORT)  # stages that each run has
RECORDS = [  # the files of stages that are published under a name of their own
    one.published
    for stage in ALWAYS
    for one in OUTPUTS[stage]
    if one.published and one.published.startswith(PROOF) and one.published.endswith(".json")
]
REQUIRED = (*RECORDS, RUN, HEADER, ROUNDS, CARD)
# What a publication may hold: no code, no pickle, and nothing that is never looked at.
STATE = rf"state\.json|(params|shared)\.safetensors|own-({PEER})\.safetensors\.planes\.gz"
PARTS = rf"header\.json|rounds\.jsonl\.gz|payloads/({ROUND})\.bin|snapshots/({ROUND})/({STATE})"
# that JAX knows; it ends with any other at its import
PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")


class Publication(Table):
    """The list of a publication, proof/publication.json."""

    format: Literal[3]
    """Version of the format."""
    release: str
    """Release of Lockstep that wrote it."""
    rounds: Hash
    """SHA-256 of rounds.jsonl, which windows are drawn by; that of its packed file may vary."""
    windows: U32
    """How many windows were drawn, of one peer each where messages are kept."""
    seed: str | None
    """What a reader asked the windows to be drawn with, beside the transcript's hash."""
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{40}|[0-9a-f]{64})$")] | None
    """Commit of git that its author states as that of the source, or null; the card says it too."""
    columns: RowColumns
    """Columns of the data's rows."""
    files: Annotated[dict[str, PublishedFile], Field(min_length=1)]
    """Every other file, by its name."""

    @property
    def size(self) -> int:
        """Bytes of all files of the publication."""
        return sum(file.bytes for file in self.files.values())

    @property
    def row_files(self) -> list[str]:
        """The publication's files with the rows of its windows, in order."""
        found = (name for name in self.files if re.fullmatch(ROW_FILE, name, re.ASCII))
        return sorted(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    @property
    def exported(self) -> dict[str, PublishedFile]:
        """The files of the export in the publication."""
        return {name: file for name, file in self.files.items() if "/" not in name}


def parse(content: bytes, where: str) -> Publication:
    """Read the list of a publication, which errors call `where`.

    Raises:
      RequestError: It has an earlier format, which the release that wrote it reads.
    """
    with suppress(ValueError, RecursionError):  # what is no JSON is said below
        match json.loads(content):
            case {"format": 1 | 2 as earlier, "release": str(release)}:
                raise RequestError(
                    f"{where}: format {earlier}, expected {FORMAT}; release {brief(release)}, "
                    "which wrote it, reads it"
                )
    return validate_json(Publication, content, where)


def made(stage: str) -> str:
    """Return the published name of a stage's made file."""
    return f"{PROOF}/made/{stage}.json"


def read_made(folder: Path, stage: str) -> MadeFile:
    """Read a stage's made file in a publication."""
    return validate(MadeFile, artifacts.read_made(folder / made(stage)), made(stage))


def check(publication: Publication, where: str) -> None:
    """Check that a publication's files may be fetched, and that none is missing."""
    model = next((name for name in EXPORTS if name in publication.files), "config.json")
    for name in publication.files:
        check_name(name, where)
        if not _is_known(name, EXPORTS[model]):
            raise LockstepError(
                f"{where}: lists {brief(repr(name))}, expected only files of an export and of "
                f"{PROOF}/"
            )
    for name in (*REQUIRED, *(EXPORTS[model] or (model,)), *map(made, ALWAYS)):
        if name not in publication.files:
            raise LockstepError(f"{where}: does not list {name}, expected it in a publication")
    if not publication.windows == len(publication.row_files) > 0:
        text = f"windows is {publication.windows}, and {ROWS}/ has {len(publication.row_files)}"
        raise LockstepError(f"{where}: {text}, expected as many, and at least 1")


def _is_known(name: str, exported: tuple[str, ...] | None) -> bool:
    """Return whether a publication may have a file of this name, besides its list."""
    if "/" not in name and exported is not None:
        return name in exported
    return (
        name in (HELD_OUT, artifacts.COUNTED, RUN, CARD, "config.json", *RECORDS, *COMPANIONS)
        or name in map(made, STAGES)
        or re.fullmatch(rf"{WEIGHTS}|{ROW_FILE}|{TRANSCRIPT}/({PARTS})", name, re.ASCII) is not None
    )


def packed_name(original: str) -> str:
    """Return the published name of a packed file of a transcript."""
    if original == ROUNDS_FILE:
        return original + GZIP
    if original.rpartition("/")[2].startswith("own-"):
        return original + PLANES
    return original


def original_name(name: str) -> str:
    """Return the name in the transcript of one of its published files."""
    return name.removesuffix(PLANES).removesuffix(GZIP)


class DrawnWindow(NamedTuple):
    """A window of a publication, and those of its peers that are replayed."""

    window: Window
    peers: tuple[int, ...]


# ---- The author's draw ----


def possible(transcript: "Transcript", windows: list[Window], kept: bool) -> list[DrawnWindow]:
    """Return all windows of a run that a publication can draw, in order.

    A peer that sent nothing in a window is left out: its replay would show nothing.

    Raises:
      LockstepError: Messages are not kept, and nobody sent one in a window: no replay leads through
        it.
    """
    drawable = []
    for window in windows:
        peers = sorted(transcript.senders(window))
        if not (peers or kept):
            raise LockstepError(
                f"{TRANSCRIPT}: nobody sent a message in rounds {window.first} to {window.last}, "
                "expected some, since messages as large as these are not kept"
            )
        groups = [(peer,) for peer in peers] if kept else [tuple(peers)]
        drawable += [DrawnWindow(window, group) for group in groups]
    return drawable


def seed_of(transcript: "Transcript", seed: str | None, beacon: "Beacon | None") -> str:
    """Return the seed of a publication's draw: the rounds' hash, a reader's seed, a beacon."""
    return " ".join((transcript.hash, seed or "", *([] if beacon is None else [beacon.value])))


def draw(
    transcript: "Transcript",
    windows: list[Window],
    seed: str,
    count: int,
    *,
    kept: bool,
    show_own: bool,
) -> list[DrawnWindow]:
    """Draw `count` windows for a publication, with a seed of `seed_of`.

    Where peers do not show what they own (`Reports.show_own`), they are first windows.

    Where messages are kept, all windows of peers are equally likely. Where they are not, the last
    one is always drawn: only its replay connects anything with the weights.
    """
    candidates = possible(transcript, windows if show_own else windows[:1], kept)
    generator = random.Random(f"publication {seed}")
    chosen = [] if kept else candidates[-1:]
    rest = [window for window in candidates if window not in chosen]
    return sorted(chosen + generator.sample(rest, min(count - len(chosen), len(rest))))


def row_file(drawn: DrawnWindow, kept: bool) -> str:
    """Return the publication's file with the rows of a drawn window."""
    peer = f"-{drawn.peers[0]:03}" if kept else ""
    return f"{ROWS}/{drawn.window.first:05}{peer}.safetensors"


# ---- The reader's ----


class ReaderAsks(NamedTuple):
    """A reader's options for a publication."""

    seed: str | None = None  # what the windows are drawn with, or None
    windows: int | None = None  # how many are repeated, or None, see `choose`
    # the reader's folder with the checkpoint that the run began with, or None
    checkpoint: Path | None = None
    # the reader's folder with the run's data, as stage download leaves it, or None
    shards: Path | None = None
    tasks: bool = False  # whether scores of tasks are repeated
    # file of the public key with which the publication has to be signed, or None
    key: Path | None = None


def choose(publication: Publication, asks: ReaderAsks) -> list[str]:
    """Choose the published windows to repeat, by the names of their rows, before any is fetched.

    Those are all that are published or, with a number of `windows` or a reader's own `seed`, so
    many (1 by default) that the seed and the hash of the rounds draw among them. A seed that the
    author has drawn with draws no second time. Where windows are of all peers, the last one comes
    besides, whatever the seed: nothing else is connected with the weights.
    """
    names, seed, count = publication.row_files, asks.seed, asks.windows
    same_seed = seed is not None and seed == publication.seed
    if count is None:
        count = len(names) if seed is None or same_seed else 1
    if count > len(names):
        raise RequestError(
            f"--windows: {MANIFEST} has {len(names)} windows, expected {count}; ask the author for "
            f"`publish --windows {count}`"
        )
    word = "" if same_seed or seed is None else seed
    generator = random.Random(f"reader {publication.rounds} {word}")
    of_all_peers = re.fullmatch(ROW_FILE, names[-1])[2] is None
    always = names[-1:] if of_all_peers else []
    rest = [name for name in names if name not in always]
    chosen = always + generator.sample(rest, min(count, len(rest)))
    return [name for name in names if name in chosen]


def not_needed(publication: Publication, chosen: list[str]) -> set[str]:
    """Return the published files that only windows need which the reader does not choose.

    Windows of all peers share their snapshots, so they differ in their rows only.
    """
    unchosen = set(publication.row_files) - set(chosen)
    matches = (re.fullmatch(ROW_FILE, name) for name in unchosen)
    snapshots = f"{TRANSCRIPT}/snapshots"
    return unchosen | {
        f"{snapshots}/{int(match[1]) - 1:05}/own-{match[2]}.safetensors{PLANES}"
        for match in matches
        if match[2]
    }


def matmul_precision(folder: Path) -> str | None:
    """Return the precision of matrix products that a published run was trained with.

    It is a setting, not a property of a machine, so the reader adopts it: otherwise a header that
    names another one would be reason enough to compare nothing.
    """
    environment = read_json(folder / HEADER).get("environment")
    precision = environment.get("matmul_precision") if isinstance(environment, dict) else None
    return precision if precision in PRECISIONS else None
