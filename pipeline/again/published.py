"""A published run while a reader makes it again, stage by stage."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import fitted, load_tree
from lockstep.transcript.windows import Window
from lockstep.wire.commitment import flatten
from pipeline import runfile
from pipeline.again.claim import Kind
from pipeline.again.outputs import TRANSCRIPT, Made
from pipeline.audit.tolerance import PeersOfWindows
from pipeline.audit.verdict import Finding
from pipeline.start.begin import Setup
from pipeline.subject import subject_of_model


@dataclass(frozen=True)
class PublishedTranscript(Transcript):
    """A transcript beside the weights that it ends in.

    Attributes:
      weights: Folder of the weights, where they are the last params and nothing else has these.
      followed: Whether the params and the shared state at some snapshots were put there, as they
        follow from the run's start.
    """

    weights: Path | None = None
    followed: bool = False

    def agreed(self, step: int, like: State) -> tuple[Tree, Tree]:
        """Return the params and the optimizer's shared state after `step`."""
        if self.followed or self.weights is None or step != self.snapshots[-1]:
            return super().agreed(step, like)
        shared = load_tree(self._snapshot(step) / "shared.safetensors", like.shared)
        params = flatten(params_of(self.weights, self))
        return fitted(params, like.params, self.weights), shared


class Own(NamedTuple):
    """What a reader has of the run, besides the publication."""

    checkpoint: Path | None  # the folder that the run began with
    shards: Path | None  # the run's data, as stage download leaves them
    tasks: bool  # whether scores of tasks are to be repeated
    aside: Path  # an existing folder for what is made again to be compared
    store: Path  # downloads


class Draw(NamedTuple):
    """How the repeated windows were drawn.

    Attributes:
      published: How many windows the publication has; one of all its peers counts once.
      total: How many the run has.
      seed_of: Whose seed drew: the reader's, among those published (`reader`); a word of the
        reader's that the author has too (`asked`); the author's own (`author`); a beacon's
        (`beacon`); or nobody's but the transcript's hash, which the author makes (`hash`).
      beacon: What the beacon is, or None.
    """

    published: int
    total: int
    seed_of: Literal["reader", "asked", "author", "beacon", "hash"]
    beacon: str | None = None

    def text(self, count: int) -> str:
        """Return how so many windows were drawn."""
        if count == self.total:
            return "all there are"
        return {
            "reader": f"drawn by the reader's seed from the {self.published} that are published",
            "asked": "drawn by the transcript's hash and a word that the author has too, and could "
            "try hashes for",
            "author": "drawn by the transcript's hash and the author's own seed",
            "beacon": f"drawn by the transcript's hash and the beacon, {self.beacon}",
            "hash": "drawn by the author: by the transcript's hash, which the author can vary",
        }[self.seed_of]

    def why_not_verified(self, count: int) -> Iterator[str]:
        """Yield why a sample of so many windows is too weak for the word *verified*.

        An author who may vary what the draw follows varies it until the drawn windows are honest.
        So either all are repeated, or the reader draws, after the publication and among all.
        """
        if count == self.total:
            return
        if self.seed_of != "reader":
            yield "its author could choose what was repeated"
        elif self.published < self.total:
            yield f"its author chose the {self.published} of {self.total} windows to draw among"


class ChainStart(NamedTuple):
    """Params and the optimizer's shared state before the first round, and their source.

    `kind` says whether they were made here, from what `text` names, or are the author's.
    """

    params: Tree
    shared: Tree
    kind: Kind
    text: str


@dataclass
class PublishedRun:
    """A published run whose rounds were all audited; each stage adds what later ones use.

    Attributes:
      folder: The publication's files, with the export at the top.
      files: SHA-256 of each of them, by name.
      chosen: The windows that the reader repeats, with their peers.
      rows: The files with the rows of these, by name.
      findings: What the audit of all rounds found; nothing of it contradicts the transcript.
      made: The made files, by stage.
      release: The release of Lockstep that wrote the publication.
      start: What the run began with, once that is known.
      why: Why bits could not be compared, once that is known; or None.
    """

    folder: Path
    files: dict[str, str]
    own: Own
    setup: Setup
    transcript: PublishedTranscript
    windows: list[Window]
    chosen: PeersOfWindows
    rows: list[str]
    findings: list[Finding]
    draw: Draw
    made: dict[str, Made]
    release: str
    start: ChainStart | None = None
    why: str | None = None

    @property
    def run(self) -> runfile.Run:
        """The run file."""
        return self.setup.run

    @property
    def same_release(self) -> bool:
        """Whether this release wrote the publication, so that it can make its files again."""
        return self.release == __version__

    @property
    def kept(self) -> bool:
        """Whether messages are kept."""
        return self.setup.programs.form.kept

    @property
    def exported(self) -> dict[str, str]:
        """SHA-256 of the export's files, by name."""
        return {name: sha256 for name, sha256 in self.files.items() if "/" not in name}


def params_of(folder: Path, transcript: Transcript) -> Tree:
    """Return the params of published weights, which the transcript says how to read."""
    model = transcript.header.model
    return subject_of_model(model).exported_params(model, folder)


def joined(chosen: PeersOfWindows) -> list[tuple[Window, tuple[int, ...]]]:
    """Return each window once, with all its chosen peers, which are replayed together."""
    return [
        (window, tuple(sorted(peer for w, peers in chosen if w == window for peer in peers)))
        for window in sorted({window for window, _ in chosen})
    ]


def refuse(findings: Iterable[Finding]) -> None:
    """Refuse a publication for the first of some findings.

    Raises:
      LockstepError: There is one.
    """
    if first := next(iter(findings), None):
        raise LockstepError(f"{TRANSCRIPT}: {first}")
