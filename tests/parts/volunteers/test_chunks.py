"""A state in chunks: nothing false is read, and nothing is read twice."""

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.transcript.trees import load_arrays, save_tree
from parts.volunteers import layout
from parts.volunteers.store import chunks
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.training.states import States
from tests.parts.volunteers.test_links import link

TREE = {"params": {"w": np.arange(1000, dtype=np.float32)}, "shared": {"n": np.int32(7)}}


class Counting(FolderStore):
    """A folder that counts what is read of it."""

    read: list[str] = []

    def look(self, name, most):
        self.read.append(name)
        return super().look(name, most)


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A store with a state in chunks of 512 bytes, its folder there, and the name of its index."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 512)
    monkeypatch.setattr(Counting, "read", [])
    save_tree(path := tmp_path / "state.safetensors", TREE)
    store, sha256 = Counting(tmp_path / "store"), chunks.name_of(chunks.index_of(path))
    folder = layout.state_folder(100, 7)
    chunks.put(store, folder, path)
    return store, folder, sha256


def test_a_state_is_read_back_and_its_name_is_that_of_its_arrays(there, tmp_path):
    store, folder, sha256 = there
    chunks.fetch(store, folder, sha256, path := tmp_path / "new" / "state")
    np.testing.assert_array_equal(load_arrays(path)["params/w"], TREE["params"]["w"])
    assert [entry.name for entry in path.parent.iterdir()] == ["state"]
    save_tree(again := tmp_path / "again", TREE)
    assert chunks.name_of(chunks.index_of(again)) == sha256
    chunks.put(store, folder, again)  # who was killed puts it again


def test_who_was_cut_off_reads_the_rest_alone(there, tmp_path):
    store, folder, sha256 = there
    lost = store.root / f"{folder}0005"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(LockstepError, match="/0005: found nothing, expected a part of a file"):
        chunks.fetch(store, folder, sha256, path := tmp_path / "state")
    assert not path.exists()
    lost.write_bytes(content)
    store.read.clear()
    chunks.fetch(store, folder, sha256, path)
    assert len(load_arrays(path)) == 2
    assert f"{folder}0005" in store.read and f"{folder}0000" not in store.read


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("0003", lambda c: c[:9] + b"x" + c[10:], "/0003: SHA-256"),
        ("0003", lambda c: c[:-1], "/0003: SHA-256"),
        ("0003", lambda c: c + b"x", "/0003: over 512 bytes"),
        ("index", lambda c: c.replace(b"chunks", b"chunkz"), "/index: SHA-256"),
        ("index", lambda c: bytes(2**20 + 1), "/index: over 1048576 bytes"),
    ],
)
def test_a_changed_object_is_refused_by_its_name(there, tmp_path, name, change, why):
    store, folder, sha256 = there
    path = store.root / f"{folder}{name}"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(LockstepError, match=why):
        chunks.fetch(store, folder, sha256, tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_an_index_of_another_number_of_chunks_is_refused(there, tmp_path):
    store, _, _ = there
    index = chunks.ChunkIndex(bytes=2**40, chunks=("ab" * 32,))
    name = f"states/00000100/{chunks.name_of(index)}/"
    store.create(f"{name}index", chunks.canonical(index.model_dump(mode="json")))
    with pytest.raises(LockstepError, match="1099511627776 bytes in 1 chunks, expected chunks of"):
        chunks.fetch(store, name, chunks.name_of(index), tmp_path / "state")


def test_a_state_has_the_one_size_of_the_run(there, tmp_path):
    """A link can name an index of any chunks, and so cost a reader its disk."""
    store, _, _ = there
    zeros = hashlib.sha256(bytes(512)).hexdigest()
    index = chunks.ChunkIndex(bytes=512 * 9000, chunks=(zeros,) * 9000)
    said = link({}, state=chunks.name_of(index))
    folder = layout.state_folder(said.round, said.peer)
    store.create(f"{folder}index", chunks.canonical(index.model_dump(mode="json")))
    states = States(store, SimpleNamespace(state_bytes=4096), tmp_path)
    with pytest.raises(LockstepError, match="4608000 bytes, expected at most 4096"):
        states.fetch(said, {}, {})


def test_a_file_where_other_bytes_stand_is_not_put(there, tmp_path):
    store, folder, _ = there
    Path(tmp_path / "other").write_bytes(b"x")
    with pytest.raises(LockstepError, match="/0000: has other bytes, expected those of other"):
        chunks.put(store, folder, tmp_path / "other")
