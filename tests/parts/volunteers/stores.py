"""Stores of each kind on the loopback interface, and what reads and writes in them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from parts.volunteers.keys import PrivateKey
from parts.volunteers.store.addresses import AddressReader
from parts.volunteers.store.folder import FolderStore
from parts.volunteers.store.schemes import open_store
from parts.volunteers.store.verbs import Store
from pipeline.net import fsspec_files
from pipeline.net.limits import NetSettings
from tests.servers import s3
from tests.servers.s3 import S3, running_s3, running_store

SOON = NetSettings(attempts=3, stall_seconds=0.5)  # gives up soon
BUCKET, RUN = "ours", "a run"


OF_RUN = {"config": {"total_steps": 90}, "witness": {"snapshot_every": 3, "keep_every": 1}}


def reader(key: PrivateKey, **changes: object) -> AddressReader:
    """Who has slot 7 of a run of 16."""
    given = {"slots": 16, "payload_bytes": 5000, "own_bytes": 0, "state_bytes": 0, "run": OF_RUN}
    document = SimpleNamespace(**given | changes)
    return AddressReader(7, key.public_key(), "ab" * 32, document)


@contextmanager
def opened(
    kind: str, folder: Path, patch: pytest.MonkeyPatch, address: str = ""
) -> Iterator[Store]:
    """A store: "folder"; "moto"; this project's server as "s3"; "ceph" at `address`."""
    if kind == "folder":
        yield open_store(f"file://{folder}")
        return
    servers = {"moto": running_store, "s3": running_s3}
    with _ceph(patch, address) if kind == "ceph" else servers[kind](patch):
        run = RUN
        if kind != "s3":  # others keep what another test put
            run = f"{RUN} {uuid4()}"
            with suppress(FileExistsError):
                fsspec_files.find_file_system(f"s3://{BUCKET}")[0].mkdir(BUCKET)
        yield open_store(f"s3://{BUCKET}/{run}", SOON)


def put_at(store: FolderStore, name: str, content: bytes, seconds: int) -> None:
    """Put an object in a folder, at a time of its clock."""
    assert store.create(name, content)
    os.utime(store.root / name, (seconds, seconds))


def without_credentials(patch: pytest.MonkeyPatch) -> None:
    """Have this process know no credentials of a store, nor where one is."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        patch.delenv(name)


@contextmanager
def running_public(patch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A bucket that anybody may read, with pages as long as the real one's."""
    patch.setattr(s3, "PAGE", 1000)
    with running_s3(patch) as bucket:
        bucket.public = True
        yield bucket


@contextmanager
def _ceph(patch: pytest.MonkeyPatch, address: str) -> Iterator[None]:
    s3.use(address, "any", "secret", patch)
    yield
    fsspec_files.file_system.cache_clear()
