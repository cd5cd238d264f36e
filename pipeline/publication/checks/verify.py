"""`lockstep verify`: checks a publication, and says of each claim how it is known."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from pipeline import __version__, runfile
from pipeline.audit.verdict import Verdict
from pipeline.errors import LockstepError, brief
from pipeline.publication import layout, reader
from pipeline.publication.checks import (
    card_again,
    companions,
    measured,
    method,
    own_data,
    records,
    repeat,
    start_of_chain,
    tasks_again,
    unpacked,
    weights,
)
from pipeline.publication.checks.claims import PublicClaim, Sample, SeedOf, Verified
from pipeline.publication.checks.measured import Measured
from pipeline.publication.checks.repeat import Audited
from pipeline.publication.checks.results import Evaluated
from pipeline.publication.checks.start_of_chain import ChainStart
from pipeline.publication.layout import Publication
from pipeline.publication.reader import ReaderAsks


class Workplace(NamedTuple):
    """Where a reader's computer keeps something meanwhile.

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
        raise LockstepError(
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
        replay = repeat.replay(audited, verdict, bitwise=why is None)
        if _replays_reach_the_start(audited, asked) and why is None:
            start = start_of_chain.of(setup, transcript, asked.checkpoint)
        held_out = measured.measure(folder, publication, setup, transcript, evaluated)
        same_release = publication.release == __version__
        if same_release:
            card_again.check(folder, publication, setup, transcript, made, evaluated)
        known = companions.claims(folder, publication, run, setup.model)
        if asked.shards is not None:
            known += own_data.check(folder, publication, setup, asked.shards, chosen)
        if asked.tasks and not publication.is_workload:
            known += tasks_again.check(folder, run, evaluated, asked.shards, place.store)

    sample = Sample(
        audited.chosen,
        audited.published,
        audited.total,
        _seed_of(publication, audited, asked),
        why,
        replay.limit,
        replay.params_limit,
        replay.own_limits is not None,
        audited.beacon.text if audited.beacon else None,
    )
    claims = [
        _files(publication, skip),
        *_chain(audited, start),
        sample.claim(),
        *([] if held_out is None else [_held_out(held_out)]),
        _card(publication, made_again=same_release),
        *known,
        *_stated(audited, publication, verdict, evaluated),
    ]
    proven = {claim.name for claim in claims if claim.kind != "stated"}
    claims = [claim for claim in claims if claim.kind != "stated" or claim.name not in proven]
    return Verified(why is None, claims)


def _check_draw(publication: Publication, asked: ReaderAsks, audited: Audited) -> None:
    """Refuse a reader's seed that would draw nothing."""
    among, count = audited.published, len(audited.chosen)
    if asked.seed in (None, publication.seed) or count < among or among == audited.total:
        return
    raise LockstepError(
        f"{layout.MANIFEST}: has {among} of the run's {audited.total} windows, drawn by its "
        f"author with {brief(repr(publication.seed))}; expected more than {count} to draw from, or "
        f"windows drawn with {brief(repr(asked.seed))}: ask the author for `publish --windows` or "
        "`--seed`"
    )


def _replays_reach_the_start(audited: Audited, asked: ReaderAsks) -> bool:
    """Whether replays alone, of messages that are not kept, go back to a start that is known."""
    if audited.kept or audited.connected.opening != audited.transcript.snapshots[0]:
        return False
    fresh = runfile.CheckpointInit | runfile.CheckpointEphemeral
    run = audited.setup.run
    return asked.checkpoint is not None or isinstance(run.llm.checkpoint, fresh)


def _seed_of(publication: Publication, audited: Audited, asked: ReaderAsks) -> SeedOf:
    if asked.seed is not None:
        return "asked" if asked.seed == publication.seed else "reader"
    if publication.seed is not None:
        return "author"
    return "hash" if audited.beacon is None else "beacon"


# ---- The claims ----


def _files(publication: Publication, skip: set[str]) -> PublicClaim:
    whole, count = len(publication.files), len(publication.files) - len(skip)
    of = "" if count == whole else f" of {whole}"
    return PublicClaim("files", "proven", f"{count}{of} files as published", {"count": count})


def _chain(audited: Audited, start: ChainStart | None) -> Iterator[PublicClaim]:
    """What is known of the params from the start to the weights."""
    last = audited.transcript.snapshots[-1]
    rounds = len(audited.transcript.rounds)
    chain = {"round": last, "chain": start is not None}
    if start is None:
        text = f"the weights are the params after round {last}"
        yield PublicClaim("weights", "proven", text, chain)
        text = f"the params before round {audited.connected.first}, since messages as large"
        yield PublicClaim("start", "stated", f"{text} as these are not kept")
        return
    begins = f"the run begins with {start.text}"
    if start.kind == "proven":
        yield PublicClaim("start", "proven", begins)
    what = f"all messages of {rounds} rounds" if audited.kept else "replays of all windows"
    text = f"{what} lead from there to the weights, bit for bit"
    yield PublicClaim("weights", "proven", text, chain)
    if start.kind == "stated":
        yield PublicClaim("start", "stated", f"that {begins}")


def _held_out(held: Measured) -> PublicClaim:
    count = f"{held.sequences} sequence{'' if held.sequences == 1 else 's'}"
    if held.sequences < held.asked:
        count += f" of the {held.asked} asked for"
    if held.different < held.sequences:
        count += f", of which only {held.different} differ"
    text = f"held-out loss {held.loss:.4f} measured again on {count}"
    return PublicClaim("held_out", "proven", text, held._asdict())


def _card(publication: Publication, *, made_again: bool) -> PublicClaim:
    if made_again:
        return PublicClaim("card", "proven", "the card made again")
    release = brief(publication.release)
    return PublicClaim("card", "stated", f"the text of the card, which release {release} wrote")


def _stated(
    audited: Audited, publication: Publication, verdict: Verdict, evaluated: Evaluated
) -> Iterator[PublicClaim]:
    """What is the author's word."""
    left = audited.total - len(audited.chosen)
    if left:
        which = "windows" if audited.kept else "windows of all peers"
        text = f"the work in {left} of {audited.total} {which}"
        yield PublicClaim("other_windows", "stated", text, {"count": left})
    if scored := [name for name, scores in evaluated.tasks.items() if scores is not None]:
        text = f"the scores of {' and '.join(map(brief, scored))}"
        yield PublicClaim("tasks", "stated", text, {"names": scored})
    if evaluated.workload:
        names = sorted(evaluated.workload)
        text = f"{', '.join(map(brief, names))} of the workload"
        yield PublicClaim("workload", "stated", text, {"names": names})
    if publication.is_workload:
        code = audited.transcript.header.model["workload"]["code"]
        text = f"what code {code[:12]} of workloads/ means"
        yield PublicClaim("code", "stated", text, {"sha256": code})
    if audited.beacon is not None:
        text = "that the beacon was named before the run, that the transcript was public before "
        yield PublicClaim("beacon", "stated", text + "the beacon")
    replayed = len(verdict.replayed_windows)
    yield PublicClaim("verdict", "stated", f"that the author's audit replayed {replayed} windows")
    yield PublicClaim("losses", "stated", "losses while training")
    yield PublicClaim("keys", "stated", "with what code and packages")
    yield PublicClaim("data", "stated", "where the sequences come from")
