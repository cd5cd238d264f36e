import pytest

from pipeline import runfile, sources
from pipeline.net import google
from pipeline.runfile import Network
from pipeline.sources.token_files.http import list_bucket
from tests.pipeline.sources import options
from tests.servers import service_account
from tests.servers.bucket import Bucket

NETWORK = Network(connections=2, attempts=1, stall_seconds=5)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.delenv(google.KEY, raising=False)
    with Bucket().serving() as served:
        monkeypatch.setenv(google.EMULATOR, served.address)
        yield served


def listed(folder: str) -> list[str]:
    return [file.name for file in list_bucket("ours", folder, NETWORK)]


def refusal(folder: str, name: str = "ours") -> str:
    return options.refusal(list_bucket, name, folder, NETWORK)


def test_all_pages_of_a_folder_are_read_and_no_other_folder(bucket):
    for number in range(7):  # the server gives two at a time
        bucket.put(f"a/{number}.ds", b"12")
    bucket.put("ab/0.ds", b"12")
    bucket.put("a/", b"")  # as some tools mark a folder
    assert listed("a") == listed("a/") == [f"{number}.ds" for number in range(7)]
    assert "ab/0.ds" in listed("")


def test_each_file_is_held_to_the_version_that_was_listed(bucket):
    generation = bucket.put("a/0.ds", b"12")
    (file,) = list_bucket("ours", "a", NETWORK)
    assert file.origin.url == f"gs://ours/a/0.ds#{generation}"
    assert file.origin.checksum.startswith("md5:")
    assert file.origin.size == 2
    bucket.claims["a/0.ds"] = {"md5Hash": None}  # of a composite object
    (file,) = list_bucket("ours", "a", NETWORK)
    assert file.origin.checksum.startswith("crc32c:")


def test_what_cannot_be_read_of_a_bucket_is_one_line(bucket):
    assert refusal("nothing") == (
        "gs://ours/nothing: found no files, expected some in this folder of the bucket"
    )
    assert "gs://theirs/a: answered 404" in refusal("a", "theirs")
    bucket.put("a/0.ds", b"12", encoding="gzip")
    assert "stored as gzip, expected plain bytes" in refusal("a")
    bucket.private = True
    assert "answered 401" in refusal("a") and "or credentials for it" in refusal("a")


def test_a_private_bucket_is_read_with_the_environments_credentials(bucket, tmp_path, monkeypatch):
    bucket.private = True
    for name in ("0.ds", "1.ds"):
        bucket.put(f"a/{name}", name.encode())
    (secret := tmp_path / "secret").mkdir()
    service_account.use(secret / "key.json", bucket.address, monkeypatch)
    how = {"token_size_in_bytes": "TwoBytes", "shuffle": "DontShuffle"}
    where = {"Gcp": {"bucket_name": "ours", "filter_directory": "a"}}
    location = runfile.DataHttp.model_validate(how | {"location": where})
    (out := tmp_path / "out").mkdir()
    sources.fetch(location, out, options.options(tmp_path / "store"))
    assert (out / "train" / "00000.ds").read_bytes() == b"0.ds"
    authorizations = {authorization for method, _, authorization in bucket.seen if method == "GET"}
    assert authorizations == {f"Bearer {bucket.token}"}
    for path in (*out.rglob("*"), *(tmp_path / "store").rglob("*")):
        assert path.is_dir() or bucket.token.encode() not in path.read_bytes()


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
def test_an_invalid_listing_is_one_line(bucket, claim):
    bucket.put("a/0.ds", b"12")
    bucket.claims["a/0.ds"] = claim
    assert "gs://ours/a: invalid listing: items[0]." in refusal("a")
