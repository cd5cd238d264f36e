"""Checks of `[links] topology`: it needs messages whose sum is a message."""

from lockstep.methods.optimizer_table import (
    Compressing,
    OptimizerDecoupledDiLoCo,
    OptimizerSparseLoCo,
    OptimizerVariant,
    Rounded,
)
from lockstep.tables.links import Links
from lockstep.tables.table import wrong


def check_topology(links: Links, aggregation: str, optimizer: OptimizerVariant) -> None:
    """Check that messages can be merged on their way, where `[links] topology` has it so.

    Raises:
      PydanticCustomError: They cannot, with the key and what was expected.
    """
    topology = links.topology
    if topology == "broadcast":
        return
    quantized = isinstance(optimizer, Rounded) and optimizer.quantize is not None
    if quantized or isinstance(optimizer, Compressing | OptimizerSparseLoCo):
        what = "with quantize" if quantized else f"with {optimizer.tag()}"
        text = f"broadcast {what}, since the sum of its messages is no message"
        raise wrong(("links", "topology"), text)
    if topology == "ring" and isinstance(optimizer, OptimizerDecoupledDiLoCo):
        text = "broadcast or hub with DecoupledDiLoCo: around a ring all messages arrive together"
        raise wrong(("links", "topology"), text)
    if topology == "ring" and aggregation != "mean":
        text = f"broadcast or hub with aggregation = {aggregation}: on a ring are sums only"
        raise wrong(("links", "topology"), text)
