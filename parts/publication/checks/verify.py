"""`lockstep verify`: checks a publication, and says how each claim is known."""

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from lockstep import __version__
from lockstep.errors import LockstepError, RequestError, brief
from parts.publication import layout, reader, unpacked
from parts.publication.checks import (
    accusations,
    card_again,
    companions,
    measured,
    method,
    own_data,
    records,
    repeat,
    said,
    start_of_chain,
    tasks_again,
    weights,
)
from parts.publication.checks.claims import Verified
from parts.publication.checks.repeat import Audited
from parts.publication.checks.said import CheckedPublication
from parts.publication.layout import Publication
from parts.publication.reader import ReaderAsks
from pipeline import runfile


class Workplace(NamedTuple):
    """The folders on a reader's computer that `verify` uses.

    Attributes:
      aside: An existing folder for what is made again to be compared.
      store: Folder of downloads.
      max_gb: The most that the files of a transcript may have together, 10^9 bytes.
    """

    aside: Path
    store: Path
    max_gb: int


def verify(
    folder: Path, place: Workplace, publication: Publication, run: runfile.Run, asked: ReaderAsks
) -> Verified:
    """Check a publication whose files are as its list says.

    Of the windows that were not chosen files may be missing.

    Raises:
      LockstepError: Something in it contradicts the rest.
    """
    try:
        return _verify(folder, place, publication, run, asked)
    except LockstepError as error:
        if publication.release == __version__:
            raise
        raise type(error)(
            f"{error}; it was published by release {brief(publication.release)}, and this is "
            f"{__version__}"
        ) from error


def _verify(
    folder: Path, place: Workplace, publication: Publication, run: runfile.Run, asked: ReaderAsks
) -> Verified:
    chosen = reader.choose(publication, asked)
    skip = reader.not_needed(publication, chosen)
    most = int(place.max_gb * 1e9)
    whole = unpacked.unpack(folder, place.aside, publication, skip, most)
    audited = repeat.audit(folder, whole, publication, run, chosen)
    with closing(audited.setup.programs):
        _check_draw(publication, asked, audited)
        verdict = records.read_verdict(folder)
        setup, transcript = audited.setup, audited.transcript
        records.check_verdict(verdict, run, transcript, audited.windows, setup.programs)
        made = records.check_made(folder, publication, transcript, whole)
        evaluated = measured.read_evaluated(folder)
        records.check_card(folder, publication, transcript, evaluated)
        start = None
        if audited.kept:
            start = start_of_chain.of(setup, transcript, asked.checkpoint)
            steps = {s for window, _ in audited.chosen for s in (window.opening, window.last)}
            transcript = weights.follow(setup, transcript, start, steps)
            audited = audited._replace(transcript=transcript)
        weights.check(folder, place.aside, publication, run, transcript)
        why = method.why_not(audited)
        replay, found = repeat.replay(audited, why)
        accused = accusations.check(audited, verdict, found, bitwise=why is None)
        if _replays_reach_the_start(audited, asked) and why is None:
            start = start_of_chain.of(setup, transcript, asked.checkpoint)
        held_out = measured.measure(folder, publication, setup, transcript, evaluated)
        if publication.release == __version__:
            card_again.check(folder, publication, setup, transcript, made, evaluated)
        known = companions.claims(folder, publication, run, setup.model)
        if asked.shards is not None:
            known += own_data.check(folder, publication, setup, asked.shards, chosen)
        if asked.tasks and not publication.is_workload:
            known += tasks_again.check(folder, run, evaluated, asked.shards, place.store)

    checked = CheckedPublication(
        audited, publication, asked, skip, accused, evaluated, start, why, replay, held_out
    )
    return said.verified(checked, known)


def _check_draw(publication: Publication, asked: ReaderAsks, audited: Audited) -> None:
    """Refuse a reader's seed that would draw nothing."""
    among, count = audited.published, len(audited.chosen)
    if asked.seed in (None, publication.seed) or count < among or among == audited.total:
        return
    raise RequestError(
        f"--seed: {layout.MANIFEST} has {among} of {audited.total} windows, expected more "
        f"than {count} to draw from; ask the author for `publish --windows {audited.total}`"
    )


def _replays_reach_the_start(audited: Audited, asked: ReaderAsks) -> bool:
    """Whether replays alone, of messages that are not kept, go back to a start that is known."""
    if audited.kept or audited.connected.opening != audited.transcript.snapshots[0]:
        return False
    fresh = runfile.CheckpointInit | runfile.CheckpointEphemeral
    run = audited.setup.run
    return asked.checkpoint is not None or isinstance(run.llm.checkpoint, fresh)
