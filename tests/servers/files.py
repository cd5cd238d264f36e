"""A plain web server: files by their paths, and nothing else."""

import hashlib
import mmap
from base64 import b64encode
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import web


@dataclass
class Files(web.Served):
    """Files on a web server.

    Attributes:
      files: content by path, "data/a.ds"; `put` sets one.
      user: "name:password" of who may read; None: anybody may.
      kind: Content-Type of all files.
    """

    files: dict[str, bytes | memoryview] = field(default_factory=dict)
    user: str | None = None
    kind: str = "application/octet-stream"
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, content in list(self.files.items()):
            self.put(name, content)

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Stores a file, in place of another of that name."""
        self.files[name] = content
        self.tags[name] = f'"{hashlib.sha1(content).hexdigest()[:16]}"'

    def add(self, folder: Path) -> None:
        """Stores what lies below a folder, mapped, by its path in it."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.put(path.relative_to(folder).as_posix(), memoryview(mapped))

    def url(self, name: str) -> str:
        """The address of a file."""
        return f"{self.address}/{name}"


class _Handler(web.Handler):
    def do_GET(self) -> None:
        files, name = self.served, self.place.removeprefix("/")
        said = self.headers.get("Authorization")
        if self.refused():
            return
        if files.user is not None and said != f"Basic {b64encode(files.user.encode()).decode()}":
            self.say(401, "we do not know you")
        elif name not in files.files:
            self.say(404, "no such file")
        else:
            self.send_file(name, files.files[name], Content_Type=files.kind, ETag=files.tags[name])

    do_HEAD = do_GET


Files.handler = _Handler
