"""Checks of `[peers] aggregation`: a rule that would do nothing is refused."""

from lockstep.methods.optimizer_table import (
    Compressing,
    OptimizerSparseLoCo,
    OptimizerVariant,
)
from lockstep.tables.table import wrong
from pipeline.runfile.tables import Peers

OF_LIARS = ("trimmed_mean", "min_support", "multi_krum")  # that need `liars`


def check_aggregation(
    peers: Peers, trainers: int, optimizer: OptimizerVariant, where: tuple[str, ...] = ("peers",)
) -> None:
    """Check that a rule of `[peers] aggregation` does something with an optimizer's messages.

    Args:
      peers: The table.
      trainers: Peers whose messages are merged in a round.
      optimizer: The table of the optimizer.
      where: What errors call the table.

    Raises:
      PydanticCustomError: It does nothing, or cannot be, with the key and what was expected.
    """
    rule, liars = peers.aggregation, peers.liars
    if liars is None and rule in OF_LIARS:
        raise wrong((*where, "liars"), f"a number of peers that may lie with {rule}")
    if liars is not None and rule not in OF_LIARS:
        raise wrong((*where, "liars"), f"none with {rule}, only with {', '.join(OF_LIARS)}")
    if expected := _misfit(rule, liars or 0, trainers, optimizer):
        raise wrong((*where, "aggregation"), expected)


def _misfit(rule: str, liars: int, trainers: int, optimizer: OptimizerVariant) -> str | None:
    """Return what was expected instead of a rule; None if the rule has an effect."""
    name = optimizer.tag()
    compressed = isinstance(optimizer, Compressing)
    sparse = compressed or isinstance(optimizer, OptimizerSparseLoCo)
    if rule in ("min_support", "peer_mean") and not compressed:
        return f"another rule with {name}, whose peers all count for each element"
    if rule == "multi_krum" and sparse:
        return f"another rule with {name}: peers choose their elements, so all are equally far"
    if rule.startswith("rda") and compressed:
        return f"another rule with {name}, whose step has no length of the messages"
    if rule == "norm_clip" and compressed and optimizer.quantize_1bit:
        return "another rule with quantize_1bit: messages of signs all have one norm"
    if rule == "multi_krum" and trainers < 2 * liars + 3:
        return f"at least {2 * liars + 3} training peers with liars = {liars}, not {trainers}"
    if rule == "trimmed_mean" and trainers <= 2 * liars:
        return f"at least {2 * liars + 1} training peers with liars = {liars}, not {trainers}"
    if rule == "min_support" and trainers <= liars:
        return f"at least {liars + 1} training peers with liars = {liars}, not {trainers}"
    return None
