"""The folder that a stage leaves, whether it is current, and why a stage would run again."""

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, sha256_file, write_bytes, write_json, writes
from pipeline.stage.keys import OUT, RUN_FILE, STAGES, Keys, digest, needs

METRICS = "metrics"
COUNTED = "proof/counted.safetensors"  # rows of a publication, see `Subject.counted_rows`
# Where a stage's result says what it read outside: the key of [pins], a file, and a table in it.
INPUTS = {
    "download": ("data", "shards.json", "source"),
    "convert": ("checkpoint", "source.json"),
    "evaluate": ("tasks", "tasks/hashes.json"),  # only of a run that lm_eval gave tasks
}
# What a result can depend on besides the key; recorded for later comparison.
RECORDED = ("jax", "jaxlib", "flax", "optax", "numpy", "ml_dtypes", "safetensors", "tokenizers")


def listing_sha256(entries: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 over the (name, SHA-256 of the content) of files, ordered by name."""
    lines = sorted(f"{sha256}  {name}\n" for name, sha256 in entries)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment() -> dict[str, str]:
    """Return the versions of packages that the bits of an artifact can depend on.

    The version of Python is not one: metrics are equal to the digit on each that was tried.
    """
    return {name: metadata.version(name) for name in RECORDED}


@dataclass(frozen=True)
class Paths:
    """Where one stage of one run reads and writes its artifacts."""

    stage: str  #: Name of the stage in dvc.yaml.
    run: Path  #: Path of the run file.
    root: Path  #: Folder that holds `data/` and `metrics/`.
    _read: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def keys(self) -> Keys:
        """The keys of all stages."""
        return Keys(self.run)

    @property
    def key(self) -> str:
        """The key of this stage."""
        return self.keys.key(self.stage)

    @property
    def runs(self) -> Path:
        """Work in progress of all runs, shared by all of DVC's temporary checkouts."""
        return Path(os.environ.get("DVC_ROOT", self.root)) / "data" / "runs"

    @property
    def scratch(self) -> Path:
        """This stage's work in progress, which survives a kill; keyed, so never another run's."""
        return self.runs / self.key

    @property
    def store(self) -> Path:
        """Downloads and kept files by content, independent of the code that asked for them."""
        return self.runs.parent / "store"

    @property
    def aside(self) -> Path:
        """Where the next result of this stage is made, beside the last; a kill leaves it there."""
        out = self.out(self.stage)
        return out.with_name(f".{out.name}.building")

    @property
    def old(self) -> Path:
        """Where the last result of this stage waits to be removed; a kill leaves it there."""
        out = self.out(self.stage)
        return out.with_name(f".{out.name}.old")

    def out(self, stage: str) -> Path:
        """Return the folder that `stage` leaves."""
        return self.root / OUT[stage]

    def is_made(self, stage: str) -> bool:
        """Return whether `stage` has a result of the current key and of its current inputs."""
        return self.problem(stage, self.root / self.keys.made(stage)) is None

    def made(self, stage: str) -> Path:
        """Return the made file of `stage`, which has a current result."""
        made = self.root / self.keys.made(stage)
        if problem := self.problem(stage, made):
            which = "" if self.run == Path(RUN_FILE) else f" --run {self.run}"
            raise LockstepError(
                f"{made}: {problem}, expected from stage {stage} with the current {self.run}; "
                f"run `lockstep {stage}{which}`"
            )
        return made

    def problem(self, stage: str, made: Path) -> str | None:
        """Return what keeps a made file from standing for a current result, or None.

        Keys do not cover what lies outside, such as a folder that has changed. If a stage has read
        it again, the stage's made file is not the one that was read. What is pinned has to be what
        was read.
        """
        if not made.is_file():
            return "missing"
        try:
            content = read_made(made)
        except LockstepError:
            return "damaged"
        for need in needs(stage):
            now = self.root / self.keys.made(need)
            if not now.is_file() or content["needs"].get(need) != sha256_file(now):
                return f"made from a different {OUT[need]} than the current one"
        return self._unpinned(stage, content["inputs"])

    def _unpinned(self, stage: str, inputs: Mapping[str, str]) -> str | None:
        """Return what a result was made from that is not what is pinned, or None."""
        for key, pin in self.keys.pins(stage).items():
            if key in inputs and inputs[key] != pin:
                return f"made from {key} of sha256 {inputs[key]}, and [pins] {key} is {pin}"
        return None

    def check_pinned(self) -> None:
        """Check that this stage's result, if there is one, is of what is pinned.

        Snakemake asks for the result's name alone, which has no pin in it.
        """
        made = self.root / self.keys.made(self.stage)
        if made.is_file() and self._unpinned(self.stage, read_made(made)["inputs"]):
            self.made(self.stage)  # raises

    def has_result(self) -> bool:
        """Return whether this stage has a current and whole result, here or in DVC's cache."""
        made = self.root / self.keys.made(self.stage)
        if self.is_made(self.stage):
            if (damage := _damage(made)) is None:
                return True
            print(f"{self.stage}: {damage}; it is made again")
        return self._restore(made)

    def _restore(self, made: Path) -> bool:
        """Take a result out of DVC's cache, where an earlier run may have left it.

        A stage that reads no other runs again: what it read lies outside, and may have changed.
        """
        if not needs(self.stage):
            return False
        for files in cached_folders(self.runs.parent.parent, made.name):
            if self.problem(self.stage, files[made.name]) is None:
                aside = self._aside()
                copy_cached(files, aside)
                if _damage(aside / made.name) is None:  # of the cache
                    self._replace(aside)
                    return True
        return False

    def need(self, stage: str) -> Path:
        """Return the folder of an earlier stage, whose files are checked against their hashes."""
        assert stage in needs(self.stage), f"dvc.yaml: {self.stage} does not list {OUT[stage]}"
        made = self.made(stage)
        self._read[stage] = sha256_file(made)  # it may be replaced while this stage runs
        verify(made)
        return self.out(stage)

    def match_scratch(self) -> None:
        """Remove work in progress that an earlier attempt began on other outputs of other stages.

        Keys do not cover what lies outside, such as a folder without a pin.
        """
        file = self.scratch / "read.json"
        read = {need: digest(read_made(self.made(need))["files"]) for need in needs(self.stage)}
        before = read_json(file) if file.is_file() else read
        if changed := [OUT[need] for need in read if before.get(need) != read[need]]:
            folders = " and ".join(changed)
            print(f"{self.stage}: {folders} changed since it was stopped; it starts over")
            shutil.rmtree(self.scratch)
        write_json(file, read)

    def publish(self) -> None:
        """Copy the `metrics` of the stage's folder to metrics/, if the stage has a current result.

        Small results that people compare are in `metrics` of the folder, and their copies in
        metrics/, for git to keep. A git checkout changes only the copies, so this is called
        whenever a stage turns out to be made.
        """
        if not self.is_made(self.stage):
            return
        for source in sorted((self.out(self.stage) / METRICS).glob("*")):
            copy, data = self.root / METRICS / source.name, source.read_bytes()
            if not copy.is_file() or copy.read_bytes() != data:
                write_bytes(copy, data)

    @contextmanager
    def building(self) -> Iterator[Path]:
        """Yield an empty folder that replaces the stage's old folder at the end of the block.

        Results to publish go into its `metrics`. `made-<key>.json` is written last. It holds the
        SHA-256 and size of each file, the SHA-256 of the made files of the stages that were read,
        and of what was read outside, what the key digests, the stage's tables of the run file, the
        versions of `environment`, and a SHA-256 of all that; nothing that differs between two equal
        runs, so equal results are equal folders.
        """
        aside = self._aside()
        yield aside
        manifest = {
            "stage": self.stage,
            "key": self.key,
            "needs": {
                need: self._read.get(need) or sha256_file(self.made(need))
                for need in needs(self.stage)
            },
            "inputs": _inputs(self.stage, aside),
            "content": self.keys.content(self.stage),
            "tables": self.keys.tables(self.stage),
            "environment": environment(),
            "files": _listing(aside),
        }
        made = aside / f"made-{self.key}.json"
        write_sealed(made, manifest)
        self._replace(aside)
        self.publish()

    def _aside(self) -> Path:
        """Make an empty folder beside the stage's own."""
        aside = self.aside
        with writes(aside):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        return aside

    def _replace(self, aside: Path) -> None:
        """Replace the stage's folder. A kill in between leaves none, so the stage runs again."""
        out, old = self.out(self.stage), self.old
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            os.replace(out, old)
        os.replace(aside, out)
        shutil.rmtree(old, ignore_errors=True)


def _inputs(stage: str, folder: Path) -> dict[str, str]:
    """Return the SHA-256 that a stage's artifact has of what was read outside, by its pin."""
    if stage not in INPUTS:
        return {}
    key, file, *tables = INPUTS[stage]
    if not (folder / file).is_file():
        return {}
    record = read_json(folder / file)
    for table in tables:
        record = record[table]
    return {key: record["sha256"]}


def read_made(path: Path) -> dict:
    """Return the content of a made file, as `read_sealed` does."""
    return read_sealed(path, path.parent)


def write_sealed(path: Path, content: dict) -> None:
    """Write a stage's JSON object with its own SHA-256, as `write_bytes` does."""
    write_json(path, content | {"sha256": _digest(content)})


def read_sealed(path: Path, made: Path) -> dict:
    """Return the content of a stage's file that `write_sealed` wrote.

    Raises:
      LockstepError: It is not as it was written; without `made` it is made again.
    """
    content = read_json(path)
    seal = content.pop("sha256", None)
    if seal != _digest(content):
        raise LockstepError(
            f"{path}: found content of sha256 {_digest(content)[:12]}, expected {seal} as it says "
            f"itself; delete {made} to remake it"
        )
    return content


def _digest(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def verify(made: Path, only: Collection[str] | None = None) -> dict:
    """Check a stage's folder, or `only` some of its files, against its made file; return that."""
    if damage := _damage(made, only):
        raise LockstepError(f"{damage}; delete {made.parent} to remake it")
    return read_made(made)


def _damage(made: Path, only: Collection[str] | None = None) -> str | None:
    actual, listed = _listing(made.parent, only, skip=made.name), read_made(made)["files"]
    for name in sorted(only or actual.keys() | listed.keys()):
        if actual.get(name) != listed.get(name):
            return (
                f"{made.parent / name}: found {_described(actual.get(name))}, expected "
                f"{_described(listed.get(name))} as {made.name} says"
            )
    return None


def _described(entry: dict | None) -> str:
    return f"{entry['bytes']} bytes of sha256 {entry['sha256'][:12]}" if entry else "no such file"


def _listing(
    folder: Path, only: Collection[str] | None = None, skip: str | None = None
) -> dict[str, dict]:
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
    files = {name: folder / name for name in sorted(only or names) if name != skip}
    return {
        name: {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for name, path in files.items()
        if path.is_file()
    }


# ---- Results elsewhere, and those that are not current ----


def cached_folders(project: Path, holding: str) -> Iterator[dict[str, Path]]:
    """Yield a stage's folders in DVC's cache that hold a file of that name: name -> file.

    DVC stores a folder as a JSON list of {md5, relpath} named <md5>.dir, and each file by its MD5.
    A list that is damaged, as by a full disk, is passed over.
    """
    cache = project / ".dvc" / "cache" / "files" / "md5"
    for path in cache.glob("*/*.dir"):
        try:
            files = {file["relpath"]: file["md5"] for file in json.loads(path.read_bytes())}
            cached = {name: cache / md5[:2] / md5[2:] for name, md5 in files.items()}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if holding in cached and all(file.is_file() for file in cached.values()):
            yield cached


def copy_cached(files: dict[str, Path], folder: Path) -> None:
    """Copy a stage's cached folder to a new one."""
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / name)


def rerun_reasons(run: Path, root: Path) -> dict[str, str | None]:
    """Return why each stage would run again; None for a stage that has a current result."""
    return {stage: _rerun_reason(Paths(stage, run, root)) for stage in STAGES}


def _rerun_reason(paths: Paths) -> str | None:
    stage, made = paths.stage, paths.root / paths.keys.made(paths.stage)
    if paths.is_made(stage):
        return None
    if made.is_file():
        return f"its result is {paths.problem(stage, made)}"
    if any(cached_folders(paths.runs.parent.parent, made.name)):
        return "its result is not here, but may be in DVC's cache"
    earlier = next(iter(sorted(paths.out(stage).glob("made-*.json"))), None)
    if earlier is None:
        return "it has no result yet"
    try:
        before = read_made(earlier)["content"]
    except (LockstepError, KeyError):
        return "its result is damaged, or of an older release"
    now = paths.keys.content(stage)
    changed = [name for name in before | now if before.get(name) != now.get(name)]
    return f"changed since its result: {', '.join(changed)}"
