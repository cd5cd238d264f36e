"""Folders of others: no link leads out, nothing but files is in them, and none changes unseen."""

import os
import time
from pathlib import Path

import pytest

from pipeline.stage import untrusted_files
from pipeline.stage.untrusted_files import YAML_LENGTH, load_yaml
from tests.errors import check_names, refused
from tests.pipeline.sources.options import refusal


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_text("ours")
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "a").write_text("theirs")
    return tmp_path / "given"


@pytest.mark.parametrize("target", ["../secret", "../../../../etc/passwd", "below/secret"])
def test_a_link_that_leads_out_is_refused_however_it_leads_there(folder, target):
    (folder / "below").symlink_to("..")
    (folder / "link").symlink_to(target)
    said = refusal(untrusted_files.check_inside, folder / "link", folder)
    real = os.path.realpath(folder / "link")
    check_names(said, folder / "link", real)


def test_a_link_within_the_folder_is_followed_also_where_the_folder_is_a_link(folder, tmp_path):
    (folder / "link").symlink_to("a")
    (tmp_path / "other").symlink_to(folder)
    for root in (folder, tmp_path / "other"):
        untrusted_files.check_inside(root / "link", root)


@pytest.mark.parametrize(("repository", "fits"), [("models--a--b", True), ("elsewhere", False)])
@pytest.mark.parametrize("below", ["", "data"])
def test_a_snapshot_of_the_hubs_cache_may_lead_to_its_blobs(tmp_path, repository, fits, below):
    blobs, snapshot = (
        tmp_path / repository / "blobs",
        tmp_path / repository / "snapshots" / "c0ffee",
    )
    (snapshot / "data").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_text("weights")
    (tmp_path / "secret").write_text("ours")
    (blobs / "5678").symlink_to(tmp_path / "secret")
    (snapshot / below / "good").symlink_to(blobs / "1234")
    (snapshot / below / "bad").symlink_to(blobs / "5678")
    assert untrusted_files.is_inside(snapshot / below / "good", snapshot / below) is fits
    assert not untrusted_files.is_inside(snapshot / below / "bad", snapshot / below)


def test_a_folder_of_a_stranger_holds_files_and_folders_alone(folder):
    untrusted_files.check_regular(folder)
    os.mkfifo(folder / "pipe")
    assert "pipe: not a regular file" in refusal(untrusted_files.check_regular, folder)
    (folder / "pipe").unlink()
    (folder / "link").symlink_to("../secret")
    assert "link: a link to " in refusal(untrusted_files.check_regular, folder)


def test_the_home_of_nobody_is_one_line(monkeypatch):
    monkeypatch.setenv("HOME", "/home/us")
    assert str(untrusted_files.expand("~/x", "a.key")) == "/home/us/x"
    said = refusal(untrusted_files.expand, "~nosuchuser/x", "a.key")
    check_names(said, "a.key", "~nosuchuser/x")


def rewritten(path: Path) -> None:
    """Other bytes of the same size, and the old time of the last change."""
    times = path.stat()
    path.write_bytes(b"b")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced(path: Path) -> None:
    """Another file of the same size and time."""
    other, times = path.with_name("other"), path.stat()
    other.write_bytes(b"b")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [rewritten, replaced])
def test_a_change_that_keeps_size_and_time_is_noticed(tmp_path, change):
    path = tmp_path / "a"
    path.write_bytes(b"a")
    time.sleep(0.02)  # a file system's clock may be that coarse
    with untrusted_files.unchanged([path]):
        path.read_bytes()
    with refused(path, "changed while it was read"), untrusted_files.unchanged([path]):
        change(path)


BOMBS = ["\n" * 60_000_000, " " * 2**20 + "a", "a: " + "1:" * 500_000 + "1", f"a: 0x{'f' * 5000}"]
BOMBS += [f"a: !!int '{'1' * 500}'", f"a: -{'1' * 500}.0", f"{'1' * 500}: a"]


@pytest.mark.parametrize("text", BOMBS, ids=len)
def test_yaml_of_blanks_or_of_one_number_is_refused_before_it_is_parsed(text):
    with refused("a.yaml", "expected"):
        load_yaml(text, "a.yaml")


@pytest.mark.parametrize("text", ["'{}'", '"{}"', "|-\n  {}", "!!str {}", "{} x", "x{}", "0b{}8"])
def test_a_long_string_of_digits_is_no_number(text):
    assert "1" * 500 in load_yaml(f"a: {text.format('1' * 500)}", "a.yaml")["a"]


def test_yaml_may_be_as_long_as_its_bound():
    assert load_yaml("\n" * (YAML_LENGTH - 4) + "a: 1", "a.yaml") == {"a": 1}
