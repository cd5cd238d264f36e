"""Whether windows can be replayed here bit for bit: there is nothing between that and not at all.

The bits of a run's steps are those of its machine where they go as compiled, and everybody's by
rules (`[peers] bits = "everywhere"`). A window that cannot be compared here proves nothing, and
accuses nobody.
"""

from collections.abc import Iterable

from lockstep.protocol.round import Message
from lockstep.transcript.entry import Header
from pipeline.stage import devices
from pipeline.stage.devices import BY_RULES
from pipeline.start.set_up import Setup


def why_not_comparable(setup: Setup, header: Header, sent: Iterable[Message]) -> str | None:
    """Return why replayed messages cannot be compared here with `sent` bit for bit, or None.

    The reason ends with what would make them comparable.

    Raises:
      LockstepError: No machine changes the run's bits, and its header says that one did.
    """
    if why := devices.never_comparable(setup.run, repeats=setup.subject.repeats(setup.run)):
        return why
    if setup.run.peers.bits == "everywhere":
        devices.check_by_rules(setup.environment(), header.environment, header.bitwise)
        return None
    by_rules = "" if setup.subject.code(setup.model) else f", or with {BY_RULES} on any"
    if not header.bitwise:
        why = "the training machine did not repeat a step bit for bit"
        return f"{why}: comparable from one that does{by_rules}"
    alike = f"comparable on a machine like that{by_rules}"
    if difference := devices.difference(setup.environment(), header.environment):
        name, here, trained = difference
        return f"{name} is {here!r} here, was {trained!r} in training: {alike}"
    here = devices.environment_hash(setup.environment())
    for message in sent:
        if message.environment not in (None, here):
            return f"{message.environment[:12]} is another machine than this, {here[:12]}: {alike}"
    return None
