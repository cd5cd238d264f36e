"""A bucket that speaks as much of S3 as s3fs asks for: listings, and files by range.

And as volunteers ask: it puts on a condition, and checks signatures of addresses as botocore does.
"""

import hashlib
import hmac
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import quote, urlsplit
from xml.sax.saxutils import escape

import pytest

from pipeline.net import fsspec_files
from tests.servers import web

PAGE = 2  # entries of a listing; the real one has a thousand
THEN = datetime(2026, 1, 15, 10, 30, tzinfo=UTC).timestamp()  # of what no client put
WEEK = 7 * 24 * 3600


@dataclass
class S3(web.Served):
    """One bucket.

    Attributes:
      name: its name.
      objects: content by key.
      times: when each was put, in seconds with a fraction, as Ceph lists it.
      key: of who may read, as its clients sign with it.
      public: whether anybody may read, but not list, as on AWS: who asks for what is not there
        then hears 403.
      keeps: whether the condition is kept on which nothing is put over an object.
    """

    name: str = "ours"
    objects: dict[str, bytes] = field(default_factory=dict)
    key: str = "AKIASENTINEL"
    secret: str = "s3-secret-sentinel"
    times: dict[str, float] = field(default_factory=dict)
    public: bool = False
    keeps: bool = True

    def put(self, key: str, content: bytes, *, only_new: bool = False) -> bool:
        """Puts an object; whether it did."""
        with self.lock:
            if only_new and self.keeps and key in self.objects:
                return False
            self.objects[key], self.times[key] = content, time.time()
            return True


def use(address: str, key: str, secret: str, patch: pytest.MonkeyPatch) -> None:
    """Has clients take an address for S3, here and in processes."""
    fsspec_files.file_system.cache_clear()  # of another server's address
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ACCESS_KEY_ID", key)
    patch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        patch.delenv(name, raising=False)


@contextmanager
def running_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket that clients take for S3, here and in processes."""
    with S3().serving() as bucket:
        use(bucket.address, bucket.key, bucket.secret, monkeypatch)
        yield bucket


@contextmanager
def running_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store as others made it, for what this one does not speak: moto; its address."""
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


class _Handler(web.Handler):
    served: S3

    def asked(self) -> str | None:
        """The key that is asked for, "" for a listing; None if this was refused."""
        bucket, said = self.served, self.headers.get("Authorization")
        bucket.seen.append((self.command, self.path, said))
        name, _, key = self.place.removeprefix("/").partition("/")
        reads = self.command in ("GET", "HEAD") and bool(key)
        if "X-Amz-Signature" in self.query:
            why = self.wrong_signature()
        elif bucket.public and reads:
            why = "" if key in bucket.objects else "Access Denied"
        else:
            by_key = re.match(rf"AWS4-HMAC-SHA256 Credential={bucket.key}/", said or "")
            why = "" if by_key else "Access Denied"
        if why:
            self.refuse(403, "AccessDenied", why)
        elif name != bucket.name:
            self.refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        else:
            return key
        return None

    def wrong_signature(self) -> str:
        """Why the address's signature does not hold, by botocore's own SigV4; "" if it does."""
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        query, bucket = self.query, self.served
        begun = datetime.strptime(query["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        if int(query["X-Amz-Expires"]) > WEEK:
            return "X-Amz-Expires must be less than a week (in seconds)"
        if time.time() > begun.timestamp() + int(query["X-Amz-Expires"]):
            return "Request has expired"
        key, _, region, _, _ = query["X-Amz-Credential"].split("/")
        signer = S3SigV4QueryAuth(Credentials(bucket.key, bucket.secret), "s3", region)
        names = query["X-Amz-SignedHeaders"].split(";")
        said = {name: self.headers[name] for name in names if self.headers[name] is not None}
        parts = urlsplit(self.path)
        kept = "&".join(p for p in parts.query.split("&") if not p.startswith("X-Amz-Signature="))
        url = f"{bucket.address}{parts.path}?{kept}"
        request = AWSRequest(self.command, url, headers=said)
        request.context["timestamp"] = query["X-Amz-Date"]
        text = signer.string_to_sign(request, signer.canonical_request(request))
        right = hmac.compare_digest(signer.signature(text, request), query["X-Amz-Signature"])
        same_names = len(said) == len(names) and key == bucket.key
        return "" if right and same_names else "The request signature does not match"

    def do_PUT(self) -> None:
        content = self.body()
        if key := self.asked():
            only_new = self.headers.get("If-None-Match") == "*"
            if self.served.put(key, content, only_new=only_new):
                self.answer(200, ETag=_tag(content))
            else:
                self.refuse(412, "PreconditionFailed", "At least one condition did not hold")

    def do_DELETE(self) -> None:
        if key := self.asked():
            self.served.objects.pop(key, None)
            self.answer(204)

    def do_GET(self) -> None:
        bucket, key = self.served, self.asked()
        if key is None:
            return
        if not key:
            self.list()
        elif key not in bucket.objects:
            self.refuse(404, "NoSuchKey", "The specified key does not exist.")
        else:
            content = bucket.objects[key]
            kind = "application/octet-stream"
            tag, date = _tag(content), formatdate(bucket.times.get(key, THEN), usegmt=True)
            self.send_file(key, content, ETag=tag, Last_Modified=date, Content_Type=kind)

    do_HEAD = do_GET

    def refuse(self, status: int, code: str, words: str) -> None:
        said = f"<Error><Code>{code}</Code><Message>{words}</Message></Error>"
        self.answer(status, said.encode(), Content_Type="application/xml")

    def list(self) -> None:
        """ListObjectsV2."""
        query = self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after, objects = query.get("start-after", ""), self.served.objects
        keys = [key for key in list(objects) if key.startswith(prefix) and key > after]
        ends = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in keys}
        entries = {key if end < 0 else key[: end + 1]: end < 0 for key, end in ends.items()}
        names = sorted(entries)
        start = int(query.get("continuation-token", 0))
        end = start + min(PAGE, int(query.get("max-keys", PAGE)))
        lines = [f"<Name>{self.served.name}</Name><Prefix>{_text(prefix)}</Prefix>"]
        lines.append("<EncodingType>url</EncodingType>")
        for name in names[start:end]:
            if entries[name]:
                content, at = objects[name], self.served.times.get(name, THEN)
                date = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3]
                lines.append(
                    f"<Contents><Key>{_text(name)}</Key><Size>{len(content)}</Size>"
                    f"<ETag>{escape(_tag(content))}</ETag><LastModified>{date}Z</LastModified>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
            else:
                lines.append(f"<CommonPrefixes><Prefix>{_text(name)}</Prefix></CommonPrefixes>")
        more = end < len(names)
        lines.append(f"<KeyCount>{len(names[start:end])}</KeyCount>")
        lines.append(f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>")
        if more:
            lines.append(f"<NextContinuationToken>{end}</NextContinuationToken>")
        page = f"<ListBucketResult>{''.join(lines)}</ListBucketResult>"
        self.answer(200, page.encode(), Content_Type="application/xml")


S3.handler = _Handler


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _text(name: str) -> str:
    """A name as `encoding-type=url` has it, for which every client asks; XML has no \\x01."""
    return quote(name, safe="/")
