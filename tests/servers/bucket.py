"""A bucket that speaks as much of Google's JSON API as its client asks for, with versions."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import google_crc32c
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from pipeline.net import google
from tests.servers import web

PAGE = 2  # entries of a listing; the real one has a thousand


@dataclass
class Object:
    """One version of a file."""

    name: str
    generation: int
    content: bytes
    encoding: str | None = None

    @cached_property
    def hashes(self) -> tuple[str, str]:
        """Its CRC32C and its MD5."""
        digests = google_crc32c.Checksum(self.content).digest(), hashlib.md5(self.content).digest()
        return tuple(base64.b64encode(digest).decode() for digest in digests)

    def resource(self) -> dict:
        crc32c, md5 = self.hashes
        said = {
            "name": self.name,
            "generation": str(self.generation),
            "size": str(len(self.content)),
            "crc32c": crc32c,
            "md5Hash": md5,
        }
        return said | ({"contentEncoding": self.encoding} if self.encoding else {})


@dataclass
class Bucket(web.Served):
    """One bucket.

    Attributes:
      name: its name.
      versioned: whether it keeps what is overwritten.
      private: whether who reads must say the token.
      objects: each file's versions, oldest first.
      claims: entries of the metadata that the server gets wrong, by name.
      before_upload: called with the name of each file that is about to be stored.
      token: what a service account gets.
    """

    name: str = "ours"
    versioned: bool = True
    private: bool = False
    objects: dict[str, list[Object]] = field(default_factory=dict)
    claims: dict[str, dict] = field(default_factory=dict)
    before_upload: Callable[[str], None] = lambda name: None
    token: str = "ya29.sentinel"
    generation: int = 1_700_000_000_000_000
    uploads: dict[str, dict] = field(default_factory=dict)

    def put(self, name: str, content: bytes, encoding: str | None = None) -> int:
        """Stores a new version; its generation."""
        self.generation += 1
        versions = self.objects.setdefault(name, [])
        if not self.versioned:
            versions.clear()
        versions.append(Object(name, self.generation, content, encoding))
        return self.generation

    def find(self, name: str, generation: str | None) -> Object | None:
        versions = self.objects.get(name, [])
        if generation is None:
            return versions[-1] if versions else None
        return next((o for o in versions if o.generation == int(generation)), None)

    def live(self) -> dict[str, bytes]:
        return {name: versions[-1].content for name, versions in self.objects.items()}


@contextmanager
def running_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket that clients take for Google's, here and in processes; no credentials."""
    monkeypatch.delenv(google.KEY_VARIABLE, raising=False)
    with Bucket().serving() as bucket:
        monkeypatch.setenv(google.EMULATOR, bucket.address)
        yield bucket


@lru_cache
def _private_key() -> str:
    """One for all, since to make one takes a while."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, *form).decode()


def use_account(file: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes a service account of Google's kind, and names it in the environment.

    Args:
      file: where to.
      address: of the server that gives out its tokens.
      monkeypatch: takes it back.
    """
    # the library asks another server of Google's where the account may be used
    monkeypatch.setattr(
        "google.auth._regional_access_boundary_utils._RegionalAccessBoundaryManager"
        ".maybe_start_refresh",
        lambda *_: None,
    )
    account = {
        "type": "service_account",
        "project_id": "p",
        "private_key_id": "1",
        "private_key": _private_key(),
        "client_email": "us@example.org",
        "client_id": "1",
        "token_uri": f"{address}/token",
    }
    file.write_text(json.dumps(account))
    monkeypatch.setenv(google.KEY_VARIABLE, str(file))


class _Handler(web.Handler):
    served: Bucket

    def do_GET(self) -> None:
        bucket, query = self.served, self.query
        if self.refused():
            return
        base = re.escape(f"/storage/v1/b/{bucket.name}/o")
        if re.fullmatch(base, self.place):
            self.list()
        elif found := re.fullmatch(f"(/download)?{base}/(.+)", self.place, re.DOTALL):
            stored = bucket.find(found[2], query.get("generation"))
            if stored is None:
                self.say(404, f"No such object: {found[2]}")
            elif found[1] or query.get("alt") == "media":
                self.send_content(stored)
            else:
                self.answer(200, stored.resource() | bucket.claims.get(stored.name, {}))
        else:
            self.say(404, "The bucket does not exist.")

    def list(self) -> None:
        query = self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        names = [name for name in sorted(self.served.objects) if name.startswith(prefix)]
        if delimiter:
            names = [name for name in names if delimiter not in name.removeprefix(prefix)]
        start = int(query.get("pageToken", 0))
        end = start + min(PAGE, int(query.get("maxResults", PAGE)))
        items = [
            self.served.find(name, None).resource() | self.served.claims.get(name, {})
            for name in names[start:end]
        ]
        more = {"nextPageToken": str(end)} if end < len(names) else {}
        self.answer(200, _only({"items": items} | more, query.get("fields")))

    def send_content(self, stored: Object) -> None:
        said = self.served.claims.get(stored.name, {})
        crc32c, md5 = said.get("crc32c", stored.hashes[0]), said.get("md5Hash", stored.hashes[1])
        hashes = {"crc32c": crc32c, "md5": md5}
        headers = {
            "ETag": base64.b64encode(str(stored.generation).encode()).decode(),  # no quotes here
            "X_Goog_Generation": str(stored.generation),
            "X_Goog_Hash": ",".join(f"{kind}={value}" for kind, value in hashes.items() if value),
        }
        if stored.encoding:
            headers["Content_Encoding"] = stored.encoding
        self.send_file(stored.name, stored.content, **headers)

    def do_POST(self) -> None:
        body = self.body()
        if self.refused():
            return
        if self.place == "/token":
            self.answer(200, {"access_token": self.served.token, "expires_in": 3600})
        elif self.query.get("uploadType") == "resumable":
            upload = str(len(self.served.uploads))
            self.served.uploads[upload] = {"about": json.loads(body), "query": self.query}
            self.served.uploads[upload]["content"] = b""
            where = f"{self.served.address}/upload/{upload}?upload_id={upload}"
            self.answer(200, Location=where)
        else:
            self.answer(404, {})

    def do_PUT(self) -> None:
        body = self.body()
        if self.refused():
            return
        upload = self.served.uploads[self.query["upload_id"]]
        span, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
        if span != "*":
            upload["content"] = upload["content"][: int(span.partition("-")[0])] + body
        size = len(upload["content"])
        if "end" in upload:
            self.answer(*upload["end"])
        elif str(size) == total:
            upload["end"] = self.store(upload["about"], upload["content"], upload["query"])
            self.answer(*upload["end"])
        else:
            self.answer(308, **({"Range": f"bytes=0-{size - 1}"} if size else {}))

    def store(self, about: dict, content: bytes, query: dict[str, str]) -> tuple[int, dict]:
        """Stores a version, or none; the status and the answer."""
        bucket, name = self.served, about["name"]
        bucket.before_upload(name)
        now = bucket.find(name, None)
        if int(query.get("ifGenerationMatch", -1)) not in (-1, now.generation if now else 0):
            return 412, _error(412, "At least one of the pre-conditions did not hold.")
        expected = Object(name, 0, content).resource()["crc32c"]
        assert about["crc32c"] == expected, "the client hashes what it sends"
        bucket.put(name, content)
        return 200, bucket.find(name, None).resource()

    def refused(self) -> bool:
        if super().refused():
            return True
        said, bucket = self.headers.get("Authorization"), self.served
        if bucket.private and self.command == "GET" and said != f"Bearer {bucket.token}":
            self.say(401, "Anonymous caller does not have storage.objects.list access")
            return True
        return False

    def say(self, status: int, words: str) -> None:
        self.answer(status, _error(status, words))


Bucket.handler = _Handler


def _error(status: int, words: str) -> dict:
    return {"error": {"code": status, "message": words}}


def _only(page: dict, fields: str | None) -> dict:
    """What `fields=nextPageToken,items(name,size)` leaves of a page."""
    if fields is None:
        return page
    keys, _, each = fields.removesuffix(")").partition(",items(")
    items = [{k: v for k, v in item.items() if k in each.split(",")} for item in page["items"]]
    return {k: v for k, v in page.items() if k in keys.split(",")} | {"items": items}
