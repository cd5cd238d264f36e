import pytest

from lockstep.errors import LockstepError
from pipeline import runfile, sources
from pipeline.net import fsspec_files
from pipeline.sources.token_files import fetching, url
from tests.pipeline.sources import options as how
from tests.pipeline.sources.options import options
from tests.servers import s3 as s3_server


@pytest.fixture
def bucket(monkeypatch):
    with s3_server.running_s3(monkeypatch) as served:
        yield served


def refusal(address: str, folder) -> str:
    where = runfile.DataUrl(url=address)
    return how.refusal(sources.fetch, where, folder, options(folder / "store"))


def test_a_single_file_is_a_location(bucket, tmp_path):
    bucket.objects |= {"a/0.ds": b"1234", "a/1.ds": b"12"}
    where = runfile.DataUrl(url="s3://ours/a/0.ds")
    fetched = sources.fetch(where, tmp_path, options(tmp_path / "store"))
    assert [file.name for file in fetched.files] == ["0.ds"]
    assert (tmp_path / "train" / "00000.ds").read_bytes() == b"1234"


def test_files_of_this_machine_are_read_by_fsspec_too(tmp_path):
    (tmp_path / "source" / "held_out").mkdir(parents=True)
    (tmp_path / "source" / "b.ds").write_bytes(b"12")
    (tmp_path / "source" / "a.ds").write_bytes(b"1234")
    (tmp_path / "source" / "held_out" / "c.ds").write_bytes(b"56")
    where = runfile.DataUrl(url=f"file://{tmp_path}/source")
    (tmp_path / "out").mkdir()
    fetched = sources.fetch(where, tmp_path / "out", options(tmp_path / "store"))
    assert [file.name for file in fetched.files] == ["a.ds", "b.ds", "held_out/c.ds"]
    assert fetched.warnings == ()


def test_a_file_that_changed_since_it_was_listed_is_refused(bucket, tmp_path):
    bucket.objects |= {"a/0.ds": b"1234"}
    where = runfile.DataUrl(url="s3://ours/a")
    listing = url.listing(where, options(tmp_path).network)
    bucket.objects["a/0.ds"] = b"5678"
    with pytest.raises(LockstepError, match="expected .* as listed; run again"):
        fetching.fetch(listing, tmp_path, options(tmp_path / "store"))


def test_a_file_that_changes_between_two_requests_is_refused(bucket, tmp_path, monkeypatch):
    """A piece counts only if the version is still the listed one after it was read."""
    monkeypatch.setattr(fsspec_files, "REQUEST_BYTES", 4)
    bucket.objects |= {"a/0.ds": b"12345678"}
    listing = url.listing(runfile.DataUrl(url="s3://ours/a"), options(tmp_path).network)
    origin, network = listing.files[0].origin, options(tmp_path).network
    pieces = fsspec_files.read(origin, 0, 8, network, is_rest=False)
    assert next(pieces) == b"1234"
    bucket.objects["a/0.ds"] = b"abcdefgh"
    with pytest.raises(LockstepError, match="as listed; run again"):
        next(pieces)
    with pytest.raises(LockstepError, match="does not say of which version"):
        unnamed = origin.model_copy(update={"tag": None})
        next(fsspec_files.read(unnamed, 0, 8, network, is_rest=False))


def test_no_such_bucket_and_a_wrong_key_are_one_line(bucket, tmp_path, monkeypatch):
    assert refusal("s3://theirs/a", tmp_path).startswith("s3://theirs/a: ")
    bucket.objects |= {"a/0.ds": b"1234"}
    fsspec_files.file_system.cache_clear()
    bucket.key = "AKIAOTHER"
    message = refusal("s3://ours/a", tmp_path)
    assert message.startswith("s3://ours/a: ") and "expected a readable folder or file" in message
    assert bucket.secret not in message


def test_addresses_of_other_locations_are_sent_there_and_an_unknown_kind_is_refused(tmp_path):
    assert "expected Http for it" in refusal("https://example.org/a.ds", tmp_path)
    assert "expected Hub for it" in refusal("hf://datasets/a/b", tmp_path)
    assert "expected Local for it" in refusal("/a/folder", tmp_path)
    message = refusal("nonsense://place", tmp_path)
    assert message.startswith("nonsense://place: ") and message.endswith(
        "expected an address of fsspec"
    )


def test_without_the_extra_the_command_that_installs_it_is_said(tmp_path, monkeypatch):
    fsspec_files.file_system.cache_clear()

    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    message = refusal("s3://ours/a", tmp_path)
    assert message.startswith("s3://ours: s3fs ") and "[s3]" in message
