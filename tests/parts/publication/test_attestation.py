"""What `lockstep attestation` makes of what `verify --attest` wrote, and of what forgers write."""

import io
import json
from base64 import b64decode, b64encode
from contextlib import redirect_stdout

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from lockstep.files import read_json, sha256_file
from lockstep.transcript.transcript import Transcript
from parts.publication import in_toto, signature
from pipeline.__main__ import app
from pipeline.recheck import outputs
from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.parts.publication.published_run import WORD
from tests.parts.publication.test_signature import write_keys

pytestmark = pytest.mark.long

SCHEMA = PROJECT / "parts/publication/attestation.schema.json"
DIGEST = "0" * 64


def lockstep(*arguments: object) -> tuple[int, str]:
    out = io.StringIO()
    with tiny.like_a_process(), redirect_stdout(out), pytest.raises(SystemExit) as caught:
        app([*map(str, arguments)])
    return caught.value.code, out.getvalue()


class Attested:
    """A publication of all windows that a reader verified and attested."""

    def __init__(self, published, folder):
        self.weights = published.whole / "model.safetensors"
        self.private, self.key = write_keys(folder)
        self.signed, self.bare = folder / "signed.json", folder / "bare.json"
        asked = ["--root", folder / "r", "--seed", WORD, "--attest", self.signed]
        self.verified = lockstep(
            "verify", published.whole, *asked, "--sign", self.private, "--json"
        )
        self.bare.write_bytes(b64decode(read_json(self.signed)["dsseEnvelope"]["payload"]))

    def read(self, file, *asked):
        known = ["--key", self.key, "--weights", self.weights]
        return lockstep("attestation", file, *(asked or known))


@pytest.fixture(scope="module")
def attested(published, tmp_path_factory) -> Attested:
    return Attested(published, tmp_path_factory.mktemp("a"))


def test_what_verify_says_is_in_the_attestation_and_is_read_back(attested, published):
    (status, said), predicate = attested.verified, read_json(attested.bare)["predicate"]
    found, training = json.loads(said), predicate["lockstep:training"]
    assert (status, predicate["lockstep:claims"], training) == (
        0,
        found["claims"],
        found["training"],
    )
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
    "a signature of nobody": ((*PREDICATE, "inputAttestations"), [{}], "inputAttestations"),
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


def test_a_forged_signature_and_other_weights_are_refused(attested, tmp_path):
    def signatures(content: bytes) -> list:
        return json.loads(content)["dsseEnvelope"]["signatures"]

    file, payload = tmp_path / "f.json", attested.bare.read_bytes()
    strange = signature.seal(payload, write_keys(tmp_path, name="stranger")[0])
    zeros = [{"sig": b64encode(bytes.fromhex("3006020100020100")).decode()}]  # r and s are 0
    of_another = signatures(signature.seal(b"{}", attested.private))
    forged = [("signatures", ones) for ones in (zeros, of_another, signatures(strange), zeros * 2)]
    for key, value in (*forged, ("payloadType", "text/plain")):
        bundle = read_json(attested.signed)
        bundle["dsseEnvelope"][key] = value
        file.write_text(json.dumps(bundle))
        assert attested.read(file)[0] == 1
    file.write_bytes(strange)
    assert "expected the key" in attested.read(file)[1]
    file.write_bytes(attested.weights.read_bytes() + b"\0")
    assert "expected weights" in attested.read(attested.signed, "--weights", file)[1]
    small = ed25519.Ed25519PublicKey.from_public_bytes(b"\1" + bytes(31))  # of order 1
    file.write_bytes(small.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert attested.read(attested.signed, "--key", file)[0] == 2


def test_schema_and_example_are_those_of_the_code(attested, tmp_path):
    schema = in_toto.Attested.model_json_schema()
    assert json.loads(SCHEMA.read_text()) == schema, f"write {SCHEMA} anew"
    ours = {k: v for k, v in read_json(attested.bare)["predicate"].items() if ":" in k}
    jsonschema.Draft202012Validator(schema).validate(ours)
    page = (PROJECT / "docs/reference/attestation.md").read_text()
    (tmp_path / "example.json").write_text(page.split("```json\n")[1].split("```")[0])
    assert attested.read(tmp_path / "example.json", "--method", "Distro")[0] == 3
