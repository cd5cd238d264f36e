"""An S3 store as others made it: moto, on the loopback interface, for what s3.py does not speak."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pipeline.net import fsspec_files


@contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that clients take for S3, here and in processes; its address."""
    from moto.server import ThreadedMotoServer  # only here: every worker imports every test

    fsspec_files.file_system.cache_clear()  # of another server's address
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "s3-secret-sentinel",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield environment["AWS_ENDPOINT_URL"]
    finally:
        server.stop()
        fsspec_files.file_system.cache_clear()
