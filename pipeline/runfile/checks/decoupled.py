"""Checks of Decoupled DiLoCo: it needs a clock that says which messages are late."""

from collections.abc import Callable

from lockstep.methods.optimizer_table import OptimizerDecoupledDiLoCo, OptimizerVariant
from lockstep.tables.links import Links
from lockstep.tables.table import wrong
from pipeline.runfile.tables import Peers


def check_decoupled(
    optimizer: OptimizerVariant | None,
    peers: Peers,
    links: Links,
    verification_percent: int,
    said: Callable[[str], str] = str,
) -> None:
    """Check that rounds can close without those that are late, where the optimizer has it so.

    said(key) is what errors call a key.

    Raises:
      PydanticCustomError: They cannot, with the key and what was expected.
    """
    if not isinstance(optimizer, OptimizerDecoupledDiLoCo):
        return
    name = optimizer.tag()
    if optimizer.quorum > peers.count:
        key = *said("model.LLM.optimizer").split("."), name, "quorum"
        raise wrong(key, f"at most {said('peers.count')} ({peers.count})")
    if links.clock == "wall":
        raise wrong(("links", "clock"), f"simulated with {name}, whose rounds close by it")
    if peers.layout != "each":
        text = f"each with {name}: not all peers train in every round"
        raise wrong(tuple(said("peers.layout").split(".")), text)
    if verification_percent:
        text = f"0 with {name}: a round does not wait until a step was taken again"
        raise wrong(tuple(said("config.verification_percent").split(".")), text)
