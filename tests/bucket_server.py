"""A bucket that speaks as much of Google's JSON API as its client asks for, with versions."""

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import google_crc32c

from tests import web

PAGE = 2  # entries of a listing; the real one has a thousand


@dataclass
class Object:
    """One version of a file."""

    name: str
    generation: int
    content: bytes
    encoding: str | None = None

    def resource(self) -> dict:
        crc32c = google_crc32c.Checksum(self.content).digest()
        said = {
            "kind": "storage#object",
            "name": self.name,
            "generation": str(self.generation),
            "size": str(len(self.content)),
            "crc32c": base64.b64encode(crc32c).decode(),
            "md5Hash": base64.b64encode(hashlib.md5(self.content).digest()).decode(),
        }
        return said | ({"contentEncoding": self.encoding} if self.encoding else {})


@dataclass
class Bucket:
    """One bucket.

    Attributes:
      name: its name.
      versioned: whether it keeps what is overwritten.
      objects: each file's versions, oldest first.
      seen: what was asked: method, path and query, Authorization.
      sent: bytes of the bodies of downloads, by name.
      claims: entries of the metadata that the server gets wrong, by name.
      spoil: what is done to the body of a download, by name.
      refuse: answers requests whose method and path match: (pattern, status); with the request's
        own Authorization in its words.
      before_upload: called with the name of each file that is about to be stored.
      token: what a service account gets.
      address: of the server.
    """

    name: str = "ours"
    versioned: bool = True
    objects: dict[str, list[Object]] = field(default_factory=dict)
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)
    claims: dict[str, dict] = field(default_factory=dict)
    spoil: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)
    refuse: tuple[str, int] | None = None
    before_upload: Callable[[str], None] = lambda name: None
    token: str = "ya29.sentinel"
    address: str = ""
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
    def serving(self) -> Iterator["Bucket"]:
        handler = type("Bound", (_Handler,), {"bucket": self})
        with web.serving(handler) as self.address:
            yield self


class _Handler(web.Handler):
    bucket: Bucket

    def do_GET(self) -> None:
        bucket, query = self.bucket, self.query
        if self.refused():
            return
        base = re.escape(f"/storage/v1/b/{bucket.name}/o")
        if re.fullmatch(base, self.place):
            self.list()
        elif found := re.fullmatch(f"(/download)?{base}/(.+)", self.place, re.DOTALL):
            stored = bucket.find(found[2], query.get("generation"))
            if stored is None:
                self.answer(404, {"error": {"code": 404, "message": f"No such object: {found[2]}"}})
            elif found[1]:
                self.send_content(stored)
            else:
                self.answer(200, stored.resource() | bucket.claims.get(stored.name, {}))
        else:
            self.answer(404, {"error": {"code": 404, "message": "The bucket does not exist."}})

    def list(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        names = [name for name in sorted(self.bucket.objects) if name.startswith(prefix)]
        if delimiter:
            names = [name for name in names if delimiter not in name.removeprefix(prefix)]
        start = int(self.query.get("pageToken", 0))
        page = names[start : start + PAGE]
        items = [
            self.bucket.find(name, None).resource() | self.bucket.claims.get(name, {})
            for name in page
        ]
        more = {"nextPageToken": str(start + PAGE)} if start + PAGE < len(names) else {}
        self.answer(200, {"kind": "storage#objects", "items": items} | more)

    def send_content(self, stored: Object) -> None:
        content, headers, status = stored.content, {}, 200
        if found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(found[1])
            status = 206
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            content = content[start:]
        whole = len(content)
        content = self.bucket.spoil.get(stored.name, bytes)(content)
        self.bucket.sent[stored.name] = self.bucket.sent.get(stored.name, 0) + len(content)
        headers["X_Goog_Generation"] = str(stored.generation)
        if len(content) < whole:
            headers["Content_Length"] = str(whole)
        self.answer(status, content, **headers)

    def do_POST(self) -> None:
        body = self.body()
        if self.refused():
            return
        if self.place == "/token":
            self.answer(200, {"access_token": self.bucket.token, "expires_in": 3600})
        elif self.query.get("uploadType") == "multipart":
            self.store(*_parts(body, self.headers["Content-Type"]), self.query)
        elif self.query.get("uploadType") == "resumable":
            upload = str(len(self.bucket.uploads))
            self.bucket.uploads[upload] = {"about": json.loads(body), "query": self.query}
            self.bucket.uploads[upload]["content"] = b""
            where = f"{self.bucket.address}/upload/{upload}?upload_id={upload}"
            self.answer(200, Location=where)
        else:
            self.answer(404, {})

    def do_PUT(self) -> None:
        body = self.body()
        if self.refused():
            return
        upload = self.bucket.uploads[self.query["upload_id"]]
        upload["content"] += body
        total = self.headers["Content-Range"].rpartition("/")[2]
        if str(len(upload["content"])) == total:
            self.store(upload["about"], upload["content"], upload["query"])
        else:
            self.answer(308, Range=f"bytes=0-{len(upload['content']) - 1}")

    def store(self, about: dict, content: bytes, query: dict[str, str]) -> None:
        bucket, name = self.bucket, about["name"]
        bucket.before_upload(name)
        now = bucket.find(name, None)
        if int(query.get("ifGenerationMatch", -1)) not in (-1, now.generation if now else 0):
            said = "At least one of the pre-conditions you specified did not hold."
            self.answer(412, {"error": {"code": 412, "message": said}})
            return
        if "crc32c" in about:
            expected = Object(name, 0, content).resource()["crc32c"]
            assert about["crc32c"] == expected, "the client hashes what it sends"
        bucket.put(name, content)
        self.answer(200, bucket.find(name, None).resource())

    def refused(self) -> bool:
        said = self.headers.get("Authorization")
        self.bucket.seen.append((self.command, self.path, said))
        refuse = self.bucket.refuse
        if refuse is None or not re.search(refuse[0], f"{self.command} {self.path}"):
            return False
        words = f"we do not like {said}, that is {(said or 'x').split()[-1]}"
        self.answer(refuse[1], {"error": {"code": refuse[1], "message": words}})
        return True


def _parts(body: bytes, kind: str) -> tuple[dict, bytes]:
    """The two parts of a multipart/related body: JSON, and the file."""
    boundary = re.search(r'boundary="?([^";]+)', kind)[1].encode().strip(b"'")
    first, second = body.split(b"--" + boundary)[1:3]
    about = first.split(b"\r\n\r\n", 1)[1]
    content = second.split(b"\r\n\r\n", 1)[1].removesuffix(b"\r\n")
    return json.loads(about), content
