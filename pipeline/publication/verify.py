"""`lockstep verify`: checks a publication, and says in one line what that proves and what not."""

from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import __version__, runfile
from pipeline.audit.replay import PARAMS_TOLERANCE
from pipeline.errors import LockstepError, brief
from pipeline.publication import records, repeat, weights
from pipeline.publication.layout import MANIFEST, Publication
from pipeline.publication.repeat import Audited, Measured

LONGEST = 200  # characters of a reason that a stranger gave


class Proven(NamedTuple):
    """What a publication proved.

    Attributes:
      files: How many files are as published.
      seed_of_weights: Seed of the fresh weights that the transcript begins with; None if that is
        not known.
      last: The round after which the params are the weights.
      repeated: First round, last round and peer of each window that was repeated.
      windows: How many windows the run has: one peer, from one snapshot to the next.
      seed: What the windows were drawn with beside the transcript's hash, or None.
      seed_is_readers: Whether the reader of this asked for that seed.
      why_not_bitwise: Why bits could not be compared here, as the publisher says, or None.
      tolerance: Largest distance of a message from its replay, where bits were not compared.
      params_tolerance: Largest share of params that may differ then.
      held_out: What was measured of held-out text; None where nothing was held out.
      tasks: Names of the tasks whose scores were not repeated.
      of_workload: Names of what a workload measured by itself, which was not repeated.
      code: Hash of the workload's code and settings, which are the reader's own too; None of a
        model of models/.
      companions: Files beside the weights, which nothing proves.
    """

    files: int
    seed_of_weights: int | None
    last: int
    repeated: list[tuple[int, int, int]]
    windows: int
    seed: str | None
    seed_is_readers: bool
    why_not_bitwise: str | None
    tolerance: float | None
    params_tolerance: float | None
    held_out: Measured | None
    tasks: list[str]
    of_workload: list[str]
    code: str | None
    companions: list[str]

    @property
    def bitwise(self) -> bool:
        """Whether the windows repeat bit for bit."""
        return self.why_not_bitwise is None

    def to_json(self) -> dict[str, Any]:
        """Return all of it, as `json.dumps` takes it."""
        measured = None if self.held_out is None else self.held_out._asdict()
        return {"bitwise": self.bitwise} | self._asdict() | {"held_out": measured}

    def line(self) -> str:
        """Return what was proven and what was not, in one line."""
        how = "" if self.bitwise else " within a tolerance"
        parts = [f"verified{how}: {self.files} files as published"]
        if self.seed_of_weights is not None:
            parts.append(f"the transcript begins with fresh weights of seed {self.seed_of_weights}")
        parts += [f"the weights are the params after round {self.last}", self._windows()]
        if self.held_out is not None:
            parts.append(_said_of(self.held_out))
        unproven = ", ".join(self._unproven())
        parts.append(f"not proven: {unproven}, and where the sequences come from")
        return "; ".join(parts)

    def _windows(self) -> str:
        """Which windows were repeated, and how they were compared."""
        several = len(self.repeated) > 1
        named = ", ".join(f"{first}-{last} of peer {peer}" for first, last, peer in self.repeated)
        drawn = "by the transcript's hash"
        if self.seed is not None:
            drawn += f" and {'the reader' if self.seed_is_readers else 'the publisher'}'s seed"
        how = f"repeat{'' if several else 's'} bit for bit"
        if not self.bitwise:
            how = (
                f"compared by tolerance (distance at most {self.tolerance:.3g}, and up to "
                f"{self.params_tolerance:.0%} of the params may be anything), because the "
                f"publisher says: {brief(self.why_not_bitwise, LONGEST)}"
            )
        return f"window{'s' if several else ''} {named}, drawn {drawn}, {how}"

    def _unproven(self) -> list[str]:
        left = f"{self.windows - len(self.repeated)} of {self.windows} windows"
        scores = [f"the scores of {' and '.join(self.tasks)}"] if self.tasks else []
        own = [f"{brief(name)} of the workload" for name in self.of_workload]
        means = [] if self.code is None else [f"what code {self.code[:12]} of workloads/ means"]
        return [left, *scores, *own, *means, *self.companions, "the text of the card"]


def _said_of(held: Measured) -> str:
    count = f"{held.sequences} sequence{'' if held.sequences == 1 else 's'}"
    if held.sequences < held.asked:
        count += f" of the {held.asked} asked for"
    if held.different < held.sequences:
        count += f", of which only {held.different} differ"
    return f"held-out loss {held.loss:.4f} measured again on {count}"


def verify(
    folder: Path, aside: Path, publication: Publication, run: runfile.Run, seed: str | None
) -> Proven:
    """Check a publication whose files are as its list says.

    What is made again to be compared is put `aside`, in an existing folder. `seed` is what the
    reader asked the windows to be drawn with, or None.

    Raises:
      LockstepError: Something in it contradicts the rest.
    """
    if seed is not None and publication.seed != seed:
        said = None if publication.seed is None else brief(publication.seed)
        raise LockstepError(
            f"{MANIFEST}: seed is {said!r}, expected {seed!r}, which the author was asked to draw "
            "with"
        )
    try:
        return _verify(folder, aside, publication, run, seed)
    except LockstepError as error:
        if publication.release == __version__:
            raise
        raise LockstepError(
            f"{error}; it was published by release {brief(publication.release)}, and this is "
            f"{__version__}"
        ) from error


def _verify(
    folder: Path, aside: Path, publication: Publication, run: runfile.Run, seed: str | None
) -> Proven:
    audited = repeat.audit(folder, publication, run)
    with closing(audited.setup.programs):
        return _verify_audited(folder, aside, publication, audited, seed)


def _verify_audited(
    folder: Path, aside: Path, publication: Publication, audited: Audited, seed: str | None
) -> Proven:
    run, transcript = audited.setup.run, audited.transcript
    kept = audited.setup.programs.form.kept
    verdict = records.read_verdict(folder)
    records.check_verdict(verdict, run, transcript, audited.windows, kept)
    records.check_made(folder, publication, transcript)
    evaluated = repeat.read_evaluated(folder)
    records.check_card(folder, publication, transcript, evaluated)
    weights.check(folder, aside, publication, run, transcript)
    why, tolerance = repeat.replay(audited, verdict) or (None, None)
    began = weights.fresh_seed(audited.setup, transcript, bitwise=why is None)
    measured = repeat.measure(folder, publication, audited.setup, transcript, evaluated)
    return Proven(
        files=len(publication.files),
        seed_of_weights=began,
        last=transcript.snapshots[-1],
        repeated=[(*window, peer) for window, peers in audited.drawn for peer in peers],
        windows=len(audited.windows) * run.peers.count,
        seed=publication.seed,
        seed_is_readers=seed is not None,
        why_not_bitwise=why,
        tolerance=tolerance,
        params_tolerance=PARAMS_TOLERANCE if why else None,
        held_out=measured,
        tasks=[name for name, scores in evaluated.tasks.items() if scores is not None],
        of_workload=sorted(evaluated.workload or {}),
        code=audited.transcript.header.model["workload"]["code"]
        if publication.is_workload
        else None,
        companions=publication.companions,
    )
