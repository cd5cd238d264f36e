"""A published run while a reader makes it again, stage by stage."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from lockstep import __version__
from lockstep.errors import LockstepError
from lockstep.optim.optimizer import Tree
from lockstep.transcript.state import State
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.trees import fitted, flatten, load_tree
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit.verdict import Finding
from pipeline.recheck.claim import Kind
from pipeline.recheck.outputs import TRANSCRIPT, MadeFile
from pipeline.start.set_up import Setup
from pipeline.subject import subject_of_model


@dataclass(frozen=True)
class PublishedTranscript(Transcript):
    """A transcript beside the weights that it ends in."""

    weights: Path | None = None  # their folder, if nothing else has the last params
    followed: bool = False  # whether params and shared state follow from the start, and are here

    def agreed(self, step: int, like: State) -> tuple[Tree, Tree]:
        """Return the published params and the optimizer's shared state after `step`."""
        if self.followed or self.weights is None or step != self.snapshots[-1]:
            return super().agreed(step, like)
        shared = load_tree(self._snapshot(step) / "shared.safetensors", like.shared)
        params = flatten(params_of(self.weights, self))
        return fitted(params, like.params, self.weights), shared


class ReaderFiles(NamedTuple):
    """What a reader has of the published run, besides the publication."""

    checkpoint: Path | None  # the folder that the run began with
    shards: Path | None  # the run's data, as stage download leaves them
    tasks: bool  # whether scores of tasks are to be repeated
    aside: Path  # an existing folder for files that are made again to be compared
    store: Path  # downloads


PeersOfWindows = Sequence[tuple[Window, Sequence[int]]]
SeedOf = Literal["reader", "asked", "author", "beacon", "hash"]


class Draw(NamedTuple):
    """How the windows were drawn that a reader repeats of a published run.

    By whose seed: the reader's, among those published (`reader`); a word of the reader's that the
    author has too (`asked`); the author's own (`author`); a beacon's (`beacon`); or the
    transcript's hash, which the author makes (`hash`).
    """

    published: int  # windows that the publication has; one of all its peers counts once
    total: int  # windows of the run in which somebody sent a message
    fixed: int  # windows that are repeated whoever draws: the last one, if messages are not kept
    seed_of: SeedOf
    beacon: str | None = None  # what the beacon is

    def text(self, count: int) -> str:
        """Return how `count` windows were drawn, the fixed ones among them."""
        if count == self.total:
            return "all there are"
        others = "others " if self.fixed else ""
        how = {
            "reader": f"drawn by the reader's seed from the {self.published - self.fixed} {others}"
            "that are published",
            "asked": "drawn by the transcript's hash and a word that the author has too, and could "
            "try hashes for",
            "author": "drawn by the transcript's hash and the author's own seed",
            "beacon": f"drawn by the transcript's hash and the beacon, {self.beacon}",
            "hash": "drawn by the author: by the transcript's hash, which the author can vary",
        }[self.seed_of]
        return f"the last one, whoever draws, and {count - self.fixed} {how}" if others else how

    def why_not_verified(self, count: int) -> Iterator[str]:
        """Yield why a sample of `count` windows is too weak for the word *verified*.

        An author who can vary the draw's input varies it until the drawn windows are honest.
        So either all are repeated, or the reader draws, after the publication and among all; a
        window that is repeated whatever the reader's seed is not drawn.
        """
        if count == self.total:
            return
        if self.seed_of != "reader":
            yield "its author could choose what was repeated"
        elif self.published < self.total:
            yield f"its author chose the {self.published} of {self.total} windows to draw among"
        elif count == self.fixed:
            yield "the reader's seed drew none of its windows"


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
    """A published run whose rounds were all audited; each stage adds what later ones use."""

    folder: Path  # the publication's files, with the export at the top
    files: dict[str, str]  # SHA-256 of each of them, by name
    own: ReaderFiles
    setup: Setup  # the reader's own
    transcript: PublishedTranscript
    windows: list[Window]
    chosen: PeersOfWindows  # the windows that the reader repeats, with their peers
    rows: list[str]  # the files with the rows of these
    findings: list[Finding]  # of the audit of all rounds; none contradicts the transcript
    draw: Draw
    made: dict[str, MadeFile]  # the made files, by stage
    release: str  # of Lockstep, which wrote the publication
    commit: str | None  # of the source, as the author states
    start: ChainStart | None = None  # once it is known
    # Once that is known: the chosen windows that repeat here bit for bit, and why others are not
    # comparable, None if all are.
    repeated: PeersOfWindows = ()
    why: str | None = None

    @property
    def run(self) -> runfile.Run:
        """The run file of the published run."""
        return self.setup.run

    @property
    def same_release(self) -> bool:
        """Whether this release wrote the publication, so that it can make its files again."""
        return self.release == __version__

    @property
    def kept(self) -> bool:
        """Whether messages of the published run are kept."""
        return self.setup.programs.form.kept

    @property
    def stated_rounds(self) -> int:
        """Number of rounds through which only the author's word leads."""
        repeated = {window for window, _ in self.repeated}
        left = [] if self.kept else [w for w in self.windows if w not in repeated]
        return sum(len(window.rounds) for window in left)

    @property
    def exported(self) -> dict[str, str]:
        """SHA-256 of the published export's files, by name."""
        return {name: sha256 for name, sha256 in self.files.items() if "/" not in name}


def params_of(folder: Path, transcript: Transcript) -> Tree:
    """Return the params of published weights, which the transcript says how to read."""
    model = transcript.header.model
    return subject_of_model(model).exports.exported_params(model, folder)


def peers_by_window(chosen: PeersOfWindows) -> list[tuple[Window, tuple[int, ...]]]:
    """Return each published window once, with all its chosen peers, replayed together."""
    return [
        (window, tuple(sorted(peer for w, peers in chosen if w == window for peer in peers)))
        for window in sorted({window for window, _ in chosen})
    ]


def refuse(findings: Iterable[Finding]) -> None:
    """Refuse a published run for the first of some findings."""
    if first := next(iter(findings), None):
        raise LockstepError(f"{TRANSCRIPT}: {first}")
