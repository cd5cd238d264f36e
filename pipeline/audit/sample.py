"""Which windows an audit replays, and the seed that draws them.

`[witness] beacon` is a value that nobody chose. A round R of the drand network quicknet is checked
offline, by the network's BLS signature over the curve BLS12-381, whose secret no single party has:

    e(signature, g2) = e(H(SHA-256(R)), public key),   value = SHA-256(signature)

R is a big-endian u64, H hashes to the curve's group G1 (RFC 9380). A value given by hand, such as
the figures of a lottery or the hash of a block, is as good as whoever gave it.

Either may be known before a transcript is written. So samples are drawn from it and the hash of the
transcript together, and a draw is worth as much as the word that it was named before the run, and
the transcript public before it.

Source: https://drand.love/docs/cryptography; py_ecc computes the pairings.
"""

import random
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal, NamedTuple

from lockstep.errors import LockstepError, brief
from lockstep.transcript.transcript import Transcript
from lockstep.transcript.windows import Window
from pipeline import extras, runfile
from pipeline.runfile.tables import DRAND

# Public key of quicknet, chain 52db9ba70e0cc0f6eaf7803dd07447a1f5477735fd3f661792ba94600c84e971.
PUBLIC_KEY = (
    "83cf0f2896adee7eb8b5f01fcad3912212c437e0073e911fb90022d3e760183c"
    "8c4b450b6a0a6c3ac6a5776a2d1064510d1fec758c921cc22b0e17e63aaf4bcb"
    "5ed66304de9cf809bd274ca73bab4af5a6e9c76a4bc09e76eae8991ef5ece45a"
)
GENESIS, PERIOD = 1692803367, 3  # its first round, Unix seconds, and seconds between rounds
DOMAIN = b"BLS_SIG_BLS12381G1_XMD:SHA-256_SSWU_RO_NUL_"


def seed_of(run: runfile.Run, transcript: Transcript) -> str:
    """Return the auditor's own seed, or the hash of the rounds, with the beacon if there is one.

    The default needs no secret, and cannot stop the author of a whole transcript from trying until
    the sample suits: an auditor who does not trust that author supplies a seed, or a beacon that
    was not known when the transcript was published.
    """
    if run.witness.seed is not None:
        return run.witness.seed
    beacon = read_beacon(run.witness.beacon)
    return transcript.hash if beacon is None else f"{beacon.value} {transcript.hash}"


def whose_seed(run: runfile.Run) -> Literal["auditor", "beacon", "transcript"]:
    """Return who chose the seed of the audit's sample."""
    if run.witness.seed is not None:
        return "auditor"
    return "beacon" if run.witness.beacon else "transcript"


def groups(
    run: runfile.Run, transcript: Transcript, windows: Iterable[Window], kept: bool
) -> list[list[tuple[Window, int]]]:
    """Return the windows that a sample can draw, with their peers: in others nobody sent a message.

    If messages are not `kept`, a window is replayed for all its peers or none.
    """
    found = []
    for window in windows:
        if kept:
            found += [[(window, peer)] for peer in sorted(transcript.senders(window))]
        elif transcript.senders(window):
            found.append([(window, peer) for peer in range(run.peers.count)])
    return found


def draw(
    run: runfile.Run, transcript: Transcript, windows: list[Window], seed: str, kept: bool
) -> list[tuple[Window, int]]:
    """Draw the windows to replay, and their peers: `by_chance`, and as `[witness] replay` says."""
    named = {(windows[index], p) for index, p in run.witness.chosen if index < len(windows)}
    possible = groups(run, transcript, windows, kept)
    chosen = {pair for group in possible if named.intersection(group) for pair in group}
    return sorted(chosen.union(by_chance(run, transcript, windows, seed, kept)))


def by_chance(
    run: runfile.Run, transcript: Transcript, windows: list[Window], seed: str, kept: bool
) -> list[tuple[Window, int]]:
    """Draw `[witness] replay_percent` of all `groups`, rounded up, without replacement."""
    possible = groups(run, transcript, windows, kept)
    count = -int(-len(possible) * run.witness.replay_percent // 100)
    return [pair for group in random.Random(seed).sample(possible, count) for pair in group]


# ---- The beacon ----


class Beacon(NamedTuple):
    """A beacon: the value that samples are drawn with, and where it is from."""

    value: str
    text: str


def read_beacon(setting: str) -> Beacon | None:
    """Return what `[witness] beacon` says, checked; None where it is empty.

    Raises:
      LockstepError: A drand round has another signature, or py_ecc, which checks it, is missing.
    """
    if not setting:
        return None
    match = re.fullmatch(DRAND, setting)
    if match is None:
        return Beacon(setting, f"{brief(repr(setting))}, given by hand")
    number, signature = int(match["round"]), bytes.fromhex(match["signature"])
    if not _is_signed(number, signature):
        raise LockstepError(
            f"[witness] beacon: round {number} of drand's quicknet has another signature than "
            f"{match['signature'][:12]}"
        )
    at = datetime.fromtimestamp(GENESIS + PERIOD * (number - 1), UTC)
    text = f"round {number} of drand's quicknet, of {at:%Y-%m-%d %H:%M:%S} UTC"
    return Beacon(sha256(signature).hexdigest(), text)


@contextmanager
def _recursion_limit_kept() -> Iterator[None]:
    """Keep the limit that guards the parsers of strangers' files, which py_ecc raises."""
    limit = sys.getrecursionlimit()
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@_recursion_limit_kept()
def _is_signed(number: int, signature: bytes) -> bool:
    try:
        from py_ecc import optimized_bls12_381 as curve
        from py_ecc.bls.hash_to_curve import hash_to_G1
        from py_ecc.bls.point_compression import decompress_G1, decompress_G2
    except ImportError as error:
        raise extras.lacking("[witness] beacon: a drand round", "py_ecc") from error
    key = bytes.fromhex(PUBLIC_KEY)
    halves = (int.from_bytes(key[:48], "big"), int.from_bytes(key[48:], "big"))
    try:
        point = decompress_G1(int.from_bytes(signature, "big"))
    except ValueError:
        return False
    # a signature is a point of the subgroup of this order, and not its zero
    if curve.is_inf(point) or not curve.is_inf(curve.multiply(point, curve.curve_order)):
        return False
    hashed = hash_to_G1(sha256(number.to_bytes(8, "big")).digest(), DOMAIN, sha256)
    product = curve.pairing(curve.G2, point, final_exponentiate=False) * curve.pairing(
        curve.neg(decompress_G2(halves)), hashed, final_exponentiate=False
    )
    return bool(curve.final_exponentiate(product) == curve.FQ12.one())
