"""What `verify --attest` writes: what was looked at, by whom, against what, and what was found."""

import json
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

import pytest

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file
from parts.publication import fetch, in_toto, layout, publish, signature
from pipeline import version
from pipeline.recheck import outputs
from pipeline.stage.untrusted_files import walk
from tests.parts.publication.published_run import LIMITS, flip, print_of
from tests.parts.publication.test_signature import write_keys
from tests.servers.files import Files
from tests.servers.hub import REPO, running_hub

pytestmark = pytest.mark.long

NAMED = ("model.safetensors", outputs.RUN, layout.MANIFEST)


def digests(folder):
    return {name: sha256_file(folder / name) for name in NAMED}


def signed_by(folder, key):
    """Signs a publication."""
    listed = read_json(folder / layout.MANIFEST)["files"]
    files = {name: file["sha256"] for name, file in listed.items()}
    files[layout.MANIFEST] = sha256_file(folder / layout.MANIFEST)
    (folder / layout.SIGNATURE).write_bytes(signature.sign(files, folder.name, key))


def test_the_statement_and_the_object_name_what_was_verified_by_its_digests(
    folder, tmp_path, capsys
):
    private, public = write_keys(tmp_path)
    signed_by(folder, private)
    kept, before = tmp_path / "kept.json", datetime.now(UTC).replace(microsecond=0)
    asked = ["--key", str(public), "--attest", str(kept), "--json"]
    status, said = print_of(capsys, "verify", str(folder), "--root", str(tmp_path / "r"), *asked)
    claims, written = json.loads(said)["claims"], read_json(kept)
    assert claims["digests"]["is"] == "proven" and claims["digests"]["sha256"] == digests(folder)
    key = sha256(public.read_bytes()).hexdigest()
    assert (claims["signature"]["is"], claims["signature"]["key"]) == ("proven", key)

    assert written["_type"] == "https://in-toto.io/Statement/v1"
    assert written["predicateType"] == "https://slsa.dev/verification_summary/v1"
    assert written["subject"] == [
        {"name": name, "digest": {"sha256": of}} for name, of in digests(folder).items()
    ]
    in_toto.read(kept, (), ())  # which makes again what follows from the rest
    predicate = written["predicate"]
    assert predicate["verifier"]["version"]["lockstep"] == version.with_commit()
    assert before <= datetime.fromisoformat(predicate["timeVerified"]) <= datetime.now(UTC)
    assert predicate["resourceUri"] == folder.as_uri()
    asked = predicate["policy"]["annotations"]
    assert (asked["seed"], asked["windows"], asked["key"], asked["tasks"]) == (
        *(None, None, True, False),
    )
    signed = {"name": "model.sig", "digest": {"sha256": sha256_file(folder / layout.SIGNATURE)}}
    assert predicate["inputAttestations"] == [signed]
    levels = {0: ["LOCKSTEP_VERIFIED"], 3: ["LOCKSTEP_CONSISTENT"]}
    assert predicate["verificationResult"] == "PASSED"
    assert predicate["verifiedLevels"] == levels[status]
    for name in ("claims", "reason", "training"):
        assert predicate[f"lockstep:{name}"] == json.loads(said)[name]


def test_a_contradiction_is_a_statement_too_and_a_network_that_is_not_there_is_none(
    folder, tmp_path, capsys
):
    kept = tmp_path / "kept.json"
    with Files().serving() as server:
        server.add(folder)
        address = server.address
    rest = ["--root", str(tmp_path / "r"), "--attest", str(kept), "--attempts", "1"]
    status, said = print_of(capsys, "verify", address, *rest)
    assert status != 0 and said.startswith("not ") and not kept.exists()
    expected = digests(folder)
    flip("README.md")(folder)
    status, said = print_of(capsys, "verify", str(folder), *rest)
    predicate = read_json(kept)["predicate"]
    assert (predicate["verificationResult"], predicate["verifiedLevels"]) == ("FAILED", ["FAILED"])
    assert predicate["lockstep:reason"] in said and predicate["lockstep:claims"] == {}
    assert [one["digest"]["sha256"] for one in read_json(kept)["subject"]] == [*expected.values()]
    status, said = print_of(capsys, "attestation", str(kept))
    assert status == 1 and predicate["lockstep:reason"] in said


def test_a_signature_is_fetched_wherever_the_publication_lies(
    folder, tmp_path, capsys, monkeypatch
):
    private, public = write_keys(tmp_path)
    _, strange = write_keys(tmp_path, name="strange")
    signed_by(folder, private)
    with running_hub(monkeypatch, tmp_path / "home") as hub:
        files = {name: (folder / name).read_bytes() for name, _ in walk(folder)}
        commit = hub.commit(files | {".gitattributes": b""})
        found = fetch.find(REPO, tmp_path / "store", LIMITS)
        elsewhere = f"?repository_url={quote(hub.address, safe='')}"
        assert found.uri == f"pkg:huggingface/{REPO}@{commit}{elsewhere}"
        stated, values = in_toto.claims(found)[1][1], in_toto.claims(found)[0].values
        assert (stated, values["sha256"]) == ("stated", digests(folder))
        claim = signature.check(found.signature, found.digests, public)
        assert claim.kind == "proven"
    with Files().serving() as server:
        server.add(folder)
        asked = [server.address, "--root", str(tmp_path / "r"), "--key", str(strange)]
        status, said = print_of(capsys, "verify", *asked)
        assert status == 1 and "model.sig: signed by the key" in said
        assert {path for _, path, _ in server.seen} == {f"/{layout.MANIFEST}", "/model.sig"}


def test_publish_signs_what_it_writes_and_writes_nothing_with_a_key_that_cannot_sign(
    published, tmp_path
):
    (private, public), out = write_keys(tmp_path), tmp_path / "out"
    with pytest.raises(LockstepError, match="not a private key"):
        publish.write(out, published.run_file, published.root, 1, None, public)
    assert not out.exists()
    publish.write(out, published.run_file, published.root, 1, None, private)
    found = fetch.find(str(out), tmp_path, LIMITS)
    assert signature.check(found.signature, found.digests, public).kind == "proven"


def test_a_folder_that_is_not_there_is_said_before_anything_is_verified(folder, tmp_path, capsys):
    asked = ["--root", str(tmp_path / "r"), "--attest", str(tmp_path / "no" / "kept.json")]
    assert print_of(capsys, "verify", str(folder), *asked) == (2, "")
