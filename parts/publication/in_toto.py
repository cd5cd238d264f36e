"""The result of `verify` as a statement that can be stored and compared later.

`lockstep verify --attest FILE` writes an in-toto statement whose predicate is SLSA's verification
summary (https://slsa.dev/verification_summary/v1). What that has no field for, the claims by name
and why something was refused, has names of ours, which are URIs as it asks; none of SLSA's own
levels is claimed. Nobody has signed the statement: it is as good as where it is kept.
"""

import hashlib
import json
import platform
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from lockstep.files import write_named
from parts.publication import layout
from parts.publication.claims import VerifyOutcome
from parts.publication.fetch import PublicListing
from parts.publication.layout import ReaderAsks
from pipeline import version
from pipeline.recheck import outputs
from pipeline.recheck.claim import PublicClaim

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/verification_summary/v1"
OURS = "lockstep:"
LEVELS = {
    VerifyOutcome.VERIFIED: "LOCKSTEP_VERIFIED",
    VerifyOutcome.CONSISTENT: "LOCKSTEP_CONSISTENT",
    VerifyOutcome.CONTRADICTED: "FAILED",
}
PACKAGES = ("jax", "jaxlib", "numpy")  # beside the code, what a replay depends on


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


def write(
    path: Path,
    listing: PublicListing,
    asks: ReaderAsks,
    outcome: VerifyOutcome,
    result: dict[str, Any],
) -> None:
    """Write the in-toto statement of what was decided; `result` is what `verify --json` says."""
    subject = [{"name": name, "digest": {"sha256": of}} for name, of in digests(listing).items()]
    predicate: dict[str, Any] = {
        "verifier": {
            "id": f"{OURS}verify",
            "version": {
                "lockstep": version.with_commit(),
                "python": platform.python_version(),
                **{package: version_of(package) for package in PACKAGES},
            },
        },
        "timeVerified": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "resourceUri": listing.uri,
        "policy": _policy(asks),
        "inputAttestations": _signatures(listing, result["claims"]),
        "verificationResult": "FAILED" if outcome is VerifyOutcome.CONTRADICTED else "PASSED",
        "verifiedLevels": [LEVELS[outcome]],
        f"{OURS}claims": result["claims"],
        f"{OURS}reason": result["reason"],
    }
    kind = {"_type": STATEMENT, "predicateType": PREDICATE}
    statement = kind | {"subject": subject, "predicate": predicate}
    write_named(path, json.dumps(statement, indent=2, allow_nan=False) + "\n")


def _policy(asks: ReaderAsks) -> dict[str, Any]:
    """Return the reader's options as a statement's annotations, and their SHA-256.

    It records that the reader used own files, but not where they are.
    """
    files = {name: getattr(asks, name) is not None for name in ("checkpoint", "shards", "key")}
    options = asks._asdict() | files
    content = json.dumps(options, sort_keys=True, separators=(",", ":"))
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return {"uri": f"{OURS}verify/asked", "digest": {"sha256": sha256}, "annotations": options}


def _signatures(listing: PublicListing, claims: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the author's signature for the statement, if the reader's key checked it."""
    if claims.get("signature", {}).get("is") != "proven":
        return []
    sha256 = hashlib.sha256(listing.signature or b"").hexdigest()
    return [{"name": layout.SIGNATURE, "digest": {"sha256": sha256}}]
