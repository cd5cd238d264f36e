"""How a reader compares: bit for bit, unless the reader's own machine cannot."""

import jax

from lockstep.errors import LockstepError, brief
from lockstep.programs.placement import device_groups
from lockstep.programs.replica import Replica
from lockstep.transcript.entry import Header
from lockstep.wire.commitment import tree_hash
from parts.publication.checks.repeat import Audited
from parts.publication.checks.start_of_chain import HEADER
from pipeline.audit.tolerance import why_not_bitwise
from pipeline.stage import devices
from pipeline.start.begin import Setup


def why_not(audited: Audited) -> str | None:
    """Return why bits cannot be compared here, or None.

    The header says on what machine it was trained, and whether that repeated a step bit for bit. A
    machine like it, which is the reader's, shows whether that can be so.

    Raises:
      LockstepError: The header claims a difference that is not there.
    """
    setup, header = audited.setup, audited.transcript.header
    _check_environment(setup, header)
    why = why_not_bitwise(setup, header)
    alike = devices.difference(setup.environment(), header.environment) is None
    if why and not header.bitwise and alike and _repeats(audited):
        raise LockstepError(
            f"{HEADER}: bitwise is false, expected true: this machine is like the "
            "one that the header names, and repeats a step bit for bit"
        )
    return why


def _check_environment(setup: Setup, header: Header) -> None:
    """Check that stage train could have written this of a machine, with this run file.

    Whoever names another machine is compared with by tolerance; what the run file says no machine
    changes.
    """
    said, threads = header.environment, str(setup.run.peers.threads)
    flags = said.get("xla_flags", "")
    if said.get("threads") != threads:
        raise LockstepError(
            f"{HEADER}: environment.threads is {brief(repr(said.get('threads')))}, expected "
            f"{threads!r}, which stage train takes from [peers] threads"
        )
    if not flags.startswith(devices.FLAGS):
        raise LockstepError(
            f"{HEADER}: environment.xla_flags is {brief(repr(flags))}, expected to begin with "
            f"{devices.FLAGS}, as stage train sets them"
        )


def _repeats(audited: Audited) -> bool:
    """Return whether a step of the first chosen window has the same bits twice here."""
    setup, transcript = audited.setup, audited.transcript
    window, peers = audited.chosen[0]
    plan, peer = next(
        (entry.round, peer)
        for entry in transcript.window(window)
        for peer in peers
        if peer in entry.round.assignment
    )
    like, programs = setup.start.state, setup.programs
    group = device_groups(jax.devices(), programs.parts)[0]
    replica = Replica.put(programs, group, *transcript.agreed(window.opening, like))
    own = transcript.own(window.opening, peer, like.own[peer])
    work = setup.settings.work(programs, setup.data, plan.assignment[peer], plan.trainers)

    def once() -> str:  # `own` is donated, so each time a copy
        return tree_hash(jax.device_get(replica.step(group.put(own), work, plan.step)))

    return once() == once()
