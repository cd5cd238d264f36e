"""The claims of a publication whose checks all passed."""

from collections.abc import Iterator
from typing import NamedTuple

from lockstep import __version__
from lockstep.errors import brief
from parts.publication.checks import accusations
from parts.publication.checks.accusations import Accusations
from parts.publication.checks.claims import PublicClaim, Sample, SeedOf, Verified
from parts.publication.checks.measured import Measured
from parts.publication.checks.repeat import Audited
from parts.publication.checks.results import Evaluated
from parts.publication.checks.start_of_chain import ChainStart
from parts.publication.layout import Publication
from parts.publication.reader import ReaderAsks
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from pipeline.audit.verdict_text import measured_on

MOST_NAMED = 5  # findings in a line


class CheckedPublication(NamedTuple):
    """What the checks found.

    Attributes:
      audited: The transcript.
      publication: The list of files.
      asked: What the reader asked.
      skip: Files that were not needed.
      accused: The findings of the author's verdict.
      evaluated: The author's results.
      start: What the run began with, if that is known.
      why_not_bitwise: Why bits could not be compared, or None.
      replay: What the chosen windows were replayed with.
      held_out: What was measured again, or None.
    """

    audited: Audited
    publication: Publication
    asked: ReaderAsks
    skip: set[str]
    accused: Accusations
    evaluated: Evaluated
    start: ChainStart | None
    why_not_bitwise: str | None
    replay: Replay
    held_out: Measured | None


def verified(checked: CheckedPublication, known: list[PublicClaim]) -> Verified:
    """Return what is claimed of a publication; of some claims that is `known` already.

    A claim that is proven is not stated as well.
    """
    audited, publication = checked.audited, checked.publication
    sample, same_release = _sample(checked), publication.release == __version__
    claims = [
        _files(publication, checked.skip),
        *_chain(audited, checked.start),
        sample.claim(),
        *([] if checked.held_out is None else [_held_out(checked.held_out)]),
        _card(publication, made_again=same_release),
        *known,
        *_stated(audited, publication, checked.evaluated),
        *_accused(checked.accused),
        *_never_proven(),
    ]
    proven = {claim.name for claim in claims if claim.kind != "stated"}
    claims = [claim for claim in claims if claim.kind != "stated" or claim.name not in proven]
    why_not = list(sample.why_not_verified())
    if not same_release:
        why_not.append(f"release {brief(publication.release)} wrote it, and this is {__version__}")
    return Verified(checked.why_not_bitwise is None, claims, why_not)


def _sample(checked: CheckedPublication) -> Sample:
    audited, replay = checked.audited, checked.replay
    return Sample(
        audited.chosen,
        audited.messages,
        audited.published,
        audited.total,
        _seed_of(checked.publication, audited, checked.asked),
        checked.why_not_bitwise,
        replay.how.limit,
        replay.how.params_limit,
        replay.how.own_limits is not None,
        audited.beacon.text if audited.beacon else None,
    )


def _seed_of(publication: Publication, audited: Audited, asked: ReaderAsks) -> SeedOf:
    if asked.seed is not None:
        return "asked" if asked.seed == publication.seed else "reader"
    if publication.seed is not None:
        return "author"
    return "hash" if audited.beacon is None else "beacon"


def _files(publication: Publication, skip: set[str]) -> PublicClaim:
    whole, count = len(publication.files), len(publication.files) - len(skip)
    of = "" if count == whole else f" of {whole}"
    return PublicClaim("files", "proven", f"{count}{of} files as published", {"count": count})


def _chain(audited: Audited, start: ChainStart | None) -> Iterator[PublicClaim]:
    """Return the claims on the params from the start to the weights."""
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
    what = "replays of all windows"
    if audited.kept:
        counted = _count(audited)
        what = f"all messages that were applied in {rounds} rounds, {counted.applied} of "
        what += f"{counted.sent} sent,"
    text = f"{what} lead from there to the weights, bit for bit"
    yield PublicClaim("weights", "proven", text, chain)
    if start.kind == "stated":
        yield PublicClaim("start", "stated", f"that {begins}")


def _held_out(held: Measured) -> PublicClaim:
    count = measured_on(held.stderr, held.sequences, held.split_sequences)
    if held.sequences < min(held.asked, held.split_sequences):
        count += f", of the {held.asked} asked for"
    if held.different < held.sequences:
        count += f", of which only {held.different} differ"
    text = f"held-out loss {held.loss:.4f} measured again on {count}"
    return PublicClaim("held_out", "proven", text, held._asdict())


class Counted(NamedTuple):
    """How many messages a run has, and what became of them.

    Attributes:
      sent: Messages that were sent.
      applied: Those that were merged.
      late: Those that came too late, or never.
      silent: How often a peer was silent in a round.
      withheld: How often a peer withheld the state that its check needs.
      ejected: Peers that were ejected.
      empty_rounds: Rounds in which nothing was applied.
    """

    sent: int
    applied: int
    late: int
    silent: int
    withheld: int
    ejected: list[int]
    empty_rounds: int


def _count(audited: Audited) -> Counted:
    rounds = audited.transcript.rounds
    return Counted(
        sum(len(entry.evidence.messages) for entry in rounds),
        sum(len(entry.decision.applied) for entry in rounds),
        sum(len(entry.decision.late) for entry in rounds),
        sum(len(entry.evidence.silent) for entry in rounds),
        sum(len(entry.evidence.withheld) for entry in rounds),
        sorted({peer for entry in rounds for peer in entry.decision.ejected}),
        sum(not entry.decision.applied for entry in rounds),
    )


def _left_out(audited: Audited) -> PublicClaim:
    """Return the claim on peers recorded as late or silent; everything else is recomputed."""
    counted = _count(audited)
    parts = [
        f"{counted.sent} messages sent",
        f"{counted.applied} applied",
        f"{counted.late} late or lost",
        f"peers silent {counted.silent} times",
        f"states withheld {counted.withheld} times",
        f"{len(counted.ejected)} peers ejected",
        f"nothing applied in {counted.empty_rounds} of {len(audited.transcript.rounds)} rounds",
    ]
    text = f"who was late or silent: {', '.join(parts)}"
    return PublicClaim("left_out", "stated", text, counted._asdict())


def _card(publication: Publication, *, made_again: bool) -> PublicClaim:
    if made_again:
        return PublicClaim("card", "proven", "the card says what the records say")
    release = brief(publication.release)
    return PublicClaim("card", "stated", f"the text of the card, which release {release} wrote")


def _accused(accused: Accusations) -> Iterator[PublicClaim]:
    """Return the claims on the peers that the author's verdict accuses: confirmed or not."""
    if shown := accused.shown:
        text = f"what the author's audit found of {_named(shown)}"
        yield PublicClaim("findings", "proven", text, {"count": len(shown)})
    if stated := accused.stated:
        text = f"what the author's audit found of {_named(stated)}"
        yield PublicClaim("accusations", "stated", text, {"count": len(stated)})
    text = f"that the author's audit replayed {accused.windows} windows"
    yield PublicClaim("verdict", "stated", text)


def _named(findings: list[Finding]) -> str:
    few = ", ".join(map(accusations.text, findings[:MOST_NAMED]))
    left = len(findings) - MOST_NAMED
    return f"{few} and {left} more" if left > 0 else few


def _stated(
    audited: Audited, publication: Publication, evaluated: Evaluated
) -> Iterator[PublicClaim]:
    """Return the claims that rest on the author's word."""
    yield _left_out(audited)
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
    if evaluated.split_sequences is not None:
        size = evaluated.split_sequences
        text = f"that the held-out split has {size:,} sequences"
        yield PublicClaim("held_out_split", "stated", text, {"sequences": size})


def _never_proven() -> Iterator[PublicClaim]:
    """Return the claims that nothing published can prove."""
    yield PublicClaim("losses", "stated", "losses while training")
    yield PublicClaim("keys", "stated", "with what code and packages")
    yield PublicClaim("data", "stated", "where the sequences come from")
