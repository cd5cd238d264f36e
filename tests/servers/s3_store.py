"""An S3 store as others made it: moto, on the loopback interface, for what s3.py does not speak."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.net import fsspec_files
from tests.servers.s3 import use


@contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that clients take for S3, here and in processes; its address."""
    from moto.server import ThreadedMotoServer  # only here: every worker imports every test

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    use(address, "any", "s3-secret-sentinel", monkeypatch)
    try:
        yield address
    finally:
        server.stop()
        fsspec_files.file_system.cache_clear()
