"""What methods and faults need of the rest of a run, of a run file or of `simulate`."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.methods.card import Misfits, OptimizerVariant, Surroundings
from lockstep.tables.faults import KINDS, OF_OTHERS, Fault
from lockstep.tables.peers import PeersTable
from lockstep.tables.table import wrong

OF_LIARS = ("trimmed_mean", "min_support", "multi_krum")  # rules that need `liars`


def check_needs(
    table: OptimizerVariant, run: Surroundings, called: Callable[[str], str] = str
) -> None:
    """Check that a run has what its method needs, and no rule that would do nothing.

    Args:
      table: The method's table.
      run: The rest of the run.
      called: What errors call a key of a run file.
    """
    for key, expected in (*_aggregation(table, run), *table.needs(run), *_topology(table, run)):
        raise wrong(tuple(called(key).split(".")), expected)


def _aggregation(table: OptimizerVariant, run: Surroundings) -> Misfits:
    """Return where a rule of `[peers] aggregation` would do nothing, or cannot be."""
    rule, liars, name = run.aggregation, run.liars or 0, table.tag()
    if run.liars is None and rule in OF_LIARS:
        return [("peers.liars", f"a number of peers that may lie with {rule}")]
    if run.liars is not None and rule not in OF_LIARS:
        return [("peers.liars", f"none with {rule}, only with {', '.join(OF_LIARS)}")]
    # Peers that a rule needs beside those that may lie.
    least = {"multi_krum": 2 * liars + 3, "trimmed_mean": 2 * liars + 1, "min_support": liars + 1}
    compressed = table.sends == "coefficients"
    expected = None
    if rule in ("min_support", "peer_mean") and not compressed:
        expected = f"another rule with {name}, whose peers all count for each element"
    elif rule == "multi_krum" and table.sends != "arrays":
        expected = f"another rule with {name}: peers choose their elements, so all are equally far"
    elif rule.startswith("rda") and compressed:
        expected = f"another rule with {name}, whose step has no length of the messages"
    elif rule == "norm_clip" and table.is_signs:
        expected = "another rule with quantize_1bit: messages of signs all have one norm"
    elif run.trainers < least.get(rule, 0):
        expected = f"at least {least[rule]} training peers with liars = {liars}, not {run.trainers}"
    return [("peers.aggregation", expected)] if expected else []


def _topology(table: OptimizerVariant, run: Surroundings) -> Misfits:
    """Return where messages would be summed on their way, and have no sum."""
    if run.topology == "broadcast":
        return []
    expected = None
    if table.is_rounded or table.sends != "arrays":
        cause = "with quantize" if table.is_rounded else f"with {table.tag()}"
        expected = f"broadcast {cause}, since the sum of its messages is no message"
    elif run.topology == "ring" and run.aggregation != "mean":
        rule = run.aggregation
        expected = f"broadcast or hub with aggregation = {rule}: a ring only sums"
    return [("links.topology", expected)] if expected else []


# ---- Faults ----


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
    called: Callable[[str], str] = str,
) -> None:
    """Check that faults fit the rest of their run.

    `optimizer` is its table, None for one that has none; called(key) is what errors call a key.
    """
    where = called("faults.schedule")
    path = tuple(where.split("."))
    for index, fault in enumerate(schedule):
        for earlier, other in enumerate(schedule[:index]):
            if _are_one(fault, other):
                raise wrong((*path, index, "rounds"), f"rounds outside those of {where}[{earlier}]")
    for index, fault in enumerate(schedule):
        if misfit := _misfit(fault, peers, config, optimizer, called):
            key, expected = misfit
            raise wrong((*path, index, key), expected)
    joining = {peer for fault in schedule if fault.kind == "join" for peer in fault.peers}
    most = peers.count - config.init_min_clients
    if len(joining) > most:
        least = f"{called('config.init_min_clients')} ({config.init_min_clients})"
        raise wrong(
            path, f"at most {most} peers that join, so that {least} are there from the start"
        )


def _are_one(fault: Fault, other: Fault) -> bool:
    """Return whether two faults of a schedule are the same for some peer in some round."""
    disjoint = fault.rounds[0] > other.rounds[1] or other.rounds[0] > fault.rounds[1]
    return fault.kind == other.kind and bool(set(fault.peers) & set(other.peers)) and not disjoint


def _misfit(
    fault: Fault,
    peers: PeersTable,
    config: Rounds,
    optimizer: OptimizerVariant | None,
    called: Callable[[str], str],
) -> tuple[str, str] | None:
    """Return the key of a fault that the rest of the run rules out, and the expected; or None."""
    count, steps, needs = peers.count, config.total_steps, KINDS[fault.kind].needs
    sends = "arrays" if optimizer is None else optimizer.sends
    if max(fault.peers) >= count:
        return "peer", f"less than {called('peers.count')} ({count})"
    if fault.rounds[1] > steps:
        return "rounds", f"rounds up to {called('config.total_steps')} ({steps})"
    if fault.kind in OF_OTHERS and count < 2:
        return "kind", "a kind for a lone peer: this one involves others"
    if needs == "values" and optimizer is not None and optimizer.is_signs:
        return "kind", "a kind for signs, or quantize_1bit = false, since signs have no size"
    if needs == "positions" and sends == "arrays":
        return "kind", "a kind for messages of whole arrays, whose elements no peer chooses"
    if needs == "plain" and sends != "coefficients":
        return "kind", "a kind for gradients, which have no indices"
    if needs == "plain" and peers.wire != "psyche":
        text = '"psyche" with it, since compressed indices cannot repeat'
        return "kind", f"{called('peers.wire')} = {text}"
    if needs == "plain" and min(optimizer.compression_topk, optimizer.compression_chunk) < 2:
        return "kind", "at least 2 coefficients per block, so that one can be sent twice"
    if fault.kind == "wrong_precision" and peers.layout != "each":
        text = '"each" with it, so that one peer can run another program'
        return "kind", f"{called('peers.layout')} = {text}"
    if fault.kind == "wrong_precision" and peers.attention == "cudnn":
        text = '"matmul" with it, since cuDNN computes in bfloat16 only'
        return "kind", f"{called('peers.attention')} = {text}"
    if fault.kind == "false_verifier" and not config.verification_percent:
        return (
            "kind",
            f"{called('config.verification_percent')} above 0 with it, so that peers verify",
        )
    return None
