"""The store itself, whatever is fetched into it."""

import pytest

from pipeline.errors import LockstepError
from pipeline.net import store
from pipeline.net.remote import Origin
from pipeline.runfile import Network
from pipeline.stage.progress import Progress
from tests.servers.files import Files

NETWORK = Network(connections=1, attempts=1)


def fetch(files: Files, folder, name: str = "a.ds") -> store.Stored:
    size = len(files.files[name])
    origin = Origin(url=files.url(name), size=size, tag=files.tags[name])
    with Progress("fetch", total=size, unit="byte") as bar:
        return store.fetch([store.Transfer(name, origin, size)], folder, NETWORK, bar)[0]


@pytest.mark.parametrize("suffix", ["whole", "part"])
def test_a_link_in_the_store_is_neither_read_nor_written_through(tmp_path, suffix):
    with Files({"a.ds": b"1234"}).serving() as files:
        first = fetch(files, tmp_path / "store").path
        (tmp_path / "ours").write_bytes(b"1234" if suffix == "whole" else b"12")
        first.unlink()
        link = first if suffix == "whole" else first.with_suffix(".part")
        link.symlink_to(tmp_path / "ours")
        if suffix == "whole":
            assert not fetch(files, tmp_path / "store").path.is_symlink()
        else:
            with pytest.raises(LockstepError, match="expected to write there"):
                fetch(files, tmp_path / "store")
    assert (tmp_path / "ours").read_bytes() == (b"1234" if suffix == "whole" else b"12")
