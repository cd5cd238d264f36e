"""The corpus that every machine has: the source of packages that constraints.txt pins.

Their wheels are the same for every Python and platform, so the corpus is too.
"""

from importlib import metadata
from pathlib import Path

from lockstep.errors import LockstepError
from pipeline import extras
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
    """Return the names and versions of the packages.

    Raises:
      LockstepError: A package is not installed.
    """
    versions = [f"{name} {_distribution(name).version}" for name in PACKAGES]
    return f"the source of {', '.join(versions)}"


def find() -> list[TextFile]:
    """Return the sources of the packages, by name.

    Raises:
      LockstepError: A package has none, or is not installed.
    """
    found = [file for name in PACKAGES for file in _sources(name)]
    return sorted(found, key=lambda file: file.name)


def _distribution(package: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise LockstepError(
            f"{package}: not installed, expected it, since its source is a part of the corpus: "
            f"{extras.install('engines')}; or a path in model.LLM.data_location.Corpus"
        ) from error


def _sources(package: str) -> list[TextFile]:
    """The `.py` files that a package's wheel lists, without tests and empty ones."""
    files = [
        (file.as_posix(), Path(file.locate()))
        for file in _distribution(package).files or ()
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
