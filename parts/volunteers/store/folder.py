"""A store in a folder of this machine, for people who trust each other: times can be forged."""

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import LockstepError, expecting
from parts.volunteers.store.verbs import MOST_NAMES, StoredObject, too_many
from pipeline.net.errors import check_name
from pipeline.stage.untrusted_files import walk

ASIDE = ".aside"  # where files are written, before they get their names


@dataclass(frozen=True)
class FolderStore:
    """A store in a folder; its file systems must have hard links, as those of Linux have."""

    root: Path

    @property
    def address(self) -> str:
        """Address of the store's folder."""
        return f"file://{self.root}"

    def create(self, name: str, content: bytes) -> bool:
        """Link a file to its name in the store's folder, which fails where there is one."""
        path, aside = self._path(name), self.root / ASIDE / secrets.token_hex(8)
        with expecting(path, "to write there"):
            aside.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(aside, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.link(aside, path)
                return True
            except FileExistsError:
                stored = self.look(name, len(content))
                return stored is not None and stored.content == content
            finally:
                aside.unlink(missing_ok=True)

    def look(self, name: str, most: int) -> StoredObject | None:
        """Read a file in the store's folder, with its last change's time; a pipe has no bytes."""
        path = self._path(name)
        try:
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                return StoredObject(b"", int(status.st_mtime))
            # does not wait for a pipe's other end
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise LockstepError(f"{path}: {error.strerror}, expected a readable file") from error
        with expecting(path, "a readable file"), open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(most + 1) if status.st_size <= most else None
        is_long = content is None or len(content) > most
        return StoredObject(None if is_long else content, int(status.st_mtime))

    def names(self, prefix: str, most: int = MOST_NAMES) -> dict[str, int]:
        """List the files below a folder of the store on this machine."""
        folder, times = self._path(prefix.rstrip("/")), dict[str, int]()
        if not folder.is_dir():
            return times
        for name, path in walk(folder):
            with suppress(FileNotFoundError):  # removed meanwhile
                times[prefix + name] = int(path.lstat().st_mtime)
            if len(times) > most:
                raise LockstepError(too_many(f"{self.address}/{prefix}", most))
        return times

    def remove(self, name: str) -> None:
        """Remove a file from the store's folder."""
        path = self._path(name)
        with expecting(path, "to remove it"):
            path.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.root / check_name(name, self.address)
