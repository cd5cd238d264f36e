"""A finished tiny run, its publication, and what a forger changes in a copy of it."""

import gzip
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from lockstep import __version__
from lockstep.files import read_json, sha256_file, write_json
from lockstep.transcript.trees import load_arrays, save_tree
from parts.publication import layout, publish, readers_checks, transcript
from parts.publication.fetch import Limits
from parts.publication.layout import Publication, ReaderAsks
from parts.publication.transcript import Unpacked
from pipeline import runfile, version
from pipeline.pages.card import without_commit
from pipeline.recheck import outputs, report
from pipeline.recheck.outputs import MadeFile, PublishedFile
from pipeline.recheck.published import PublishedRun, PublishedTranscript
from pipeline.runfile import Network
from pipeline.stage.artifacts import _digest
from pipeline.stage.keys import digest, needs
from pipeline.start import set_up
from tests import tiny
from tests.pipeline.audit.bundle import bundled_run
from tests.pipeline.sources import options

STAGES = layout.ALWAYS
TRANSCRIPT = outputs.TRANSCRIPT
WORD = "5f0c1e9a7d3b8246e1f7a90c4b6d2835"  # of a reader
LIMITS = Limits(1, Network(attempts=2, stall_seconds=1))


class Published:
    """A finished tiny run, and its publication.

    `whole` is the same with all windows, so that a forger may change what the draw follows.
    """

    def __init__(self, folder: Path):
        self.run_file, self.root = folder / "run.toml", folder / "root"
        self.data, self.checkout = folder / "tokens", folder / "checkout"
        self.folder, self.whole = folder / "published", folder / "whole"


def make(folder: Path) -> None:
    """Train and publish in a folder what `Published` then finds there."""
    there = Published(folder)
    tiny.start(folder)
    tiny.make(there.run_file, there.root, *STAGES, layout.REPORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(version, "CHECKOUT", there.checkout)
        commit_source(there.checkout)
        publish.write(there.folder, there.run_file, there.root, 1, None)
        publish.write(there.whole, there.run_file, there.root, 4, None)


def commit_source(checkout: Path) -> None:
    """A checkout of git with some source."""
    (checkout / "pipeline").mkdir(parents=True)
    (checkout / "pipeline" / "a.py").write_text("1")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        tiny.git(checkout, *arguments)


def verify(source: Path | str, **asked: object):
    """What the command claims, or the error that it prints."""
    with tempfile.TemporaryDirectory() as aside, tiny.like_a_process():
        root = Path(aside) / "reader"
        try:
            return readers_checks.verify_publication(str(source), root, LIMITS, ReaderAsks(**asked))
        finally:
            assert not root.exists()  # nothing of a folder is copied, or left


def print_of(*words: object) -> tuple[int, str]:
    """The exit status of a command, and what it prints."""
    done = tiny.invoked(*words)
    return done.exit_code, done.stdout


def refusal(source: Path, **asked: object) -> str:
    said = options.refusal(verify, source, **asked)
    assert "/tmp" not in said or asked  # what the reader names
    return said


def forge(folder: Path, *, card: bool = True) -> None:
    """Makes card, made files, keys and list agree with the files, as anybody could.

    Without `card` its text stays as it is, but for the hashes in it.
    """
    listed = read_json(folder / layout.MANIFEST)
    of_run = listed["files"][outputs.RUN]["sha256"] != sha256_file(folder / outputs.RUN)
    listed["files"] = {
        name: entry(folder / name) if (folder / name).is_file() else file
        for name, file in listed["files"].items()
    }
    with tempfile.TemporaryDirectory() as aside:
        publication = Publication.model_validate_json(json.dumps(listed))
        there = publication.model_copy(
            update={"files": {n: f for n, f in publication.files.items() if (folder / n).is_file()}}
        )
        _forge_sizes(folder, there)
        whole = transcript.unpack(folder, Path(aside), there, set(), 2**30)
        stages = [s for s in (*STAGES, layout.REPORT) if (folder / layout.made(s)).is_file()]
        made = {stage: read_json(folder / layout.made(stage)) for stage in stages}
        for stage in stages:
            _forge_key(folder, made, stage, of_run)
        header = whole.folder / "header.json"
        if header.is_file():
            write_json(header, read_json(header) | {"key": made["train"]["key"]})
            shutil.copyfile(header, folder / TRANSCRIPT / "header.json")
            whole.files["header.json"] = PublishedFile(**entry(header))
        text = (folder / "README.md").read_text()
        for name, file in read_json(folder / layout.MANIFEST)["files"].items():
            if (folder / name).is_file():
                text = text.replace(file["sha256"], sha256_file(folder / name))
        if (whole.folder / "rounds.jsonl").is_file():
            found = listed["rounds"] = sha256_file(whole.folder / "rounds.jsonl")
            text = re.sub(r"(?<=transcript's rounds \| `)[0-9a-f]{64}", found, text)
        if card:
            with suppress(Exception):  # of records that make none
                text = _card(folder, there, whole, made)
        (folder / "README.md").write_text(text)
        for stage in stages:
            _forge_made(folder, made, stage, whole)
    for name in listed["files"]:
        if (folder / name).is_file():
            listed["files"][name] = entry(folder / name)
    write_json(folder / layout.MANIFEST, listed)


def size_of(path: Path) -> int:
    """The size of a packed file's original."""
    return len(gzip.decompress(path.read_bytes()))


def _forge_sizes(folder: Path, publication: Publication) -> None:
    """The sizes of packed files, which are known before these are unpacked."""
    left = read_json(folder / layout.made("train"))
    left.pop("sha256", None)
    for name in publication.files:
        if name.startswith(f"{TRANSCRIPT}/") and name.endswith(layout.GZIP):
            original = "transcript/" + layout.original_name(name.removeprefix(f"{TRANSCRIPT}/"))
            left["files"][original]["bytes"] = size_of(folder / name)
    write_json(folder / layout.made("train"), left | {"sha256": _digest(left)})


def _forge_key(folder: Path, made: dict[str, dict], stage: str, of_run: bool) -> None:
    """The stage's tables as in run.json, and the key that follows."""
    said = made[stage]
    if of_run:
        for name in said["tables"]:
            value = read_json(folder / outputs.RUN)
            for part in name.split("."):
                value = value[part]
            said["tables"][name] = _without_null(value)
    for name, value in said["tables"].items():
        if f"[{name}]" in said["content"]:
            said["content"][f"[{name}]"] = digest(value)
    for need in needs(stage):
        said["content"][f"stage {need}"] = made[need]["key"]
    said["key"] = digest(said["content"])[:12]


def _without_null(value: object) -> object:
    """The value as TOML has it."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return value


def _forge_made(folder: Path, made: dict[str, dict], stage: str, whole: Unpacked) -> None:
    said = made[stage]
    said.pop("sha256", None)
    commit = read_json(folder / layout.MANIFEST)["commit"]
    said["needs"] = {n: sha256_file(folder / layout.made(n)) for n in needs(stage)}
    for name in said["files"]:
        place = folder / (outputs.need(stage, name).name(name) or "nowhere")
        if place.is_file():
            said["files"][name] = entry(place)
        if commit and name == outputs.CARD and stage in ("export", layout.REPORT):
            content = (without_commit(place.read_text(), commit) or "").encode()
            sha256 = hashlib.sha256(content).hexdigest()
            said["files"][name] = {"bytes": len(content), "sha256": sha256}
        original = name.removeprefix("transcript/")
        if stage == "train" and original in whole.files:
            said["files"][name] = whole.files[original].model_dump()
    write_json(folder / layout.made(stage), said | {"sha256": _digest(said)})


def _card(folder: Path, publication: Publication, whole: Unpacked, made: dict[str, dict]) -> str:
    """The card that follows from the forged records."""
    found = PublishedTranscript(whole.folder)
    run = runfile.parse(read_json(folder / outputs.RUN), "run.json")
    with tiny.like_a_process():
        setup = set_up.blank(run, found.header.model, None, publication.columns, 0, 0)
    of_stages = {s: MadeFile.model_validate_json(json.dumps(said)) for s, said in made.items()}
    files = {name: sha256_file(folder / name) for name in publication.files}
    here = [folder, files, None, setup, found, [], [], [], [], None, of_stages, __version__]
    here.append(publication.commit)
    return report.make_card(PublishedRun(*here))


def entry(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "sha256": sha256_file(path)}


def change_json(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    return lambda folder: bundled_run.change_json(folder / name, change)


def change_tensors(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        tensors = load_arrays(folder / name)
        change(tensors)
        save_tree(folder / name, tensors)

    return changed


def flip(name: str) -> Callable[[Path], None]:
    return lambda folder: bundled_run.flip_bit(folder / name)


def change_round(folder: Path, number: int, change: Callable[[dict], object]) -> None:
    """Another line of rounds.jsonl."""
    path = folder / layout.ROUNDS
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    said = json.loads(lines[number - 1])
    change(said)
    lines[number - 1] = json.dumps(said, separators=(",", ":"))
    path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode()))


def rounds_sha256(folder: Path) -> str:
    return hashlib.sha256(gzip.decompress((folder / layout.ROUNDS).read_bytes())).hexdigest()


def add(name: str) -> Callable[[Path], None]:
    """One more file, which the list has."""

    def changed(folder: Path) -> None:
        (folder / name).write_bytes(b"{}")
        change_json(layout.MANIFEST, lambda m: m["files"].update({name: entry(folder / name)}))(
            folder
        )

    return changed


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()
