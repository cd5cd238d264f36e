"""A bucket: a model by the generations of its manifest, whole or refused in one line."""

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.errors import LockstepError
from pipeline.net import connection, google_auth, google_files, retry
from pipeline.runfile import Network
from pipeline.stage import artifacts
from pipeline.weights import bucket, hf
from tests import tiny
from tests.pipeline.conversion import (
    check_silence,
    convert_in,
    refused,
    same_params,
    write_model,
)
from tests.servers import misbehaviour as m
from tests.servers import service_account
from tests.servers.bucket import Bucket, Object
from tests.servers.misbehaviour import Misbehaviour
from tests.servers.web import Answer

NAME, FOLDER = "ours", "runs/a"
WHERE = f"gs://{NAME}/{FOLDER}"
ABOUT = {"step": 7, "epoch": 2, "run": "0123456789ab"}
CHECKPOINT = {"bucket": NAME, "prefix": FOLDER}
JUNK = ("modeling.py", "pytorch_model.bin", "notes.json")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """An empty bucket, and nobody's credentials."""
    monkeypatch.delenv(google_auth.KEY, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setattr(bucket, "NETWORK", Network(attempts=1))
    with Bucket().serving() as server:
        monkeypatch.setenv(google_auth.EMULATOR, server.address)
        yield server


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model(tmp_path / "model")


def push(folder: Path, prefix: str = FOLDER, **about: object) -> int:
    return bucket.push(sorted(folder.iterdir()), NAME, prefix, **ABOUT | about)


def put(served: Bucket, folder: Path) -> None:
    """As somebody else uploads it: without a manifest."""
    for path in folder.iterdir():
        served.put(f"{FOLDER}/{path.name}", path.read_bytes())


def put_manifest(served: Bucket, *names: str, **changes: object) -> int:
    """A manifest as Psyche writes it, of what is there now."""
    stored = [(name, served.find(f"{FOLDER}/{name}", None)) for name in names]
    files = [
        {"filename": name, "generation": o.generation, "size_bytes": len(o.content)} | changes
        for name, o in stored
        if o is not None
    ]
    metadata = {"timestamp": "2026-01-15T10:30:00Z", "epoch": 2, "step": 7, "run_id": "theirs"}
    content = json.dumps({"metadata": metadata, "files": files})
    return served.put(f"{FOLDER}/manifest.json", content.encode())


def read(root: Path, kind: str = "Gcs", **changes: object) -> Path:
    """Runs the stage convert; data/init."""
    root.mkdir(exist_ok=True)
    return convert_in(root, {kind: CHECKPOINT | changes})


def refusal(root: Path, **changes: object) -> str:
    root.mkdir(exist_ok=True)
    return refused(root, {"Gcs": CHECKPOINT | changes})


def source_of(out: Path) -> dict:
    return artifacts.read_json(out / "source.json")


def cached(root: Path) -> dict[str, bytes]:
    """What the cache holds of the folder, locks aside."""
    files = tiny.contents(root / "data" / "store" / "gcs" / NAME / FOLDER)
    return {name: content for name, content in files.items() if not name.endswith(".lock")}


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


# ---- There and back ----


@pytest.mark.parametrize(
    ("prefix", "shard_bytes"), [("", 5 * 2**30), ("runs/a", 3000), ("runs/a/", 5 * 2**30)]
)
def test_what_is_pushed_comes_back_with_the_same_bytes(
    tmp_path, served, caplog, prefix, shard_bytes
):
    caplog.set_level(logging.WARNING)
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    served.put("runs/ab/model.safetensors", b"of another folder")
    generation = push(model, prefix)
    kind = "P2PGcs" if prefix == "runs/a" else "Gcs"
    out = read(tmp_path, kind, prefix=prefix, generation=generation)
    assert same_params(out, model)
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    source = source_of(out)
    wanted = {p.name: p.read_bytes() for p in model.iterdir() if p.name not in JUNK}
    assert source["files"] == {name: artifacts.sha256_file(model / name) for name in wanted}
    assert source["manifest_generation"] == generation
    folder = f"{prefix.rstrip('/')}/" if prefix else ""
    assert source["generations"] == {
        name: served.find(f"{folder}{name}", None).generation for name in wanted
    }
    cache = tmp_path / "data" / "store" / "gcs" / NAME / folder / f"step-7-{generation}"
    assert tiny.contents(cache) == wanted
    assert caplog.text == ""


def test_a_manifest_says_in_psyches_words_what_was_pushed(served, model):
    push(model)
    said = json.loads(served.live()[f"{FOLDER}/manifest.json"])
    assert said["metadata"].keys() >= {"timestamp", "epoch", "step", "run_id"}
    assert (said["metadata"]["step"], said["metadata"]["epoch"]) == (7, 2)
    assert said["metadata"]["run_id"] == "0123456789ab"
    weights = served.find(f"{FOLDER}/model.safetensors", None)
    assert said["files"] == [
        {
            "filename": "model.safetensors",
            "generation": weights.generation,
            "size_bytes": len(weights.content),
        }
    ]
    beside = {path.name for path in model.iterdir()} - {"model.safetensors"}
    assert {entry["filename"] for entry in said["companions"]} == beside


def test_a_large_file_goes_in_chunks(served, model, monkeypatch):
    monkeypatch.setattr(google_files, "CHUNK_BYTES", 2**18)
    (model / "added_tokens.json").write_bytes(large := bytes(range(256)) * 3000)
    push(model)
    assert served.live()[f"{FOLDER}/added_tokens.json"] == large
    assert len([path for method, path, _ in served.seen if method == "PUT"]) > len(served.objects)


def other_range(said: str | None) -> Callable[[Answer], Answer]:
    """Says of an upload that other bytes have arrived than have."""

    def spoil(answer: Answer) -> Answer:
        headers = {name: text for name, text in answer.headers.items() if name != "Range"}
        return replace(answer, status=308, headers=headers | ({"Range": said} if said else {}))

    return spoil


UPLOADED = "^PUT /upload"
LARGE = bytes(range(256)) * 3000  # three chunks of 256 KiB


@pytest.fixture
def large(served, tmp_path, monkeypatch) -> Path:
    """A folder of one large file, pushed in small chunks, and no waits between attempts."""
    monkeypatch.setattr(google_files, "CHUNK_BYTES", 2**18)
    monkeypatch.setattr(bucket, "NETWORK", Network(attempts=2, stall_seconds=0.3))
    monkeypatch.setattr(retry, "pause", lambda seconds, cancelled: None)
    (folder := tmp_path / "large").mkdir()
    (folder / "model.safetensors").write_bytes(LARGE)
    return folder


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("wrong", [m.refused, m.silent, m.not_http, m.status(503), m.always_100])
def test_an_upload_goes_on_where_it_stopped(served, large, wrong, after):
    served.faults.append(Misbehaviour(wrong, times=1, where=UPLOADED, after=after))
    push(large)
    assert served.live()[f"{FOLDER}/model.safetensors"] == LARGE
    assert len(served.objects[f"{FOLDER}/model.safetensors"]) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (m.silent, "timed out, expected 768000 more bytes to arrive within 2 attempts"),
        (m.trickling, "more bytes to arrive within 2 attempts"),
        (m.status(503), "answered 503 Service Unavailable, expected 768000 more bytes"),
        (other_range(None), "the server takes no more bytes, expected 768000 more bytes"),
        (other_range("bytes=0-767999"), "expected some from offset 0 on"),
        (other_range("bytes=0-999999"), "expected some from offset 0 on"),
        (other_range("all"), "has 'all' of an upload of 768000 bytes"),
        (m.status(410), "answered 410 Gone, expected a bucket that the credentials of"),
        (m.redirected(), "too many redirects"),
    ],
)
def test_an_upload_that_never_ends_is_one_line(served, large, wrong, said):
    served.faults.append(Misbehaviour(wrong, where=UPLOADED))
    with pytest.raises(LockstepError, match=re.escape(said)) as caught:
        push(large)
    assert str(caught.value).startswith(f"{WHERE}/model.safetensors: ")


@pytest.mark.parametrize(
    ("claimed", "said"),
    [
        ({"size": "7"}, "has 7 bytes of crc32c:"),
        ({"crc32c": "AAAAAA=="}, "of crc32c:00000000, expected 768000 of crc32c:"),
        ({"generation": "new"}, "invalid answer: generation is"),
    ],
)
def test_what_the_server_has_is_what_was_sent(served, large, claimed, said):
    def spoil(answer: Answer) -> Answer:
        body = json.dumps(json.loads(answer.body) | claimed).encode()
        return replace(answer, body=body, headers={"Content-Length": str(len(body))})

    served.faults.append(Misbehaviour(spoil, where=UPLOADED, after=2))
    with pytest.raises(LockstepError, match=re.escape(said)):
        push(large)


def test_an_upload_begins_at_an_address_and_another_server_sees_no_credentials(
    served, large, account
):
    for address in ("", "file:///etc/passwd"):
        elsewhere = partial(replace, headers={"Location": address, "Content-Length": "2"})
        served.faults[:] = [Misbehaviour(elsewhere, where="^POST /upload")]
        with pytest.raises(LockstepError, match="sends no address, expected one of an upload"):
            push(large)
    with Bucket().serving() as other:
        about = {"name": "x", "crc32c": Object("x", 0, LARGE).resource()["crc32c"]}
        other.uploads["0"] = {"about": about, "query": {}, "content": b""}
        address = f"{other.address}/upload/0?upload_id=0"
        elsewhere = partial(replace, headers={"Location": address, "Content-Length": "2"})
        served.faults[:] = [Misbehaviour(elsewhere, times=1, where="^POST /upload")]
        push(large)
        assert other.live() == {"x": LARGE}
        assert {said for _, _, said in other.seen} == {None}


def test_the_same_export_is_not_sent_twice(tmp_path, served, model):
    first = push(model)
    second = push(model)
    assert second > first
    assert {name: len(versions) for name, versions in served.objects.items()} == {
        f"{FOLDER}/{path.name}": 1 for path in model.iterdir()
    } | {f"{FOLDER}/manifest.json": 2}
    assert same_params(read(tmp_path, generation=second), model)


# ---- Generations ----


def test_a_manifest_is_read_at_its_generations_though_all_is_overwritten_since(
    tmp_path, served, model, caplog
):
    caplog.set_level(logging.WARNING)
    generation = push(model)
    later = write_model(tmp_path / "later", seed=4)
    (later / "tokenizer.json").write_text("{}")
    put(served, later)  # whose manifest has not come yet
    out = read(tmp_path / "first")
    assert same_params(out, model)
    assert (out / "hf" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert f"manifest.json is generation {generation} today; set generation to that" in caplog.text
    newest = push(later)
    assert same_params(read(tmp_path / "newest"), later)
    assert same_params(read(tmp_path / "pinned", generation=generation), model)
    assert source_of(tmp_path / "newest/data/init")["manifest_generation"] == newest


def test_weights_are_sent_first_and_the_manifest_last(served, model):
    order = []
    served.before_upload = lambda name: order.append(name.removeprefix(f"{FOLDER}/"))
    push(model)
    assert (order[0], order[-1]) == ("model.safetensors", "manifest.json")
    assert len(order) == len(served.objects)


def test_a_bucket_that_keeps_no_versions_says_so(tmp_path, served, model):
    served.versioned = False
    push(model)
    later = write_model(tmp_path / "later", seed=4)
    served.put(f"{FOLDER}/model.safetensors", (later / "model.safetensors").read_bytes())
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}/model.safetensors: found no generation 17")
    assert "a bucket without object versioning keeps only the newest" in said


def test_a_generation_that_is_not_there_or_another_than_asked_for_is_refused(
    tmp_path, served, model
):
    generation = push(model)
    served.claims[f"{FOLDER}/manifest.json"] = {"generation": "5"}
    said = refusal(tmp_path, generation=generation)
    assert said == f"{WHERE}/manifest.json: found generation 5, expected {generation}"
    said = refusal(tmp_path, generation=5)
    assert said.startswith(f"{WHERE}/manifest.json: found no generation 5, expected it")


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json"])
def test_two_pushes_at_once_are_one_and_a_refusal(tmp_path, served, model, name):
    push(model)
    later = write_model(tmp_path / "later", seed=4)

    def somebody_else(uploaded: str) -> None:
        if uploaded == f"{FOLDER}/{name}":
            served.before_upload = lambda name: None
            served.put(uploaded, b"theirs")

    served.before_upload = somebody_else
    with pytest.raises(LockstepError, match="somebody else wrote there since this push began"):
        push(later)
    assert served.live()[f"{FOLDER}/{name}"] == b"theirs"


# ---- Psyche's own manifests, and none ----


def test_shards_without_an_index_are_read_as_a_manifest_lists_them(tmp_path, served):
    model = write_model(tmp_path / "model", max_shard_bytes=3000)
    shards = sorted(path.name for path in model.glob("*.safetensors"))
    assert len(shards) > 2
    put(served, model)
    served.put(f"{FOLDER}/{hf.INDEX}", b'{"weight_map": {"of": "others.safetensors"}}')
    put_manifest(served, *shards)
    out = read(tmp_path)
    assert same_params(out, model)
    assert hf.INDEX not in source_of(out)["generations"]
    assert set(source_of(out)["generations"]) >= {*shards, "config.json", "tokenizer.json"}


def test_one_file_of_another_name_is_read_too(tmp_path, served, model):
    put(served, model)
    served.put(f"{FOLDER}/weights-7.safetensors", (model / hf.WEIGHTS).read_bytes())
    put_manifest(served, "weights-7.safetensors")
    assert same_params(read(tmp_path), model)


@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 3000])
@pytest.mark.parametrize("index", [True, False])
def test_without_a_manifest_what_lies_there_is_read(tmp_path, served, caplog, shard_bytes, index):
    caplog.set_level(logging.WARNING)
    model = write_model(tmp_path / "model", max_shard_bytes=shard_bytes)
    put(served, model)
    if not index:
        served.objects.pop(f"{FOLDER}/{hf.INDEX}", None)
    served.put(f"{FOLDER}/sub/model.safetensors", b"of another folder")
    out = read(tmp_path)
    assert same_params(out, model)
    assert source_of(out)["manifest_generation"] is None
    assert f"{WHERE} has no manifest.json: its files as of today are read" in caplog.text
    assert all(name.startswith("no_manifest/") for name in cached(tmp_path))
    assert not {f"no_manifest/{name}" for name in JUNK} & cached(tmp_path).keys()


def test_without_a_manifest_what_changed_is_fetched_and_what_went_is_not_kept(
    tmp_path, served, model
):
    put(served, write_model(tmp_path / "shards", max_shard_bytes=3000))
    read(tmp_path)
    for path in (tmp_path / "shards").glob("model*"):
        del served.objects[f"{FOLDER}/{path.name}"]
    put(served, model)
    assert same_params(read(tmp_path), model)
    weights = {name for name in cached(tmp_path) if "model" in name}
    assert weights == {"no_manifest/model.safetensors"}


# ---- The cache ----


def test_what_is_there_is_not_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    before = dict(served.sent)
    read(tmp_path, generation=generation)
    assert served.sent == before


def test_offline_what_was_read_before_is_read_again(tmp_path, served, model, monkeypatch):
    push(model)
    read(tmp_path)
    monkeypatch.setenv(connection.OFFLINE, "1")
    before = list(served.seen)
    assert same_params(read(tmp_path), model)
    assert served.seen == before
    assert "HF_HUB_OFFLINE is set, expected what was listed before" in refusal(
        tmp_path / "other", generation=5
    )


def test_a_cached_file_that_was_damaged_is_fetched_again(tmp_path, served, model):
    generation = push(model)
    read(tmp_path)
    file = tmp_path / f"data/store/gcs/{NAME}/{FOLDER}/step-7-{generation}/model.safetensors"
    file.write_bytes(flipped(file.read_bytes()))
    assert same_params(read(tmp_path), model)
    assert file.read_bytes() == (model / "model.safetensors").read_bytes()


def test_a_link_in_the_cache_is_replaced_and_not_written_through(tmp_path, served, model):
    push(model)
    read(tmp_path)
    (file,) = (tmp_path / "data" / "store").rglob("model.safetensors")
    ours = file.rename(tmp_path / "ours.safetensors")
    before = ours.read_bytes()
    file.symlink_to(ours)
    assert same_params(read(tmp_path), model)
    assert not file.is_symlink() and ours.read_bytes() == before


def test_a_download_that_broke_off_goes_on_where_it_stopped(tmp_path, served, model):
    push(model)
    name = f"{FOLDER}/model.safetensors"
    size = len(served.live()[name])
    served.spoil[name] = lambda content: content[: len(content) // 2]
    assert refusal(tmp_path).endswith("within 1 attempts; run again to resume")
    assert 0 < served.sent[name] < size
    had = served.sent.pop(name)
    del served.spoil[name]
    assert same_params(read(tmp_path), model)
    assert served.sent[name] == size - had


# ---- What is not what it says ----


@pytest.mark.parametrize("stated", ["crc32c", "md5Hash"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_damaged_body_is_refused_and_fetched_again(tmp_path, served, model, name, stated):
    push(model)
    other = {"crc32c": "md5Hash", "md5Hash": "crc32c"}[stated]
    served.claims = {f"{FOLDER}/{path.name}": {other: None} for path in model.iterdir()}
    served.spoil[f"{FOLDER}/{name}"] = flipped
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}/{name}: received {stated.removesuffix('Hash')}:")
    assert said.endswith("as the server says, 2 times; the damaged copy is removed")
    served.spoil[f"{FOLDER}/{name}"] = lambda content: content + b"more"
    assert "bytes, expected " in refusal(tmp_path)
    served.spoil.clear()
    assert same_params(read(tmp_path), model)


TWICE = "expected model.safetensors alone, or each of several shards once"


@pytest.mark.parametrize(
    ("names", "changes", "said"),
    [
        (["model.safetensors"], {"size_bytes": 12}, "bytes, expected 12 as manifest.json says"),
        (["model.safetensors"], {"filename": "b.safetensors"}, "found no generation 17"),
        (["model.safetensors"] * 2, {}, TWICE),
        (["model.safetensors", "a.safetensors"], {}, TWICE),
    ],
)
def test_a_manifest_of_other_files_than_are_there_is_refused(
    tmp_path, served, model, names, changes, said
):
    put(served, model)
    served.put(f"{FOLDER}/a.safetensors", (model / hf.WEIGHTS).read_bytes())
    put_manifest(served, *names, **changes)
    assert said in refusal(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..",
        ".hidden.safetensors",
        "x.bin",
        "model.safetensors.py",
        "x.safetensors\n",
        "",
    ],
)
def test_a_name_that_leaves_the_folder_or_is_no_safetensors_is_refused(
    tmp_path, served, model, name
):
    put(served, model)
    put_manifest(served, "model.safetensors", filename=name)
    said = refusal(tmp_path)
    assert said == (
        f"{WHERE}/manifest.json: files[0].filename is {name!r}, expected a safetensors file in the "
        "same folder"
    )
    assert not [path for path in tmp_path.rglob("*.safetensors") if "model" not in path.parts]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "EOF while parsing an object at line 1 column 1, expected JSON"),
        (b"[]", "found [], expected a table"),
        (b"{}", "metadata: missing, expected it (The checkpoint)"),
        (b'{"metadata": {"step": 1}, "files": []}', "files is [], expected "),
        (b'{"metadata": {"step": -1}, "files": [{}]}', "metadata.step is -1, expected "),
        (
            b'{"metadata": {"step": 1}, "files": [{"filename": "a.safetensors", "generation": 0, '
            b'"size_bytes": 1}]}',
            "files[0].generation is 0, expected ",
        ),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, served, model, content, said):
    put(served, model)
    served.put(f"{FOLDER}/manifest.json", content)
    assert refusal(tmp_path).startswith(f"{WHERE}/manifest.json: {said}")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_that_is_no_model_is_refused(tmp_path, served, model, name):
    (model / name).unlink()
    put(served, model)
    assert refusal(tmp_path).startswith(f"{WHERE}: found no {name}")


def test_bytes_that_are_stored_packed_are_refused(tmp_path, served, model):
    put(served, model)
    served.put(f"{FOLDER}/config.json", (model / "config.json").read_bytes(), encoding="gzip")
    assert refusal(tmp_path) == f"{WHERE}/config.json: stored as gzip, expected plain bytes"


def test_a_bucket_that_is_not_there_is_one_line(tmp_path, served):
    assert refusal(tmp_path, bucket="theirs") == (
        "gs://theirs/runs/a: answered 404 Not Found, expected a model in a bucket that may be read"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("bucket", "gs://ours"), ("bucket", ".."), ("prefix", "../x"), ("prefix", "/x"),
     ("prefix", "a//b"), ("prefix", "a/..")],
)  # fmt: skip
def test_a_place_that_would_lead_out_of_the_cache_is_refused(tmp_path, served, field, value):
    said = refusal(tmp_path, **{field: value})
    assert f"model.LLM.checkpoint.Gcs.{field} is " in said
    assert served.seen == []


def test_a_server_that_does_not_answer_is_one_line(tmp_path, monkeypatch):
    with Bucket().serving() as server:
        monkeypatch.setenv(google_auth.EMULATOR, server.address)
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}: ")
    assert said.endswith("expected an answer within 1 attempts; run again")


# ---- Credentials ----


@pytest.fixture
def account(tmp_path_factory, served, monkeypatch) -> None:
    """A service account, whose tokens the server gives out itself."""
    service_account.use(tmp_path_factory.mktemp("secret") / "key.json", served.address, monkeypatch)


def test_without_credentials_nobody_asks_and_an_emulator_sees_no_login(tmp_path, served, model):
    push(model)
    read(tmp_path)
    login = tmp_path / "gcloud" / "application_default_credentials.json"
    login.parent.mkdir()
    said = {"type": "authorized_user", "client_id": "c", "client_secret": "s"}
    said |= {"refresh_token": "r", "token_uri": f"{served.address}/token"}
    login.write_text(json.dumps(said))
    push(model)
    assert {said for _, _, said in served.seen} == {None}


@pytest.mark.parametrize("status", [401, 403, 500])
@pytest.mark.parametrize("what", ["GET", "POST /upload", "download"])
def test_the_token_reaches_the_server_and_nothing_else(
    tmp_path, served, model, account, capfd, caplog, status, what
):
    caplog.set_level(logging.DEBUG)
    asked = f"Bearer {served.token}"
    if what == "download":
        push(model)
    served.refuse = (what, status)
    if what == "download":
        said = refusal(tmp_path)
    else:
        with pytest.raises(LockstepError) as caught:
            push(model)
        said = str(caught.value)
    assert asked in {said for _, _, said in served.seen}
    assert said.startswith(WHERE)
    assert (f"answered {status}" if what == "download" else "we do not like") in said or (
        status == 500 and what != "download"
    )
    check_silence(served.token, tmp_path, said, capfd, caplog)
    served.refuse = None
    push(model)
    read(tmp_path)
    check_silence(served.token, tmp_path, "", capfd, caplog)


def test_credentials_that_are_none_are_one_line(tmp_path, served, model, monkeypatch):
    monkeypatch.setenv(google_auth.KEY, str(tmp_path / "none.json"))
    said = refusal(tmp_path)
    assert said.startswith(f"{WHERE}: {google_auth.KEY}: ")
    assert said.endswith("expected a file of credentials")


def test_without_google_auth_a_public_bucket_is_read_and_a_push_is_one_line(
    tmp_path, served, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "google.auth.exceptions", None)
    put(served, model)
    assert same_params(read(tmp_path), model)
    with pytest.raises(LockstepError, match="is not installed, expected the extra gcs"):
        push(model)
