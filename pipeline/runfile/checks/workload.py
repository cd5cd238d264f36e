"""Checks of a workload against the tables of the model that it replaces."""

from lockstep.methods.dense import OptimizerWorkload
from lockstep.methods.diloco import Fragmented
from lockstep.tables.table import wrong
from pipeline.runfile.checkpoint import CheckpointEphemeral, CheckpointRun
from pipeline.runfile.psyche import LLM
from pipeline.runfile.tables import Peers, Workload

# The keys of [peers] that say how models of Lockstep compute, and no workload.
OF_OUR_MODELS = (
    "layout",
    "fsdp",
    "processes",
    "precision",
    "attention",
    "remat",
    "balance_speed",
    "scan_layers",
)


def check_workload(workload: Workload, llm: LLM, peers: Peers) -> None:
    """Check that a workload and the tables of the model that it takes the place of fit."""
    where = ("model", "LLM")
    inner = getattr(llm.optimizer, "inner", None)
    optimizer = (*where, "optimizer")
    if isinstance(llm.optimizer, OptimizerWorkload):
        raise wrong(optimizer, "Workload as the inner optimizer of one with local steps")
    its_own = isinstance(inner, OptimizerWorkload)
    if its_own != (workload.inner != "gradient"):
        text = "Workload" if not its_own else "an optimizer of Lockstep"
        text += f' with workload.inner = "{workload.inner}"'
        raise wrong((*optimizer, llm.optimizer.tag(), *(["inner"] if inner else [])), text)
    if its_own and isinstance(llm.optimizer, Fragmented):
        text = "another optimizer with inner = Workload: fragments are adopted between local steps"
        raise wrong(optimizer, text)
    if not workload.factory:
        return
    if llm.architecture != "HfAuto":
        raise wrong((*where, "architecture"), "HfAuto with workload.factory, whose model it is")
    if not isinstance(llm.checkpoint, CheckpointEphemeral | CheckpointRun):
        text = "Ephemeral with workload.factory, which makes the params, or Run"
        raise wrong((*where, "checkpoint"), text)
    for name in OF_OUR_MODELS:
        if getattr(peers, name) != Peers.model_fields[name].default:
            text = f"{Peers.model_fields[name].default!r} with workload.factory"
            raise wrong(("peers", name), text)
