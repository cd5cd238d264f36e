"""The corpus that every machine has: the source of packages that constraints.txt pins.

Their wheels are the same for every Python and platform, so the corpus is too.
"""

from importlib import metadata
from pathlib import Path

from pipeline.errors import LockstepError
from pipeline.sources.text.text_file import TextFile
from pipeline.stage.given_files import stamp

# About as many bytes as Python's standard library; none has parts for one platform, or versions in
# constraints-gpu.txt.
PACKAGES = (
    "dvc",
    "fsspec",
    "huggingface_hub",
    "jinja2",
    "networkx",
    "rich",
    "snakemake",
    "urllib3",
)
SKIP_FOLDERS = {"test", "tests"}


def describe() -> str:
    """Return the names and versions of the packages."""
    return "the source of " + ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)


def find() -> list[TextFile]:
    """Return the sources of the packages, by name.

    Raises:
      LockstepError: A package has none.
    """
    found = [file for name in PACKAGES for file in _sources(name)]
    return sorted(found, key=lambda file: file.name)


def _sources(package: str) -> list[TextFile]:
    """The `.py` files that a package's wheel lists, without tests and empty ones."""
    files = [
        (file.as_posix(), Path(file.locate()))
        for file in metadata.files(package) or ()
        if file.suffix == ".py" and not SKIP_FOLDERS.intersection(file.parts)
    ]
    sources = [
        TextFile(name, path, stamp(path), 0, path.stat().st_size, errors="replace")
        for name, path in files
        if path.stat().st_size
    ]
    if not sources:
        raise LockstepError(f"{package}: found no Python sources, expected those of its wheel")
    return sources
