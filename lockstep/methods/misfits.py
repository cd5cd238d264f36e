"""What methods and faults need of the rest of a run, of a run file or of `simulate`."""

from collections.abc import Callable, Sequence

from lockstep.methods.card import Misfits, OptimizerVariant, Surroundings
from lockstep.tables.faults import KINDS, Fault, FaultyRun, Rounds
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
    """Return misfits of a rule of `[peers] aggregation`: where it does nothing, or cannot be."""
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
    """Return misfits of a topology: where messages would be summed underway, and have no sum."""
    if run.links.topology == "broadcast":
        return []
    expected = None
    if table.is_rounded or table.sends != "arrays":
        cause = "with quantize" if table.is_rounded else f"with {table.tag()}"
        expected = f"broadcast {cause}, since the sum of its messages is no message"
    elif run.links.topology == "ring" and run.aggregation != "mean":
        rule = run.aggregation
        expected = f"broadcast or hub with aggregation = {rule}: a ring only sums"
    return [("links.topology", expected)] if expected else []


# ---- Faults ----


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
    sent = optimizer or OptimizerVariant()
    run = FaultyRun(peers, config, sent.sends, sent.is_signs, sent.kept, called)
    where = called("faults.schedule")
    path = tuple(where.split("."))
    for index, fault in enumerate(schedule):
        for earlier, other in enumerate(schedule[:index]):
            apart = fault.rounds[0] > other.rounds[1] or other.rounds[0] > fault.rounds[1]
            if fault.kind == other.kind and {*fault.peers} & {*other.peers} and not apart:
                raise wrong((*path, index, "rounds"), f"rounds outside those of {where}[{earlier}]")
    for index, fault in enumerate(schedule):
        if max(fault.peers) >= peers.count:
            text = f"less than {called('peers.count')} ({peers.count})"
            raise wrong((*path, index, "peer"), text)
        if fault.rounds[1] > config.total_steps:
            text = f"rounds up to {called('config.total_steps')} ({config.total_steps})"
            raise wrong((*path, index, "rounds"), text)
        if expected := KINDS[fault.kind].misfit(run):
            raise wrong((*path, index, "kind"), expected)
    joining = {peer for fault in schedule if fault.kind == "join" for peer in fault.peers}
    most = peers.count - config.init_min_clients
    if len(joining) > most:
        least = f"{called('config.init_min_clients')} ({config.init_min_clients})"
        raise wrong(
            path, f"at most {most} peers that join, so that {least} are there from the start"
        )
