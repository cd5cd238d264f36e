"""What faults need of the rest of their run."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.methods.optimizer_table import (
    Compressing,
    OptimizerSparseLoCo,
    OptimizerVariant,
)
from lockstep.tables.faults import KINDS, OF_OTHERS, Fault
from lockstep.tables.peers import PeersTable
from lockstep.tables.table import wrong


class Rounds(Protocol):
    """What of `[config]` bounds the faults of a run."""

    init_min_clients: int
    total_steps: int
    verification_percent: int


def check_faults(
    schedule: Sequence[Fault],
    peers: PeersTable,
    config: Rounds,
    optimizer: OptimizerVariant | None,
    said: Callable[[str], str] = str,
) -> None:
    """Check that faults fit the rest of their run.

    `optimizer` is its table, None for one that has none; said(key) is what errors call a key.

    Raises:
      PydanticCustomError: A fault does not fit, with its key and what was expected.
    """
    where = said("faults.schedule")
    path = tuple(where.split("."))
    for index, fault in enumerate(schedule):
        for earlier, other in enumerate(schedule[:index]):
            if _are_one(fault, other):
                raise wrong((*path, index, "rounds"), f"rounds outside those of {where}[{earlier}]")
    for index, fault in enumerate(schedule):
        if misfit := _misfit(fault, peers, config, optimizer, said):
            key, expected = misfit
            raise wrong((*path, index, key), expected)
    joining = {peer for fault in schedule if fault.kind == "join" for peer in fault.peers}
    most = peers.count - config.init_min_clients
    if len(joining) > most:
        beside = f"beside {said('config.init_min_clients')} from the start"
        raise wrong(path, f"at most {most} peers that join, {beside}")


def _are_one(fault: Fault, other: Fault) -> bool:
    """Whether two faults of a schedule are the same for some peer in some round."""
    apart = fault.rounds[0] > other.rounds[1] or other.rounds[0] > fault.rounds[1]
    return fault.kind == other.kind and bool(set(fault.peers) & set(other.peers)) and not apart


def _misfit(
    fault: Fault,
    peers: PeersTable,
    config: Rounds,
    optimizer: OptimizerVariant | None,
    said: Callable[[str], str],
) -> tuple[str, str] | None:
    """The key of a fault that the rest of the run rules out, and what was expected; or None."""
    count, steps, needs = peers.count, config.total_steps, KINDS[fault.kind].needs
    compressed = isinstance(optimizer, Compressing)
    if max(fault.peers) >= count:
        return "peer", f"less than {said('peers.count')} ({count})"
    if fault.rounds[1] > steps:
        return "rounds", f"rounds up to {said('config.total_steps')} ({steps})"
    if fault.kind in OF_OTHERS and count < 2:
        return "kind", "a kind for a lone peer: this one involves others"
    if needs == "values" and compressed and optimizer.quantize_1bit:
        return "kind", "a kind for signs, or quantize_1bit = false, since signs have no size"
    if needs == "positions" and not (compressed or isinstance(optimizer, OptimizerSparseLoCo)):
        return "kind", "a kind for messages of whole arrays, whose elements no peer chooses"
    if needs == "plain" and not compressed:
        return "kind", "a kind for gradients, which have no indices"
    if needs == "plain" and peers.wire != "psyche":
        text = '"psyche" with it, since compressed indices cannot repeat'
        return "kind", f"{said('peers.wire')} = {text}"
    if needs == "plain" and min(optimizer.compression_topk, optimizer.compression_chunk) < 2:
        return "kind", "at least 2 coefficients per block, so that one can be sent twice"
    if fault.kind == "wrong_precision" and peers.layout != "each":
        text = '"each" with it, so that one peer can run another program'
        return "kind", f"{said('peers.layout')} = {text}"
    if fault.kind == "wrong_precision" and peers.attention == "cudnn":
        text = '"matmul" with it, since cuDNN computes in bfloat16 only'
        return "kind", f"{said('peers.attention')} = {text}"
    if fault.kind == "false_verifier" and not config.verification_percent:
        return (
            "kind",
            f"{said('config.verification_percent')} above 0 with it, so that peers verify",
        )
    return None
