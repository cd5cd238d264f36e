"""Whether a round's messages are there in time: before a run, and while it trains."""

from lockstep.errors import LockstepError
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.consensus import in_time
from lockstep.swarm.round_settings import RoundSettings
from lockstep.transcript.entry import Entry
from lockstep.transcript.observer import Observer
from pipeline import runfile
from pipeline.stage.progress import size

MOST_EMPTY = 5  # rounds in a row in which nothing is in time, before a training stops


def arrivals(settings: RoundSettings, programs: Programs, rows: float) -> dict[int, float]:
    """Return when each peer's message is at every peer in a round of so many rows.

    All peers are taken to send, the verifiers too, so that each one's link counts.

    Args:
      settings: What a round reads of the run.
      programs: Its programs, for the size of a message: exact where it is dense.
      rows: Rows of the round, all trainers' together.

    Returns:
      By peer, seconds from the round's start on the simulated clock.
    """
    peers = range(settings.peers)
    given = dict.fromkeys(peers, rows / settings.trainers)
    if settings.pace:
        given = {peer: settings.pace.share(peer, int(rows)) for peer in peers}
    tokens = {peer: count * settings.row_tokens for peer, count in given.items()}
    sizes = dict.fromkeys(peers, programs.form.bytes_about)
    return links.arrivals(settings.links, peers, tokens, sizes, programs.optimizer.overlapped)


def check(run: runfile.Run, programs: Programs) -> str | None:
    """Return a warning where some peers' messages cannot be in time, or None.

    Raises:
      LockstepError: No message can, in any round: nothing would be trained.
    """
    if run.links.clock == "wall":  # real time, which nobody knows yet
        return None
    limit = run.config.max_round_train_time
    settings = RoundSettings.of(run)
    batches = [batch for batch, _ in run.config.sizes(run.llm.max_seq_len)]
    earliest = min(arrivals(settings, programs, min(batches)).values())
    latest = arrivals(settings, programs, max(batches))
    message = f"a message of {size(programs.form.bytes_about)}"
    cure = (
        "raise it, or tokens_per_second and upload_mbps of [links], or send less "
        "(model.LLM.optimizer)"
    )
    if earliest > limit:
        raise LockstepError(
            f"[config] max_round_train_time = {limit}: {message} reaches all peers {earliest:,.1f} "
            f"seconds after the round began, expected one in time, or nothing is trained; {cure}"
        )
    late = [peer for peer, at in latest.items() if at > limit]
    if not late or (settings.pace and settings.pace.max_age):  # which merges them later
        return None
    return (
        f"[config] max_round_train_time = {limit}: {message} of peers {late} reaches all peers "
        f"{min(latest[peer] for peer in late):,.1f} seconds or later after the round began, and "
        f"so is not applied; {cure}"
    )


class Watch(Observer):
    """Ends a training of which nothing is in time, or accepted, any more.

    A round in which too few witnesses attest to what is there does not count: other witnesses are
    elected for the next one, and a few that attest to nothing would end the run.

    Args:
      limit: max_round_train_time, seconds.
      name: What errors call the training.
    """

    def __init__(self, limit: float, name: str = "train"):
        self.limit, self.name, self.empty = limit, name, 0

    def took(self, entry: Entry) -> Entry:
        """Count a round.

        Raises:
          LockstepError: It is one too many in a row in which nothing could be applied.
        """
        evidence = entry.evidence
        there = set(in_time(evidence.arrivals, self.limit)).difference(evidence.broken)
        self.empty = 0 if there or entry.decision.applied else self.empty + 1
        if self.empty < MOST_EMPTY:
            return entry
        arrived = evidence.arrivals.values()
        when = f"the first arrived after {min(arrived):,.1f} seconds" if arrived else "none arrived"
        raise LockstepError(
            f"{self.name}: no message was applied in {MOST_EMPTY} rounds in a row, up to round "
            f"{entry.round.step}: {when}, expected some within max_round_train_time = {self.limit}"
        )
