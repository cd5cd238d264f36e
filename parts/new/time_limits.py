"""A new run's limits of time, wide enough for its messages by the model of `lockstep plan`."""

import math
from typing import Any

import jax

from lockstep.machine.progress import size
from lockstep.programs.train_step import Programs
from lockstep.protocol import links
from pipeline import runfile
from pipeline.preflight.plan import plan_of
from pipeline.runfile.derived_run import CALLED, Reasons
from pipeline.start import in_time
from pipeline.start.round_settings import round_settings
from pipeline.subject import programs_of

TIME_ROOM = 1.25  # of a time limit over the time that the plan says
FOREVER, LEAST_EPOCH = 10**9, 3600  # seconds of an epoch


def times_that_fit(document: dict[str, Any], model: dict[str, Any], *, one_epoch: bool) -> Reasons:
    """Raise a new run's time limits in place until all messages are in time, and say why.

    Times that suffice stay as they are. So do all under a wall clock, whose times nobody knows.

    Args:
      document: A run file's tables.
      model: The model's config.json.
      one_epoch: Whether an epoch is to be the whole run; else it stays, where no time is widened.
    """
    run = runfile.parse(document, CALLED)
    if run.links.clock != "simulated":
        return {}
    programs, config = programs_of(run, model), document["config"]
    reasons = _message_times(run, programs, config) | _load_time(run, programs, config)
    if "epoch_time" in config and (one_epoch or reasons):  # the older spelling counts rounds
        reasons |= _whole_run(document, model)
    return reasons


def _message_times(run: runfile.Run, programs: Programs, config: dict[str, Any]) -> Reasons:
    rows = max(batch for batch, _ in run.config.sizes(run.llm.max_seq_len))
    latest = max(in_time.arrivals(round_settings(run), programs, rows).values())
    limit = config["max_round_train_time"]
    if latest <= limit:
        return {}
    config["max_round_train_time"] = math.ceil(latest * TIME_ROOM)
    message = size(programs.form.bytes_about)
    why = (
        f"widened from {limit}: by [links], messages of {message} are with all peers "
        f"{latest:,.1f} seconds after a round began, its training included"
    )
    return {"config.max_round_train_time": why}


def _load_time(run: runfile.Run, programs: Programs, config: dict[str, Any]) -> Reasons:
    params = programs.task.shapes
    _, shared = jax.eval_shape(programs.optimizer.init, params)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, shared)))
    peers = range(run.peers.count)
    loaded = max(links.load_seconds(run.links, peer, size=nbytes) for peer in peers)
    limit = config["warmup_time"]
    if loaded <= limit:
        return {}
    config["warmup_time"] = math.ceil(loaded * TIME_ROOM)
    why = f"widened from {limit}: a joining peer fetches {size(nbytes)} in {loaded:,.1f} seconds"
    return {"config.warmup_time": why}


def _whole_run(document: dict[str, Any], model: dict[str, Any]) -> Reasons:
    """Make a new run's epoch longer than the run, at the times that it has now."""
    config = document["config"]
    config["epoch_time"] = FOREVER
    seconds = plan_of(runfile.parse(document, CALLED), model).seconds
    config["epoch_time"] = max(LEAST_EPOCH, 2 * math.ceil(seconds))
    why = f"longer than the whole run, about {seconds:,.0f} simulated seconds, which is one epoch"
    return {"config.epoch_time": why}
