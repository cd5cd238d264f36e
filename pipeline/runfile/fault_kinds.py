"""The kinds of faults that a run file can ask for: what each replaces, and what it needs.

A row says all that validation has to know; what is sent in place of the truth is in
`swarm/lies.py`, and when, in `swarm/faults.py`. Imports nothing, so that `config` can read it.
"""

from typing import Literal, NamedTuple


class Kind(NamedTuple):
    """One kind of fault.

    wraps: what it takes the place of: a message, its bytes, a peer's work or program, the clock, a
      witness's attestation, a verifier's check.
    size: the default of a fault's `size`; None: the kind has no size.
    needs: the messages without which it cannot be done: of "values" or of "signs", with "plain"
      places on the wire, or with payloads that are "kept"; "" is any.
    says: what the peer does, and what size means; completes "the peer ...".
    """

    wraps: Literal["message", "bytes", "work", "program", "clock", "attestation", "check"]
    size: float | None
    needs: Literal["", "values", "signs", "plain", "kept"]
    says: str


KINDS: dict[str, Kind] = {
    # ---- another message than its own, in form ----
    "free_rider": Kind("message", None, "", "sends zeros, at the first places"),
    "copycat": Kind("message", None, "", "sends the next peer's message as its own"),
    "stale": Kind("message", None, "", "sends its own message of an older round"),
    "sign_flip": Kind("message", None, "", "sends the negative of its message"),
    "scale_up": Kind("message", 10.0, "values", "sends its values times size"),
    "scale_down": Kind("message", 0.1, "values", "sends its values times size"),
    "noise": Kind(
        "message",
        1.0,
        "",
        "adds normal noise of size times the values' RMS, or turns each sign with probability "
        "min(1, size) / 2",
    ),
    "opposite": Kind("message", None, "", "sends the negative of the mean of the others' messages"),
    "little_enough": Kind(
        "message", 1.0, "", "sends the mean of the others' messages less size standard deviations"
    ),
    "drift": Kind(
        "message",
        0.01,
        "",
        "pushes its values by size times their RMS, in the same direction every round, or turns "
        "one sign of the whole message",
    ),
    "collude": Kind(
        "message", None, "", "sends, as its group, the negative of the first's message"
    ),
    "forged": Kind("message", None, "", "sends random places, and signs or values of the true RMS"),
    # ---- bytes that are no message, or not the one committed to ----
    "malformed": Kind("bytes", None, "", "sends the first half of its bytes"),
    "not_finite": Kind("bytes", None, "values", "sends NaN and infinity among its values"),
    "duplicated": Kind("bytes", None, "plain", "names a place twice in a block"),
    "wrong_hash": Kind("bytes", None, "", "commits to its message, and sends another"),
    "equivocation": Kind(
        "bytes", None, "", "sends half of the peers another message, with a commitment of its own"
    ),
    # ---- other work than was assigned ----
    "lazy": Kind("work", 0.5, "", "trains on the share size of its sequences, at least on one"),
    "wrong_data": Kind("work", None, "", "trains on other sequences than its own"),
    "wrong_precision": Kind(
        "program", None, "", "computes in bfloat16 for float32, or the reverse"
    ),
    # ---- the clock ----
    "dropped": Kind("clock", None, "", "trains, but its message never arrives"),
    "late": Kind("clock", 3600.0, "", "sends its message size seconds late"),
    "crash": Kind("clock", None, "", "is away, has lost its state, and then asks to join again"),
    "join": Kind("clock", None, "", "is away from the run's start on, and then asks to join"),
    # ---- what it says of others ----
    "false_witness": Kind("attestation", None, "", "attests, as a witness, what it did not get"),
    "denying_witness": Kind("attestation", None, "", "denies, as a witness, what it got"),
    "false_verifier": Kind("check", None, "", "accuses, as a verifier, an honest peer"),
}

OF_OTHERS = {"copycat", "opposite", "little_enough", "equivocation", "false_verifier"}
"""Kinds that are about another peer: there has to be one."""
