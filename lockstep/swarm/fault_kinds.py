"""The kinds of faults that a run file can schedule: what each replaces, and what it needs.

A row has all that validation needs. What is sent in place of the truth is in `swarm/lies.py`, and
when, in `swarm/faults.py`.
"""

from typing import Literal, NamedTuple


class FaultKind(NamedTuple):
    """One kind of fault.

    Attributes:
      wraps: What it replaces: a message, its bytes, a peer's work or program, the clock, a
        witness's attestation, or a verifier's check.
      size: Default of a fault's `size`, or None for a kind without a size.
      needs: The messages that it needs: with "values" or "signs", with "positions" that each peer
        chooses, with "plain" indices on the wire, or with "kept" payloads; "" is any.
      does: What the peer does, and what size means; completes "the peer ...".
    """

    wraps: Literal["message", "bytes", "work", "program", "clock", "attestation", "check"]
    size: float | None
    needs: Literal["", "values", "signs", "positions", "plain", "kept"]
    does: str


KINDS: dict[str, FaultKind] = {
    # ---- another message than its own, of the right form ----
    "free_rider": FaultKind("message", None, "", "sends zeros, at the first indices"),
    "copycat": FaultKind("message", None, "", "sends the next peer's message as its own"),
    "stale": FaultKind(
        "message", 4.0, "", "sends its own message of size rounds before, or of its first round"
    ),
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
    "lone_index": FaultKind(
        "message",
        None,
        "positions",
        "sends elements that no other peer sends, the same ones in each round where it can, each "
        "pushed in one direction",
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

OF_OTHERS = {
    "copycat",
    "opposite",
    "little_enough",
    "lone_index",
    "equivocation",
    "false_verifier",
}
"""Kinds that involve another peer, so that a run needs at least two."""
