"""The corpus that every machine has: the source of Python's standard library, without tests."""

import os
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.sources.text.text_file import TextFile
from pipeline.stage.given_files import stamp

SKIP_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Written when a Python is built or packaged: they differ between machines with the same Python.
SKIP_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")


def find(root: Path) -> list[TextFile]:
    """Return the sources under a folder, by name; they need not be UTF-8.

    Raises:
      LockstepError: there are none.
    """
    sizes = source_files(root)
    if not sizes:
        raise LockstepError(f"{root}: found no Python sources, expected the standard library")
    return [
        TextFile(name, root / name, stamp(root / name), 0, size, errors="replace")
        for name, size in sizes.items()
    ]


def source_files(root: Path) -> dict[str, int]:
    """Return the `.py` files under a folder that are not empty, without tests: name -> bytes."""
    sizes = {}
    for parent, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if not (name.startswith(SKIP_PREFIXES) or name in SKIP_FOLDERS)
        ]
        for name in names:
            path = Path(parent, name)
            if name.endswith(".py") and not name.startswith(SKIP_PREFIXES):
                sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return {name: size for name, size in sorted(sizes.items()) if size}
