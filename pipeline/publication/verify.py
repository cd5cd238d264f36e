"""`lockstep verify`: checks a publication, and says in one line what that proves and what not."""

from pathlib import Path
from typing import NamedTuple

from pipeline import __version__, runfile
from pipeline.audit import verdict_text
from pipeline.audit.replay import TOLERANCE
from pipeline.errors import LockstepError
from pipeline.publication import records, repeat, weights
from pipeline.publication.layout import MANIFEST, Publication


class Proven(NamedTuple):
    """What a publication proved.

    Attributes:
      files: How many files are as published.
      seed_of_weights: Seed of the fresh weights that the run began with; None if that is not known.
      last: The round after which the params are the weights.
      repeated: First round, last round and peer of each window that was repeated.
      windows: How many windows the run has: one peer, from one snapshot to the next.
      seed: What a reader asked the windows to be drawn with, or None.
      why_not_bitwise: Why bits could not be compared here, or None.
      tolerance: Largest distance of a message from its replay, where bits were not compared.
      held_out_loss: Measured again, nats per token; None where nothing was held out.
      tasks: Names of the tasks whose scores were not repeated.
    """

    files: int
    seed_of_weights: int | None
    last: int
    repeated: list[tuple[int, int, int]]
    windows: int
    seed: str | None
    why_not_bitwise: str | None
    tolerance: float | None
    held_out_loss: float | None
    tasks: list[str]

    def line(self) -> str:
        """Return what was proven and what was not, in one line."""
        several = len(self.repeated) > 1
        named = ", ".join(f"{first}-{last} of peer {peer}" for first, last, peer in self.repeated)
        drawn = "by the transcript's hash" + (" and the reader's seed" if self.seed else "")
        how = verdict_text.compared(self.why_not_bitwise, self.tolerance)
        loss = []
        if self.held_out_loss is not None:
            loss = [f"held-out loss {self.held_out_loss:.4f} measured again"]
        began = []
        if self.seed_of_weights is not None:
            began = [f"the run began with fresh weights of seed {self.seed_of_weights}"]
        left = f"{self.windows - len(self.repeated)} of {self.windows} windows"
        scores = f", the scores of {' and '.join(self.tasks)}" if self.tasks else ""
        parts = [
            f"verified: {self.files} files as published",
            *began,
            f"the weights are the params after round {self.last}",
            f"window{'s' if several else ''} {named}, drawn {drawn}, "
            f"repeat{'' if several else 's'} {how}",
            *loss,
            f"not repeated: {left}{scores}, and where the sequences come from",
        ]
        return "; ".join(parts)


def verify(folder: Path, publication: Publication, run: runfile.Run, seed: str | None) -> Proven:
    """Check a publication whose files are as its list says.

    Args:
      folder: The publication; the last params are added to its transcript.
      publication: Its list of files.
      run: Its run.
      seed: What the reader asked the windows to be drawn with, or None.

    Raises:
      LockstepError: Something in it contradicts the rest.
    """
    if seed is not None and publication.seed != seed:
        raise LockstepError(
            f"{MANIFEST}: seed is {publication.seed!r}, expected {seed!r}, which the author was "
            "asked to draw with"
        )
    try:
        return _verify(folder, publication, run)
    except LockstepError as error:
        if publication.release == __version__:
            raise
        raise LockstepError(
            f"{error}; it was published by release {publication.release}, and this is {__version__}"
        ) from error


def _verify(folder: Path, publication: Publication, run: runfile.Run) -> Proven:
    audited = repeat.audit(folder, publication, run)
    transcript, kept = audited.transcript, audited.setup.programs.form.kept
    verdict = records.read_verdict(folder)
    records.check_verdict(verdict, run, transcript, audited.windows, kept)
    records.check_made(folder, publication, transcript)
    evaluated = repeat.read_evaluated(folder)
    records.check_card(folder, publication, transcript, evaluated.held_out_loss)
    weights.check(folder, run, transcript)
    why = repeat.replay(audited, verdict)
    began = weights.fresh_seed(run, transcript, bitwise=why is None)
    loss = repeat.held_out_loss(folder, publication, run, evaluated.held_out_loss)
    return Proven(
        files=len(publication.files),
        seed_of_weights=began,
        last=transcript.snapshots[-1],
        repeated=[(*window, peer) for window, peers in audited.drawn for peer in peers],
        windows=len(audited.windows) * run.peers.count,
        seed=publication.seed,
        why_not_bitwise=why,
        tolerance=TOLERANCE[run.peers.precision] if why else None,
        held_out_loss=loss,
        tasks=[name for name, scores in evaluated.tasks.items() if scores is not None],
    )
