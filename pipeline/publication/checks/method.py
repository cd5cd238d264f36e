"""How a reader compares: bit for bit, unless the reader's own machine shows that this cannot be."""

import jax

from pipeline.audit.tolerance import why_not_bitwise
from pipeline.errors import LockstepError
from pipeline.programs.placement import device_groups
from pipeline.programs.replica import Replica
from pipeline.publication.checks.repeat import Audited
from pipeline.publication.layout import TRANSCRIPT
from pipeline.stage import devices
from pipeline.wire.commitment import tree_hash


def why_not(audited: Audited) -> str | None:
    """Return why bits cannot be compared here, or None.

    The header says on what machine it was trained, and whether that repeated a step bit for bit. A
    machine like it, which is the reader's, shows whether that can be so.

    Raises:
      LockstepError: The header claims a difference that is not there.
    """
    setup, header = audited.setup, audited.transcript.header
    why = why_not_bitwise(setup, header)
    alike = devices.difference(setup.environment(), header.environment) is None
    if why and not header.bitwise and alike and _repeats(audited):
        raise LockstepError(
            f"{TRANSCRIPT}/header.json: bitwise is false, expected true: this machine is like the "
            "one that the header names, and repeats a step bit for bit"
        )
    return why


def _repeats(audited: Audited) -> bool:
    """Whether a step of the first chosen window has the same bits twice here."""
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
