"""The kinds of faults that a run file can schedule: what each replaces, and what it needs.

A row has all that validation needs. What is sent in place of the truth is in `swarm/lies.py`, and
when, in `swarm/faults.py`.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from pipeline.runfile.optimizer_table import Compressing, OptimizerVariant
from pipeline.runfile.table import wrong

if TYPE_CHECKING:  # whose fault kinds these are
    from pipeline.runfile.tables import Fault, Peers


class FaultKind(NamedTuple):
    """One kind of fault.

    Attributes:
      wraps: What it replaces: a message, its bytes, a peer's work or program, the clock, a
        witness's attestation, or a verifier's check.
      size: Default of a fault's `size`, or None for a kind without a size.
      needs: The messages that it needs: with "values" or "signs", with "plain" indices on the
        wire, or with "kept" payloads; "" is any.
      does: What the peer does, and what size means; completes "the peer ...".
    """

    wraps: Literal["message", "bytes", "work", "program", "clock", "attestation", "check"]
    size: float | None
    needs: Literal["", "values", "signs", "plain", "kept"]
    does: str


KINDS: dict[str, FaultKind] = {
    # ---- another message than its own, of the right form ----
    "free_rider": FaultKind("message", None, "", "sends zeros, at the first indices"),
    "copycat": FaultKind("message", None, "", "sends the next peer's message as its own"),
    "stale": FaultKind("message", None, "", "sends its own message of an earlier round"),
    "sign_flip": FaultKind("message", None, "", "sends its message negated"),
    "scale_up": FaultKind("message", 10.0, "values", "multiplies its values by size"),
    "scale_down": FaultKind("message", 0.1, "values", "multiplies its values by size"),
    "noise": FaultKind(
        "message",
        1.0,
        "",
        "adds normal noise of size times the values' RMS or, in messages of signs, flips each sign "
        "with probability min(1, size) / 2",
    ),
    "opposite": FaultKind("message", None, "", "sends the negated mean of the others' messages"),
    "little_enough": FaultKind(
        "message", 1.0, "", "sends the mean of the others' messages minus size standard deviations"
    ),
    "drift": FaultKind(
        "message",
        0.01,
        "",
        "shifts its values by size times their RMS, in the same direction every round or, in "
        "messages of signs, flips one sign",
    ),
    "collude": FaultKind(
        "message", None, "", "sends, with its group, the negated message of the group's first peer"
    ),
    "forged": FaultKind(
        "message", None, "", "sends random indices, and signs or values of the true RMS"
    ),
    # ---- bytes that are not a message, or not the one committed to ----
    "malformed": FaultKind("bytes", None, "", "sends only the first half of its bytes"),
    "not_finite": FaultKind("bytes", None, "values", "sends NaN and infinity among its values"),
    "duplicated": FaultKind("bytes", None, "plain", "sends an index of a block twice"),
    "wrong_hash": FaultKind("bytes", None, "", "commits to its message but sends another"),
    "equivocation": FaultKind(
        "bytes", None, "", "sends half of the peers a different message with its own commitment"
    ),
    # ---- other work than was assigned ----
    "lazy": FaultKind(
        "work", 0.5, "", "trains on only the fraction size of its sequences, at least one"
    ),
    "wrong_data": FaultKind("work", None, "", "trains on sequences that were not assigned to it"),
    "wrong_precision": FaultKind(
        "program", None, "", "computes in bfloat16 instead of float32, or the reverse"
    ),
    # ---- the clock ----
    "dropped": FaultKind("clock", None, "", "trains, but its message never arrives"),
    "late": FaultKind("clock", 3600.0, "", "sends its message size seconds late"),
    "crash": FaultKind(
        "clock", None, "", "is offline, loses its state, and then asks to join again"
    ),
    "join": FaultKind(
        "clock", None, "", "is offline from the start of the run, and then asks to join"
    ),
    # ---- its reports about others ----
    "false_witness": FaultKind(
        "attestation", None, "", "attests, as a witness, messages that it did not receive"
    ),
    "denying_witness": FaultKind(
        "attestation", None, "", "denies, as a witness, messages that it received"
    ),
    "false_verifier": FaultKind("check", None, "", "accuses, as a verifier, an honest peer"),
}

OF_OTHERS = {"copycat", "opposite", "little_enough", "equivocation", "false_verifier"}
"""Kinds that involve another peer, so that a run needs at least two."""


class Rounds(Protocol):
    """What of `[config]` bounds the faults of a run."""

    init_min_clients: int
    total_steps: int
    verification_percent: int


def check_faults(
    schedule: "Sequence[Fault]",
    peers: "Peers",
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


def _are_one(fault: "Fault", other: "Fault") -> bool:
    """Whether two faults of a schedule are the same for some peer in some round."""
    apart = fault.rounds[0] > other.rounds[1] or other.rounds[0] > fault.rounds[1]
    return fault.kind == other.kind and bool(set(fault.peers) & set(other.peers)) and not apart


def _misfit(
    fault: "Fault",
    peers: "Peers",
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
        text = "above 0 with it, so that peers verify"
        return "kind", f"{said('config.verification_percent')} {text}"
    return None
