"""Folders in DVC's cache, where finished runs leave their results."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path


def folders(project: Path, holding: str) -> Iterator[dict[str, Path]]:
    """Yield the folders in DVC's cache that hold a file of that name: relative name -> cached file.

    DVC stores a folder as a JSON list of {md5, relpath} named <md5>.dir, and each file by its MD5.
    """
    cache = project / ".dvc" / "cache" / "files" / "md5"
    for path in cache.glob("*/*.dir"):
        files = {file["relpath"]: file["md5"] for file in json.loads(path.read_text())}
        cached = {name: cache / md5[:2] / md5[2:] for name, md5 in files.items()}
        if holding in cached and all(file.is_file() for file in cached.values()):
            yield cached


def copy(files: dict[str, Path], folder: Path) -> None:
    """Copy a cached folder to a new one."""
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)
