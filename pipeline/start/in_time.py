"""Checks that a round's messages arrive in time, before a run and during training."""

from lockstep.errors import LockstepError
from lockstep.machine.progress import size
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from lockstep.protocol.driver import RoundSettings
from pipeline import runfile
from pipeline.start.round_settings import round_settings


def arrivals(settings: RoundSettings, programs: Programs, rows: float) -> dict[int, float]:
    """Return when each peer's message has reached every peer, for the check of a round in time.

    It assumes that all peers send, even verifiers, so that the link of each counts.

    Args:
      settings: What a round reads of the run.
      programs: Its programs, for the size of a message: exact where it is dense.
      rows: Rows of the round, all trainers' together.

    Returns:
      By peer, seconds from the round's start on the simulated clock.
    """
    peers, share = range(settings.peers), settings.closing.share
    tokens = {p: share(p, rows, settings.trainers) * settings.row_tokens for p in peers}
    sizes = dict.fromkeys(peers, programs.form.bytes_about)
    return links.arrivals(settings.links, peers, tokens, sizes, programs.optimizer.overlapped)


def check(run: runfile.Run, programs: Programs) -> str | None:
    """Return a warning if some peers' messages cannot arrive in time, or None.

    Raises:
      LockstepError: No message can in any round, so nothing would be trained.
    """
    if not run.links.computed:  # nobody knows yet
        return None
    limit = run.config.max_round_train_time
    settings = round_settings(run)
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
            "seconds after the round began, expected one in time, since otherwise nothing is "
            f"trained; {cure}"
        )
    late = [peer for peer, at in latest.items() if at > limit]
    if not late or settings.closing.travels_on(1, 0):  # so they are merged later
        return None
    return (
        f"[config] max_round_train_time = {limit}: {message} of peers {late} reaches all peers "
        f"{min(latest[peer] for peer in late):,.1f} seconds or later after the round began, and "
        f"so is not applied; {cure}"
    )
