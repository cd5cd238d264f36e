"""`data_location.Corpus`: text that every machine has, the source of pinned packages.

The wheels that constraints.txt pins are the same for every Python and platform, so this text is
too: the default run needs no network. Whole packages are held out with `most_seen_percent`, whole
files without. A limit of files is on the train files.
"""

import hashlib
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import LockstepError
from lockstep.files import sha256_file
from pipeline.runfile.data import DataCorpus
from pipeline.sources.provider import (
    HELD_OUT,
    TRAIN,
    Fetched,
    FetchOptions,
    Provider,
    Survey,
    SurveyedFile,
)
from pipeline.sources.text.tokenizing import DocumentReader, most_tokens, tokenize
from pipeline.stage.artifacts import listing_sha256
from pipeline.stage.untrusted_files import unchanged
from pipeline.tokens.shards import Split

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


class SourceFile(NamedTuple):
    """A Python file of a package: its name in the wheel, where it is, and its bytes."""

    name: str
    path: Path
    size: int

    @property
    def package(self) -> str:
        """The folder of the package that is imported."""
        return self.name.partition("/")[0]


def survey(location: DataCorpus, options: FetchOptions) -> Survey:
    """Describe the packages' files to read; only tokenizing tells how many tokens they are."""
    splits, train_files = _choose(location, options)
    files = tuple(
        SurveyedFile(file.name, split, file.size, None)
        for split, chosen in splits.items()
        for file in chosen
    )
    text_bytes = sum(file.size for file in splits[TRAIN])
    return Survey(_describe(location.packages), files, train_files, text_bytes=text_bytes)


def source_sha256(location: DataCorpus, options: FetchOptions) -> str | None:
    """Return the SHA-256 of the packages' text, if `fetch` would read it all and nothing else."""
    if options.limit is not None or location.tokenizer is not None:
        return None
    return listing_sha256((file.name, sha256_file(file.path)) for file in find(location.packages))


def fetch(location: DataCorpus, folder: Path, options: FetchOptions) -> Fetched:
    """Tokenize the corpus: the source of the packages.

    Raises:
      LockstepError: a package is not installed, a file changes meanwhile, nothing fits into the
        held-out split, vocab_size is too large for the text, or there is no such tokenizer.
    """
    splits, _ = _choose(location, options)
    text = _PackageText(splits, location, options)
    with unchanged(file.path for files in splits.values() for file in files):
        return tokenize(location, [text], folder, options)


class _PackageText(DocumentReader):
    """The files of a corpus, each a document; `opened` has the SHA-256 of those read."""

    def __init__(
        self, splits: dict[Split, list[SourceFile]], location: DataCorpus, options: FetchOptions
    ):
        super().__init__({split: most_tokens(options.limit, split) for split in splits})
        self.read, self.percent = _describe(location.packages), location.held_out_percent
        self.opened: dict[SourceFile, str] = {}
        self._splits, self._options = splits, options
        packages = [file.package for file in splits[HELD_OUT]]
        self.borders = frozenset(
            n for n, pair in enumerate(pairwise(packages), 1) if len({*pair}) > 1
        )

    def documents(self) -> Iterator[tuple[Split, str]]:
        size = sum(file.size for files in self._splits.values() for file in files)
        with self._options.progress(total=size, unit="byte") as bar:
            for split, files in self._splits.items():
                for file in files:
                    if not (self.enough and split == TRAIN):
                        content = file.path.read_bytes()
                        self.opened[file] = hashlib.sha256(content).hexdigest()
                        yield split, content.decode(errors="replace")
                    bar.advance(file.size)

    def contents(self) -> Iterator[tuple[str, str]]:
        return ((file.name, sha256) for file, sha256 in self.opened.items())

    def record(self) -> dict[str, Any]:
        names = [file.name for file in self._splits[HELD_OUT]]
        return {
            "files": len(self.opened),
            "bytes": sum(file.size for file in self.opened),
            "held_out_files": [name for n, name in enumerate(names) if n not in self.repeated],
            **(
                {"seen_in_train": [names[n] for n in sorted(self.repeated)]}
                if self.repeated
                else {}
            ),
        }


# ---- Which files ----


def find(packages: tuple[str, ...] | None = None) -> list[SourceFile]:
    """Return the sources of packages, by default of `PACKAGES`, by name."""
    return sorted(file for name in packages or PACKAGES for file in _sources(name))


def _choose(
    location: DataCorpus, options: FetchOptions
) -> tuple[dict[Split, list[SourceFile]], int]:
    """Return the packages' files that a run reads, by split, and the number of all train files."""
    files, percent = find(location.packages), location.held_out_percent
    by_file = location.most_seen_percent is None
    whole = [file.name if by_file else file.package for file in files]  # what is held out whole
    sizes: Counter[str] = Counter()
    for name, file in zip(whole, files, strict=True):
        sizes[name] += file.size
    held_out = set(held_out_of(sizes, percent))
    if not held_out:
        raise LockstepError(
            f"model.LLM.data_location.Corpus.held_out_percent: found {percent}, expected enough to "
            f"hold out one of the {len(sizes)} {'files' if by_file else 'packages'} in "
            f"{sysconfig.get_path('purelib')}"
        )
    train = [file for name, file in zip(whole, files, strict=True) if name not in held_out]
    most = None if options.limit is None else options.limit.files
    splits: dict[Split, list[SourceFile]] = {
        TRAIN: train[:most],
        HELD_OUT: [file for name, file in zip(whole, files, strict=True) if name in held_out],
    }
    return splits, len(train)


def held_out_of(sizes: Mapping[str, int], held_out_percent: float) -> list[str]:
    """Return held-out names of the corpus: packages or files within a share of all bytes.

    They are tried in the order of the SHA-256 of their names. So another version of the packages
    holds out nearly the same, and one large file does not make the held-out part too large, as
    comparing a hash with a threshold would (5 % of files were 10 % of bytes).
    """
    room = sum(sizes.values()) * held_out_percent / 100
    held_out = []
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if sizes[name] <= room:
            held_out.append(name)
            room -= sizes[name]
    return held_out


def _describe(packages: tuple[str, ...] | None) -> str:
    """Return the names and versions of the packages."""
    versions = [f"{name} {_distribution(name).version}" for name in packages or PACKAGES]
    return f"the source of {', '.join(versions)}"


def _distribution(package: str) -> metadata.Distribution:
    try:
        return metadata.distribution(package)
    except metadata.PackageNotFoundError as error:
        raise LockstepError(
            f"{package}: not installed, expected it, since its source is a part of the corpus: "
            f"pip install -c constraints.txt {package}; or other data than "
            "model.LLM.data_location.Corpus"
        ) from error


def _sources(package: str) -> list[SourceFile]:
    """Return the `.py` files that a package's wheel lists, without tests and empty ones."""
    paths = [
        (file.as_posix(), Path(file.locate()))
        for file in _distribution(package).files or ()
        if file.suffix == ".py" and not SKIP_FOLDERS.intersection(file.parts)
    ]
    sources = [SourceFile(name, path, path.stat().st_size) for name, path in paths]
    if not (sources := [file for file in sources if file.size]):
        raise LockstepError(f"{package}: found no Python sources, expected those of its wheel")
    return sources


PROVIDER = Provider(survey, fetch, source_sha256)
