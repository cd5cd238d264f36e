"""A bucket that speaks as much of S3 as s3fs asks for: listings, and files by range."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote
from xml.sax.saxutils import escape

import pytest

from pipeline.net import fsspec_files
from tests.servers import web

PAGE = 2  # entries of a listing; the real one has a thousand
DATE = "2026-01-15T10:30:00.000Z"
HTTP_DATE = "Thu, 15 Jan 2026 10:30:00 GMT"


@dataclass
class S3(web.Served):
    """One bucket.

    Attributes:
      name: its name.
      objects: content by key.
      key: of who may read, as its clients sign with it.
    """

    name: str = "ours"
    objects: dict[str, bytes] = field(default_factory=dict)
    key: str = "AKIASENTINEL"
    secret: str = "s3-secret-sentinel"


@contextmanager
def running_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """An empty bucket that clients take for S3, here and in processes."""
    fsspec_files.file_system.cache_clear()  # of another server's address
    with S3().serving() as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.address)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket.secret)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield bucket


class _Handler(web.Handler):
    served: S3

    def do_GET(self) -> None:
        bucket, said = self.served, self.headers.get("Authorization")
        bucket.seen.append((self.command, self.path, said))
        name, _, key = self.place.removeprefix("/").partition("/")
        if not re.match(rf"AWS4-HMAC-SHA256 Credential={bucket.key}/", said or ""):
            self.refuse(403, "AccessDenied", "Access Denied")
        elif name != bucket.name:
            self.refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        elif not key:
            self.list()
        elif key not in bucket.objects:
            self.refuse(404, "NoSuchKey", "The specified key does not exist.")
        else:
            content = bucket.objects[key]
            kind = "application/octet-stream"
            tag, date = _tag(content), HTTP_DATE
            self.send_file(key, content, ETag=tag, Last_Modified=date, Content_Type=kind)

    do_HEAD = do_GET

    def refuse(self, status: int, code: str, words: str) -> None:
        said = f"<Error><Code>{code}</Code><Message>{words}</Message></Error>"
        self.answer(status, said.encode(), Content_Type="application/xml")

    def list(self) -> None:
        """ListObjectsV2."""
        query = self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = [key for key in self.served.objects if key.startswith(prefix)]
        ends = {key: key.find(delimiter, len(prefix)) if delimiter else -1 for key in keys}
        entries = {key if end < 0 else key[: end + 1]: end < 0 for key, end in ends.items()}
        names = sorted(entries)
        start = int(query.get("continuation-token", 0))
        end = start + min(PAGE, int(query.get("max-keys", PAGE)))
        lines = [f"<Name>{self.served.name}</Name><Prefix>{_text(prefix)}</Prefix>"]
        lines.append("<EncodingType>url</EncodingType>")
        for name in names[start:end]:
            if entries[name]:
                content = self.served.objects[name]
                lines.append(
                    f"<Contents><Key>{_text(name)}</Key><Size>{len(content)}</Size>"
                    f"<ETag>{escape(_tag(content))}</ETag><LastModified>{DATE}</LastModified>"
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
