"""What `verify --attest` writes, and what a reader finds in that and in what forgers write."""

import json
import shutil
from base64 import b64decode, b64encode
from datetime import UTC, datetime
from hashlib import sha256

import jsonschema
import pytest

from lockstep.files import read_json, sha256_file
from lockstep.transcript.transcript import Transcript
from parts.publication import in_toto, layout, signature
from pipeline import version
from pipeline.recheck import outputs
from pipeline.stage.keys import PROJECT
from tests.parts.publication.published_run import WORD, flip, print_of
from tests.parts.publication.test_signature import sign, write_keys
from tests.servers.files import Files

pytestmark = pytest.mark.long

SCHEMA = PROJECT / "parts/publication/attestation.schema.json"
DIGEST = "0" * 64
PROVEN = {"digests", "signature", "files", "start", "weights", "held_out", "card"}
PROVEN |= {"generation_config.json"}
STATED = {"left_out", "other_windows", "verdict", "losses", "keys", "held_out_split", "data"}
STATED |= {"tasks"}  # none was scored


def digests(folder):
    names = ("model.safetensors", outputs.RUN, layout.MANIFEST)
    return {name: sha256_file(folder / name) for name in names}


class Attested:
    """A signed publication of all windows that a reader verified and attested."""

    def __init__(self, published, folder):
        self.folder = shutil.copytree(published.whole, folder / "published")
        author, self.author = write_keys(folder, name="author")
        sign(self.folder, author)
        self.weights = self.folder / "model.safetensors"
        self.private, self.key = write_keys(folder)
        self.signed, self.bare = folder / "signed.json", folder / "bare.json"
        asked = ["--root", folder / "r", "--seed", WORD, "--key", self.author, "--json", "--tasks"]
        attest = ["--attest", self.signed, "--sign", self.private]
        self.before = datetime.now(UTC).replace(microsecond=0)
        self.status, said = print_of("verify", self.folder, *asked, *attest)
        self.said = json.loads(said)
        self.bare.write_bytes(b64decode(read_json(self.signed)["dsseEnvelope"]["payload"]))

    def read(self, file, *asked):
        known = ["--key", self.key, "--weights", self.weights]
        return print_of("attestation", file, *(asked or known))


@pytest.fixture(scope="module")
def attested(published, tmp_path_factory) -> Attested:
    return Attested(published, tmp_path_factory.mktemp("a"))


def test_what_verify_says_is_in_the_attestation_and_is_read_back(attested, published):
    found, predicate = attested.said, read_json(attested.bare)["predicate"]
    assert {name: claim["is"] for name, claim in found["claims"].items()} == {
        **dict.fromkeys(PROVEN, "proven"),
        **dict.fromkeys(STATED, "stated"),
        "windows": "sampled",
    }
    for name in ("claims", "reason", "training"):
        assert predicate[f"lockstep:{name}"] == found[name]
    training = found["training"]
    transcript = Transcript(published.root / "data/trained/transcript")
    run = read_json(published.whole / outputs.RUN)
    assert {training["method"]: training["settings"]} == run["model"]["LLM"]["optimizer"]
    assert (training["rounds"], training["peers"], training["tokens"]) == (6, 2, 6 * 4 * 16)
    messages = [m for entry in transcript.rounds for m in entry.evidence.messages.values()]
    assert training["bytes"] == sum(message.bytes for message in messages)
    assert training["start"]["params"] == transcript.hashes(0).params
    assert training["digests"]["transcript"] == transcript.hash
    assert training["machines"] == [transcript.header.environment]
    assert training["data"]["shards"] == sha256_file(published.whole / outputs.SHARDS)
    assert (training["share"], training["odds"]) == (0.25, 0.25)  # a reader drew 1 of 4 windows
    status, text = attested.read(attested.signed)
    assert (status, text.split(":")[0]) == (0, "verified")
    assert all(claim["text"] in text for claim in found["claims"].values())


def test_the_statement_and_the_object_name_what_was_verified_by_its_digests(attested):
    found, written = attested.said, read_json(attested.bare)
    assert (attested.status, found["verified"], found["bitwise"]) == (0, True, True)
    assert (found["outcome"], found["reason"]) == ("verified", None)
    assert found["claims"]["digests"]["sha256"] == digests(attested.folder)
    key = sha256(attested.author.read_bytes()).hexdigest()
    assert found["claims"]["signature"]["key"] == key
    assert written["_type"] == "https://in-toto.io/Statement/v1"
    assert written["predicateType"] == "https://slsa.dev/verification_summary/v1"
    assert written["subject"] == [
        {"name": name, "digest": {"sha256": of}} for name, of in digests(attested.folder).items()
    ]
    predicate = written["predicate"]
    assert predicate["verifier"]["version"]["lockstep"] == version.with_commit()
    at = datetime.fromisoformat(predicate["timeVerified"])
    assert attested.before <= at <= datetime.now(UTC)
    assert predicate["resourceUri"] == attested.folder.as_uri()
    asked = predicate["policy"]["annotations"]
    assert (asked["seed"], asked["windows"], asked["key"], asked["tasks"]) == (
        *(WORD, None, True, True),
    )
    signed = sha256_file(attested.folder / layout.SIGNATURE)
    assert predicate["inputAttestations"] == [{"name": "model.sig", "digest": {"sha256": signed}}]
    assert predicate["verificationResult"] == "PASSED"
    assert predicate["verifiedLevels"] == ["LOCKSTEP_VERIFIED"]


def test_a_contradiction_is_a_statement_too_and_a_network_that_is_not_there_is_none(
    folder, tmp_path
):
    kept = tmp_path / "kept.json"
    with Files().serving() as server:
        server.add(folder)
        address = server.address
    rest = ["--root", tmp_path / "r", "--attest", kept]
    status, said = print_of("verify", address, *rest, "--attempts", 1)
    assert status != 0 and said.startswith("not ") and not kept.exists()
    expected = digests(folder)
    flip("README.md")(folder)
    _, said = print_of("verify", folder, *rest)
    predicate = read_json(kept)["predicate"]
    assert (predicate["verificationResult"], predicate["verifiedLevels"]) == ("FAILED", ["FAILED"])
    assert predicate["lockstep:reason"] in said and predicate["lockstep:claims"] == {}
    assert [one["digest"]["sha256"] for one in read_json(kept)["subject"]] == [*expected.values()]
    status, said = print_of("attestation", kept)
    assert status == 1 and predicate["lockstep:reason"] in said


def test_a_reader_has_a_key_and_the_weights_and_says_what_has_to_be_there(attested):
    key, weights = ["--key", attested.key], ["--weights", attested.weights]
    for status, file, asked, why in (
        (3, attested.bare, weights, "not signed"),
        (3, attested.signed, weights, "no --key"),
        (3, attested.signed, key, "0 of its 1 files of weights"),
        (1, attested.bare, key, "is not signed"),
        (0, attested.signed, [*key, *weights, "--proven", "start", "--method", "Distro"], ""),
        (1, attested.signed, ["--share", 0.3], "share"),
        (1, attested.signed, ["--proven", "losses"], "losses is stated, expected proven"),
        (1, attested.signed, ["--data", DIGEST], "--data"),
        (1, attested.signed, ["--data", ""], "--data"),  # of a variable that is not set
        (2, attested.signed, ["--weights", "none.safetensors"], "no such file"),
        (2, attested.signed, ["--weights", "/dev/null"], "not a regular file"),
    ):
        found, text = attested.read(file, *asked)
        assert (found, why in text.splitlines()[0]) == (status, True)


@pytest.mark.parametrize("fixed", [0, 1])  # 1: a window of all peers is repeated whoever draws
def test_share_and_odds_follow_from_the_claims_on_windows(fixed):
    windows = [(1, 3, 0), (4, 6, 1), *((1, 3, 1), (4, 6, 0)) * fixed]
    said = {"repeated": windows, "published": 5, "total": 5, "drawn": 2 - fixed}
    others, left = {"other_windows": {"count": 3}}, {"not_comparable": {"windows": windows[:1]}}
    reader, author = ({"windows": said | {"drawn_by": who}} for who in ("reader", "hash"))
    assert in_toto.sampled(reader | others) == (0.4, round((2 - fixed) / (5 - fixed), 6))
    assert in_toto.sampled(author | others) == (0.4, None)
    assert in_toto.sampled(reader | others | left) == (0.2, None)
    assert in_toto.sampled({"windows": author["windows"] | {"total": 2}}) == (1.0, 1.0)


# ---- Forgeries ----

GONE, PREDICATE, CLAIMS = object(), ("predicate",), ("predicate", "lockstep:claims")
TRAINING = ("predicate", "lockstep:training")
FORGED = {
    "another subject": (("subject", 0, "digest", "sha256"), DIGEST, "the claim digests"),
    "a subject is gone": (("subject", 2), GONE, "subject"),
    "another predicate": (("predicateType",), "https://slsa.dev/provenance/v1", "statement"),
    "a claim is gone": ((*CLAIMS, "verdict"), GONE, "a claim verdict"),
    "the sample is gone": ((*CLAIMS, "windows"), GONE, "share and odds"),
    "a claim is new": ((*CLAIMS, "safe"), {"is": "proven", "text": "safe"}, "the claim safe"),
    "stated is proven": ((*CLAIMS, "losses", "is"), "proven", "the claim losses"),
    "data are proven": ((*CLAIMS, "data", "is"), "proven", "the claim data"),
    "another version": ((*TRAINING, "format"), 2, "format is 2"),
    "better odds": ((*TRAINING, "odds"), 1.0, "share and odds"),
    "fewer windows": ((*CLAIMS, "windows", "total"), 1, "do not add up"),
    "its author drew": ((*CLAIMS, "windows", "drawn_by"), "hash", "drawn_by"),
    "no training": (TRAINING, None, "without a training"),
    "a better word": ((*PREDICATE, "verifiedLevels"), ["SLSA_BUILD_LEVEL_3"], "level"),
    "no signature": ((*PREDICATE, "inputAttestations"), [], "inputAttestations"),
    "more than is known": ((*PREDICATE, "lockstep:more"), True, "more"),
    "truncated": (lambda text: text[:-9], "an attestation"),
    "a key twice": (lambda text: '{"subject": [],' + text[1:], "twice"),
    "not a number": (lambda text: text.replace('"odds": 0.25', '"odds": NaN'), "finite"),
    "huge": (lambda text: text + " " * 2**21, "over"),
    "deep": (lambda text: "[" * 2**20, "an attestation"),
    "two statements": (lambda text: f"[{text},{text}]", "an attestation"),
}


def changed(text: str, path: tuple, value: object) -> str:
    inner = statement = json.loads(text)
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(statement)


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_statement_is_refused_signed_or_not(attested, tmp_path, forged):
    *change, named = FORGED[forged]
    text, file = attested.bare.read_text(), tmp_path / "f.json"
    text = changed(text, *change) if change[1:] else change[0](text)
    file.write_text(text)
    status, said = attested.read(file, "--weights", attested.weights)
    assert (status, said.count("\n")) == (1, 1) and named in said and len(said) < 1300
    bundle = read_json(attested.signed)
    bundle["dsseEnvelope"]["payload"] = b64encode(text.encode()).decode()
    file.write_text(json.dumps(bundle))
    status, said = attested.read(file)
    assert status == 1 and ("signature does not match" in said or "over" in said)


def test_a_strangers_signature_and_other_weights_are_refused(attested, tmp_path):
    file, (stranger, _) = tmp_path / "f.json", write_keys(tmp_path, name="stranger")
    file.write_bytes(signature.seal(attested.bare.read_bytes(), stranger))
    assert "expected the key" in attested.read(file)[1]
    file.write_bytes(attested.weights.read_bytes() + b"\0")
    assert "expected weights" in attested.read(attested.signed, "--weights", file)[1]


def test_schema_and_example_are_those_of_the_code(attested, tmp_path):
    schema = in_toto.Attested.model_json_schema()
    assert json.loads(SCHEMA.read_text()) == schema, f"write {SCHEMA} anew"
    ours = {k: v for k, v in read_json(attested.bare)["predicate"].items() if ":" in k}
    jsonschema.Draft202012Validator(schema).validate(ours)
    page = (PROJECT / "docs/reference/attestation.md").read_text()
    (tmp_path / "example.json").write_text(page.split("```json\n")[1].split("```")[0])
    assert attested.read(tmp_path / "example.json", "--method", "Distro")[0] == 3
