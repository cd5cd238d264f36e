"""An attestation: the result of `verify` as a statement, and what a reader finds in a stranger's.

`lockstep verify --attest FILE` writes an in-toto statement whose predicate is SLSA's verification
summary (https://slsa.dev/verification_summary/v1). What that has no field for, the training, the
claims by name and why something was refused, has names of ours, which are URIs as it asks; none of
SLSA's own levels is claimed. `lockstep attestation FILE` reads it: who signed it, of which weights,
and that it does not contradict itself. More it cannot show: it is its verifier's word.
Docs: docs/reference/attestation.md; attestation.schema.json is that of `Attested`.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from lockstep.errors import LockstepError, RequestError, brief, expecting
from lockstep.files import loads, read_bytes, sha256_file, write_named
from lockstep.protocol.attestation import Hash
from lockstep.tables.table import AsTuple, Count, Fraction, Table
from lockstep.tables.validation import validate
from parts.publication import layout, signature
from parts.publication.claims import Verified, VerifyOutcome
from parts.publication.fetch import PublicListing
from parts.publication.layout import ReaderAsks
from pipeline import version
from pipeline.recheck import outputs
from pipeline.recheck.claim import Kind, PublicClaim

PREDICATE = "https://slsa.dev/verification_summary/v1"
OURS = "lockstep:"
LEVELS = {
    VerifyOutcome.VERIFIED: "LOCKSTEP_VERIFIED",
    VerifyOutcome.CONSISTENT: "LOCKSTEP_CONSISTENT",
    VerifyOutcome.CONTRADICTED: "FAILED",
}
PACKAGES = ("jax", "jaxlib", "numpy")  # beside the code, what a replay depends on
MOST_BYTES = 2**21  # of a file that is read
NONE_OF_OURS = (OSError, AttributeError, KeyError, RecursionError, TypeError, ValueError)
BY_ITSELF = ("verifier", "timeVerified", "resourceUri", "inputAttestations")  # follows from nothing
# Claims of one kind only, those of either kind, and those that are always there.
ONLY: dict[Kind, set[str]] = {
    "proven": {"digests", "files", "weights", "held_out", "findings"},
    "sampled": {"windows"},
    "stated": {
        *("commit", "not_comparable", "left_out", "other_windows", "workload", "code", "beacon"),
        *("held_out_split", "accusations", "verdict", "losses", "keys"),
    },
}
EITHER = {"signature", "start", "card", "data", "tasks", *outputs.COMPANIONS}
ALWAYS = {"digests", "files", "weights", "signature", "start", "card", "data"}
ALWAYS |= {"left_out", "verdict", "losses", "keys"}


# ---- What is ours in it ----


class TrainedRun(Table):
    """An attestation's training; proof/run.json, a subject, has all of its settings."""

    format: Literal[1]
    method: str
    settings: dict[str, Any]
    schedule: str | dict[str, Any]
    peers: Count
    data: dict[Literal["name", "pin", "listing", "shards"], str] = Field(min_length=4)
    """Name, pin in the run file, SHA-256 of what stage download read, and of shards.json."""
    start: dict[Literal["kind", "seed", "sha256", "params"], str | int | None] = Field(min_length=4)
    """Kind in the run file, seed of fresh weights, SHA-256 of a checkpoint, hash of the params."""
    rounds: Count
    tokens: Count
    """Tokens of all messages that were applied; of rows that are no tokens, words of 4 bytes."""
    bytes: Count
    """Bytes of all messages that were sent."""
    machines: Annotated[tuple[dict[str, str], ...], AsTuple]
    """What trained, as its author states."""
    share: Fraction
    """Of all windows, the share that was repeated bit for bit."""
    odds: Fraction | None
    """Probability that a window with a lie was repeated; of n such windows, that one of them was is
    1 - (1 - odds)^n at least. Null where the author could choose, or not all were comparable."""
    digests: dict[Literal["transcript", "code"], Hash] = Field(min_length=2)
    """SHA-256 of all rounds and, as stated, of stage train's code."""


class AttestedClaim(Table, extra="allow"):
    """A claim of an attestation, as `verify --json` has it, with its values."""

    kind: Kind = Field(alias="is")
    text: str


class Attested(Table):
    """The fields of an attestation's predicate whose names are ours."""

    reason: str | None = Field(alias=f"{OURS}reason")
    claims: dict[str, AttestedClaim] = Field(alias=f"{OURS}claims")
    training: TrainedRun | None = Field(alias=f"{OURS}training")
    """Null where something contradicts the publication."""


# ---- Write one ----


def digests(listing: PublicListing) -> dict[str, str]:
    """Return a statement's subjects: SHA-256 of all weights, run file, and list of every file."""
    weights = [name for name in listing.publication.exported if name.endswith(".safetensors")]
    return {n: listing.digests[n] for n in (*sorted(weights), outputs.RUN, layout.MANIFEST)}


def claims(listing: PublicListing) -> list[PublicClaim]:
    """Return what a statement says was verified: a hub's branch may be another tomorrow."""
    hashes = digests(listing)
    text = "SHA-256 " + ", ".join(f"{sha256} of {name}" for name, sha256 in hashes.items())
    result = [PublicClaim("digests", "proven", text, {"uri": listing.uri, "sha256": hashes})]
    if listing.commit is not None:
        text = f"that the hub has these files in commit {listing.commit}"
        result.append(PublicClaim("commit", "stated", text, {"commit": listing.commit}))
    return result


def write(  # noqa: PLR0913
    path: Path,
    listings: Sequence[PublicListing],
    asks: ReaderAsks,
    outcome: VerifyOutcome,
    result: dict[str, Any],
    key: Path | None,
) -> None:
    """Write the in-toto statement of `result`, as `verify --json` has it; a `key` signs it.

    Nothing is written without a listing of what was verified, or if nothing was decided.
    """
    if outcome not in LEVELS or not listings:
        print(f"verify: {path}: not written, since nothing was decided", file=sys.stderr)
        return
    [listing] = listings
    versions = {"lockstep": version.with_commit(), "python": platform.python_version()}
    versions |= {package: version_of(package) for package in PACKAGES}
    sha256 = hashlib.sha256(listing.signature or b"").hexdigest()
    author = {"name": layout.SIGNATURE, "digest": {"sha256": sha256}}
    proven = result["claims"].get("signature", {}).get("is") == "proven"
    said = {
        "verifier": {"id": f"{OURS}verify", "version": versions},
        "timeVerified": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "resourceUri": listing.uri,
        "inputAttestations": [author] if proven else [],
    }
    said |= {f"{OURS}{name}": result[name] for name in ("claims", "reason", "training")}
    # of the reader's own files: that there were any, but not where they are
    files = {name: getattr(asks, name) is not None for name in ("checkpoint", "shards", "key")}
    statement = _statement(digests(listing), asks._asdict() | files, LEVELS[outcome], said)
    text = json.dumps(statement, indent=2, allow_nan=False) + "\n"
    write_named(path, text if key is None else signature.seal(text.encode(), key).decode())


def _statement(
    subject: dict[str, str], asked: dict[str, Any], level: str, said: dict[str, Any]
) -> dict[str, Any]:
    """Return an in-toto statement; a reader makes a stranger's again with it, to compare."""
    content = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    policy = {"uri": f"{OURS}verify/asked", "digest": {"sha256": sha256}, "annotations": asked}
    result = "FAILED" if level == "FAILED" else "PASSED"
    predicate = {"policy": policy, "verificationResult": result, "verifiedLevels": [level]} | said
    return {
        "_type": signature.STATEMENT,
        "predicateType": PREDICATE,
        "subject": [{"name": name, "digest": {"sha256": of}} for name, of in subject.items()],
        "predicate": predicate,
    }


# ---- Read one ----


def read(path: Path, keys: Sequence[Path], weights: Sequence[Path]) -> Verified:
    """Return what an attestation says, which nothing contradicts, and why it shows nothing, if so.

    One of the public `keys` has to have signed it, as a sigstore bundle; without any, nobody is
    known to have. The files of `weights` have to be those that it is about.
    """
    if bad := next((file for file in (path, *weights) if not file.is_file()), None):
        found = "not a regular file" if bad.exists() else "no such file"
        raise RequestError(f"{bad}: {found}, expected one")
    with expecting(path, "an attestation of `lockstep verify --attest`", *NONE_OF_OURS):
        document = loads(content := read_bytes(path, MOST_BYTES))
        why_not, signer = ["it is not signed: anybody can have written it"], None
        if "dsseEnvelope" in document:
            payload, signer = signature.unseal(content, keys, str(path))
            document = loads(payload)
            why_not = [] if keys else [f"no --key shows that sha256:{signer} signed it"]
        elif keys:
            raise LockstepError(f"{path}: is not signed, expected a signature by a --key")
        said = document["predicate"]
        ours = {key: value for key, value in said.items() if key.startswith(OURS)}
        attested = validate(Attested, ours, str(path))
        subject = {file["name"]: file["digest"]["sha256"] for file in document["subject"]}
        asked, [level] = said["policy"]["annotations"], said["verifiedLevels"]
        again = _statement(subject, asked, level, {key: said[key] for key in BY_ITSELF} | ours)
        whole = [("statement", document, again)]
        for name, found, due in chain(whole, _due(subject, asked, level, said, attested)):
            if found != due:
                found, due = brief(str(found)), brief(str(due))
                raise LockstepError(f"{path}: {name} is {found}, expected {due} as the rest says")
        by = f"lockstep {said['verifier']['version']['lockstep']} at {said['timeVerified']}"
    if attested.training is None:
        raise LockstepError(f"{path}: {by} found a contradiction: {attested.reason}")
    due = {sha256 for name, sha256 in subject.items() if name.endswith(".safetensors")}
    found = {sha256_file(file): file for file in weights}
    for sha256 in found.keys() - due:
        raise LockstepError(f"{found[sha256]}: SHA-256 {sha256[:12]}, expected weights of {path}")
    if len(found) < len(due):
        why_not.append(f"{len(found)} of its {len(due)} files of weights were given (--weights)")
    return Verified(
        "not_comparable" not in attested.claims,
        [PublicClaim(name, c.kind, c.text, c.model_extra) for name, c in attested.claims.items()],
        why_not + [attested.reason] * (attested.reason is not None),
        f"{by}, signed by the holder of the key sha256:{signer}",
        attested.training.model_dump(),
    )


def _due(
    subject: dict[str, str], asked: dict[str, Any], level: str, said: dict[str, Any], ours: Attested
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is in a statement, by its name, and what is due by the rest of it."""
    claims, training = ours.claims, ours.training
    kinds = {name: claim.kind for name, claim in claims.items()}
    yield "level", level in LEVELS.values(), True
    yield "verifier", said["verifier"]["id"], f"{OURS}verify"
    yield "subject", {outputs.RUN, layout.MANIFEST} < subject.keys(), True
    yield f"{level} without a reason", ours.reason is None, level == "LOCKSTEP_VERIFIED"
    yield f"{level} without a training", training is None, level == "FAILED"
    if training is None:
        yield "claims", claims, {}
        return
    for name in ALWAYS:
        yield f"whether there is a claim {name}", name in claims, True
    for name, kind in kinds.items():
        only = [kind for kind, ones in ONLY.items() if name in ones]
        yield f"the claim {name}", kind, (only or [kind])[0] if only or name in EITHER else "none"

    values = {name: claim.model_extra or {} for name, claim in claims.items()}
    yield "the claim digests", values["digests"].get("sha256"), subject
    for name, option in (("signature", "key"), ("data", "shards"), ("tasks", "tasks")):
        proven = kinds.get(name, "proven" if asked[option] else "stated") == "proven"
        nothing = asked[option] and values.get(name, {}).get("names") == []  # no task was scored
        yield f"the claim {name}", proven or nothing, asked[option]
    yield "inputAttestations", len(said["inputAttestations"]), int(asked["key"])
    if "windows" in claims:
        drawn_by = values["windows"].get("drawn_by")
        yield "drawn_by", drawn_by in ("reader", "asked"), asked["seed"] is not None
    yield "share and odds", (training.share, training.odds), sampled(values)
    yield f"{level} without odds", training.odds is None and level == "LOCKSTEP_VERIFIED", False


def sampled(claims: dict[str, dict[str, Any]]) -> tuple[float, float | None]:
    """Return `share` and `odds` of an attestation, which follow from the claims on windows."""
    if (windows := claims.get("windows")) is None:
        return 0.0, None
    total, drawn = windows["total"], windows["drawn"]
    chosen = total - (claims["other_windows"]["count"] if "other_windows" in claims else 0)
    fixed = chosen - drawn  # where messages are not kept, the last window, of all peers as each is
    left = claims["not_comparable"]["windows"] if "not_comparable" in claims else []
    repeated, others = (
        {tuple(window[: 3 - fixed]) for window in ones} for ones in (windows["repeated"], left)
    )
    if not 0 <= drawn <= chosen <= total or fixed > 1 or not len(repeated | others) == chosen > 0:
        raise ValueError("its windows do not add up")
    by_reader = windows["drawn_by"] == "reader" and windows["published"] == total and drawn
    odds = round(drawn / (total - fixed), 6) if by_reader and not left else None
    share = len(repeated - others) / total
    return round(share, 6), 1.0 if share == 1 else odds


def check_asked(read: Verified, share: float, proven: Sequence[str], due: dict[str, str]) -> None:
    """Check an attestation for what a reader asks; `due` may have `--method` and `--data`."""
    training = read.training
    if (found := training["share"]) < share:
        raise LockstepError(f"the share repeated is {found:.3g}, expected at least {share}")
    said = {"--method": training["method"], "--data": training["data"]["listing"]}
    said |= {claim.name: claim.kind for claim in read.claims}
    for name, wanted in (due | dict.fromkeys(proven, "proven")).items():
        if said.get(name) != wanted:
            raise LockstepError(f"{name} is {brief(str(said.get(name)))}, expected {wanted}")
