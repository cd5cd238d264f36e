"""Remote token files: at web addresses, in buckets, and at addresses of fsspec."""

import json
import os
from pathlib import Path

import pytest

from lockstep.errors import LockstepError
from pipeline import runfile
from pipeline.net import fsspec_files, remote
from pipeline.runfile import Network
from pipeline.runfile.data import ShuffleSeeded
from pipeline.sources import provider as sources
from pipeline.sources.token_files import remote_files
from pipeline.sources.token_files.remote_files import list_bucket
from tests.errors import check_names
from tests.pipeline.sources.options import fetch_into, options, refusal
from tests.servers import misbehaviour
from tests.servers import s3 as s3_server
from tests.servers.bucket import running_bucket, use_account
from tests.servers.files import Files
from tests.servers.misbehaviour import Misbehaviour

HOW = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}


@pytest.fixture
def files(monkeypatch):
    with Files().serving() as served:
        yield served


def at(location: dict) -> runfile.DataHttp:
    return runfile.DataHttp.model_validate(HOW | {"location": location})


def fetch(where: runfile.Data, folder: Path, **how: bool) -> sources.Fetched:
    return fetch_into(folder, where, **how)


def test_a_file_of_odd_length_is_refused_before_it_is_fetched(files, tmp_path):
    files.put("0.ds", b"123")
    where = at({"SingleUrl": files.url("0.ds")})
    message = refusal(fetch, where, tmp_path / "out")
    check_names(message, files.url("0.ds"), 3)
    assert not files.sent.get("0.ds")


@pytest.mark.parametrize("password", ["open%sesame", "öpen%sesame"])
def test_a_password_of_netrc_opens_the_door_and_is_written_nowhere(
    files, tmp_path, monkeypatch, password
):
    files.put("0.ds", b"12")
    files.user = f"me:{password}"
    where, netrc = at({"SingleUrl": files.url("0.ds")}), tmp_path.parent / "netrc"
    netrc.write_text(f"default login me password {password}\n")  # for anybody: not sent
    monkeypatch.setenv("NETRC", str(netrc))
    assert "answered 401" in refusal(fetch, where, tmp_path / "no")
    netrc.write_text(f"machine 127.0.0.1 login me password {password}\n")
    remote._user_of.cache_clear()
    fetch(where, tmp_path / "out")
    fetch(where, tmp_path / "streamed", stream=True)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sesame" not in path.read_bytes()


def test_a_file_without_a_version_is_not_read_while_training(files, tmp_path):
    files.put("0.ds", b"12")
    files.faults.append(Misbehaviour(misbehaviour.untagged, where="^HEAD"))
    where = at({"SingleUrl": files.url("0.ds")})
    fetch(where, tmp_path / "out")
    message = refusal(fetch, where, tmp_path / "other", stream=True)
    assert message.startswith(f"{files.url('0.ds')}: the server names no version of it")


def test_a_page_to_sign_in_that_answers_for_a_file_is_not_taken_for_tokens(files, tmp_path):
    files.put("0.ds", bytes(70))
    files.faults.append(Misbehaviour(misbehaviour.sign_in(None), where=""))
    message = refusal(fetch, at({"SingleUrl": files.url("0.ds")}), tmp_path / "out")
    assert message.startswith(f"{files.url('0.ds')}: found text, '<!doctype html>")


@pytest.mark.parametrize(
    "address",
    ["hf://x", "gs://b/x", "http://[::1", "http:///x", "x", "http://h:port/x", "HTTPS:/x"],
)
def test_what_is_no_address_of_a_web_server_is_one_line(files, tmp_path, address):
    message = refusal(fetch, at({"SingleUrl": address}), tmp_path / "out")
    assert message.startswith(f"{address}: ") and "expected " in message
    mixed_there = mixed(files, {"shuffle": "DontShuffle", "providers": [single(address)]})
    assert refusal(fetch, mixed_there, tmp_path / "other") == message
    where = runfile.DataWeightedHttp(url=address)
    assert refusal(fetch, where, tmp_path / "third").startswith(f"{address}: ")


def test_more_files_than_can_be_asked_for_are_refused_alone_and_mixed(files, tmp_path):
    where = {"url_template": files.url("{}.ds"), "start_index": 0, "n_left_pad_zeros": 0}
    one = {"location": {"NumberedFiles": where | {"num_files": 60_000}}}
    message = refusal(
        fetch, mixed(files, {"shuffle": "DontShuffle", "providers": [HOW | one] * 2}), tmp_path
    )
    check_names(message, files.url("mix.json"), 120000, 100000)
    assert [method for method, *_ in files.seen] == ["GET"]  # of the document
    message = refusal(fetch, at({"NumberedFiles": where | {"num_files": 2**32 - 1}}), tmp_path)
    assert message.endswith(
        "num_files is 4294967295, expected at most 100000: each needs a request for its size"
    )


def test_what_is_kept_of_a_listing_is_one_line_where_it_is_damaged(files, tmp_path, monkeypatch):
    files.put("0.ds", b"12")
    where = at({"SingleUrl": files.url("0.ds")})
    fetch(where, tmp_path / "out")
    (kept,) = (tmp_path / "store" / "listings").iterdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for content in ("{", "[]", kept.read_text().replace('"size": 2', '"size": -2')):
        kept.write_text(content)
        assert refusal(fetch, where, tmp_path / "other").startswith(f"{kept}: ")


def test_offline_what_is_listed_is_read_in_another_order_and_size(files, tmp_path, monkeypatch):
    files.put("0.ds", bytes(8))
    where = at({"SingleUrl": files.url("0.ds")})
    fetch(where, tmp_path / "out")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shuffle = ShuffleSeeded(seed=(7,) * 32)
    other = where.model_copy(update={"shuffle": shuffle, "token_size_in_bytes": "FourBytes"})
    fetched = fetch(other, tmp_path / "other")
    assert (fetched.shuffle, fetched.token_size_in_bytes) == (shuffle, 4)
    assert [file.tokens for file in fetched.files] == [2]
    elsewhere = at({"SingleUrl": files.url("1.ds")})
    assert "HF_HUB_OFFLINE is set, expected" in refusal(fetch, elsewhere, tmp_path / "none")


def test_a_proxy_of_the_environment_is_used(files, tmp_path, monkeypatch):
    files.put("0.ds", b"12")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    where = at({"SingleUrl": files.url("0.ds")})
    assert "expected an answer" in refusal(fetch, where, tmp_path / "out")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    fetch(where, tmp_path / "out")
    assert os.listdir(tmp_path / "out" / "train") == ["00000.ds"]


# ---- WeightedHttp ----


def mixed(files: Files, document: object) -> runfile.DataWeightedHttp:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    files.put("mix.json", content)
    return runfile.DataWeightedHttp(url=files.url("mix.json"))


def single(address: str, **how: str) -> dict:
    return HOW | how | {"location": {"SingleUrl": address}}


def test_locations_of_different_token_size_are_refused(files, tmp_path):
    files.put("0.ds", b"1234")
    url = files.url("0.ds")
    both = [single(url), single(url, token_size_in_bytes="FourBytes")]
    where = mixed(files, {"shuffle": "DontShuffle", "providers": both})
    message = refusal(fetch, where, tmp_path / "out")
    assert "found tokens of FourBytes and TwoBytes, expected one token size" in message


@pytest.mark.parametrize(
    "document",
    [
        b"<html>",
        [],
        {"shuffle": "DontShuffle", "providers": []},
        {"shuffle": "DontShuffle", "providers": [["x", -1]], "more": 1},
    ],
)
def test_a_document_of_another_form_is_one_line(files, tmp_path, document):
    where = mixed(files, document)
    message = refusal(fetch, where, tmp_path / "out")
    expected = "expected JSON: " if document == b"<html>" else "invalid weighted configuration: "
    assert message.startswith(f"{files.url('mix.json')}: {expected}")


# ---- A bucket of Google Cloud Storage ----


NETWORK = Network(connections=2, attempts=1, stall_seconds=5)


@pytest.fixture
def gcs(monkeypatch):
    with running_bucket(monkeypatch) as served:
        yield served


def listed(folder: str) -> list[str]:
    return [file.name for file in list_bucket("ours", folder, NETWORK)]


def bucket_refusal(folder: str, name: str = "ours") -> str:
    return refusal(list_bucket, name, folder, NETWORK)


def test_all_pages_of_a_folder_are_read_and_no_other_folder(gcs):
    for number in range(7):  # the server gives two at a time
        gcs.put(f"a/{number}.ds", b"12")
    gcs.put("ab/0.ds", b"12")
    gcs.put("a/", b"")  # as some tools mark a folder
    assert listed("a") == listed("a/") == [f"{number}.ds" for number in range(7)]
    assert "ab/0.ds" in listed("")


def test_each_file_is_held_to_the_version_that_was_listed(gcs):
    generation = gcs.put("a/0.ds", b"12")
    (file,) = list_bucket("ours", "a", NETWORK)
    assert file.origin.url == f"gs://ours/a/0.ds#{generation}"
    assert file.origin.checksum.startswith("md5:")
    assert file.origin.size == 2
    gcs.claims["a/0.ds"] = {"md5Hash": None}  # of a composite object
    (file,) = list_bucket("ours", "a", NETWORK)
    assert file.origin.checksum.startswith("crc32c:")


def test_what_cannot_be_read_of_a_bucket_is_one_line(gcs):
    assert bucket_refusal("nothing") == (
        "gs://ours/nothing: found no files, expected some in this folder of the bucket"
    )
    assert "gs://theirs/a: answered 404" in bucket_refusal("a", "theirs")
    gcs.put("a/0.ds", b"12", encoding="gzip")
    assert "stored as gzip, expected plain bytes" in bucket_refusal("a")
    gcs.private = True
    assert "answered 401" in bucket_refusal("a") and "or credentials for it" in bucket_refusal("a")


def test_a_private_bucket_is_read_with_the_environments_credentials(gcs, tmp_path, monkeypatch):
    gcs.private = True
    for name in ("0.ds", "1.ds"):
        gcs.put(f"a/{name}", name.encode())
    (secret := tmp_path / "secret").mkdir()
    use_account(secret / "key.json", gcs.address, monkeypatch)
    fetch(at({"Gcp": {"bucket_name": "ours", "filter_directory": "a"}}), out := tmp_path / "out")
    assert (out / "train" / "00000.ds").read_bytes() == b"0.ds"
    authorizations = {authorization for method, _, authorization in gcs.seen if method == "GET"}
    assert authorizations == {f"Bearer {gcs.token}"}
    for path in (*out.rglob("*"), *(tmp_path / "store").rglob("*")):
        assert path.is_dir() or gcs.token.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "claim",
    [
        {"size": "many"},
        {"size": None},
        {"generation": "-1"},
        {"name": 7},
        {"md5Hash": "no base64!"},
        {"crc32c": ""},
    ],
)
def test_an_invalid_listing_is_one_line(gcs, claim):
    gcs.put("a/0.ds", b"12")
    gcs.claims["a/0.ds"] = claim
    assert "gs://ours/a: invalid listing: items[0]." in bucket_refusal("a")


# ---- An address of fsspec ----


@pytest.fixture
def s3(monkeypatch):
    with s3_server.running_s3(monkeypatch) as served:
        yield served


def url_refusal(address: str, folder) -> str:
    return refusal(fetch, runfile.DataUrl(url=address), folder / "out")


def test_a_single_file_is_a_location(s3, tmp_path):
    s3.objects |= {"a/0.ds": b"1234", "a/1.ds": b"12"}
    fetched = fetch(runfile.DataUrl(url="s3://ours/a/0.ds"), out := tmp_path / "out")
    assert [file.name for file in fetched.files] == ["0.ds"]
    assert (out / "train" / "00000.ds").read_bytes() == b"1234"


def test_files_of_this_machine_are_read_by_fsspec_too(tmp_path):
    (tmp_path / "source" / "held_out").mkdir(parents=True)
    (tmp_path / "source" / "b.ds").write_bytes(b"12")
    (tmp_path / "source" / "a.ds").write_bytes(b"1234")
    (tmp_path / "source" / "held_out" / "c.ds").write_bytes(b"56")
    where = runfile.DataUrl(url=f"file://{tmp_path}/source")
    fetched = fetch(where, tmp_path / "out")
    assert [file.name for file in fetched.files] == ["a.ds", "b.ds", "held_out/c.ds"]
    assert fetched.warnings == ()


def test_a_file_that_changes_between_two_requests_is_refused(s3, tmp_path, monkeypatch):
    """A piece counts only if the version is still the listed one after it was read."""
    monkeypatch.setattr(fsspec_files, "REQUEST_BYTES", 4)
    s3.objects |= {"a/0.ds": b"12345678"}
    listing = remote_files.listing(runfile.DataUrl(url="s3://ours/a"), options(tmp_path).network)
    origin, network = listing.files[0].origin, options(tmp_path).network
    pieces = fsspec_files.read(origin, 0, 8, network, is_rest=False)
    assert next(pieces) == b"1234"
    s3.objects["a/0.ds"] = b"abcdefgh"
    with pytest.raises(LockstepError, match="as listed; run again"):
        next(pieces)
    with pytest.raises(LockstepError, match="does not say which version"):
        unnamed = origin.model_copy(update={"tag": None})
        next(fsspec_files.read(unnamed, 0, 8, network, is_rest=False))


def test_no_such_bucket_and_a_wrong_key_are_one_line(s3, tmp_path, monkeypatch):
    assert url_refusal("s3://theirs/a", tmp_path).startswith("s3://theirs/a: ")
    s3.objects |= {"a/0.ds": b"1234"}
    fsspec_files.file_system.cache_clear()
    s3.key = "AKIAOTHER"
    message = url_refusal("s3://ours/a", tmp_path)
    assert message.startswith("s3://ours/a: ") and "expected a readable folder or file" in message
    assert s3.secret not in message


def test_addresses_of_other_locations_are_sent_there_and_an_unknown_kind_is_refused(tmp_path):
    assert "expected data_location.Http " in url_refusal("https://example.org/a.ds", tmp_path)
    assert "expected data_location.Hub " in url_refusal("hf://datasets/a/b", tmp_path)
    assert "expected data_location.Local " in url_refusal("/a/folder", tmp_path)
    message = url_refusal("nonsense://place", tmp_path)
    assert message.startswith("nonsense://place: ") and message.endswith(
        "expected an address of fsspec"
    )


def test_without_the_extra_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    fsspec_files.file_system.cache_clear()

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    message = url_refusal("s3://ours/a", tmp_path)
    assert message.startswith("s3://ours: s3fs ") and "[s3]" in message
