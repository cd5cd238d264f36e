"""A trained and audited run of which only verdict and bundles are left, and edits of a bundle."""

import shutil
from collections.abc import Callable
from pathlib import Path

from lockstep.files import read_json, write_json
from pipeline.audit import bundle
from tests import tiny

FLIP = {"kind": "sign_flip", "peer": 1, "rounds": [2, 3]}
OPENING = "transcript/snapshots/00000"
TWO_LIARS = {  # a verifier accuses an honest peer, and another sends what it did not commit to
    "config__verification_percent": 34,
    "config__init_min_clients": 3,
    "config__global_batch_size_start": 6,
    "config__global_batch_size_end": 6,
    "peers__count": 5,
    "faults__schedule": [
        {"kind": "false_verifier", "peer": 0, "rounds": [1, 6]},
        {"kind": "wrong_hash", "peer": 4, "rounds": [1, 6]},
    ],
}


def bundles(folder: Path, **changes: object) -> tuple[dict, dict[str, Path]]:
    """Train and audit a run; return its verdict and its bundles by name."""
    make_bundles(folder, **changes)
    return bundles_of(folder)


def flipped_run(folder: Path) -> None:
    """Leave the bundles of a run in which one of two peers sends the negative of its message."""
    make_bundles(folder, faults__schedule=[FLIP])


def bundles_of(folder: Path) -> tuple[dict, dict[str, Path]]:
    """Return the verdict and the bundles that `make_bundles` left."""
    paths = sorted((folder / "elsewhere").iterdir())
    return read_json(folder / "verdict.json"), {path.name: path for path in paths}


def make_bundles(folder: Path, **changes: object) -> None:
    """Train and audit a run; leave its verdict and, elsewhere, its bundles, and nothing else."""
    (run_file, root), kept = tiny.start(folder, **changes), folder / "elsewhere"
    tiny.make(run_file, root, "download", "convert", "train", "witness")
    shutil.copy(root / "data/verdict/verdict.json", folder)
    shutil.copytree(root / "data/verdict/bundles", kept)
    for gone in (root, folder / "tokens"):
        shutil.rmtree(gone)


def change_json(path: Path, change: Callable[[dict], object]) -> None:
    said = read_json(path)
    change(said)
    write_json(path, said)


def flip_bit(path: Path) -> None:
    """Changes the last byte of a file, and of no other that is the same one on the disk."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def seal(folder: Path) -> None:
    """Makes bundle.json list the files as they are: whoever changes them can do that too."""
    change_json(folder / bundle.MANIFEST, lambda said: said.update(files=bundle.listing(folder)))


def change_said(folder: Path, change: Callable[[dict], object]) -> None:
    change_json(folder / bundle.MANIFEST, change)


def found(**said: object) -> Callable[[Path], None]:
    """Changes what bundle.json says was found."""
    return lambda folder: change_said(folder, lambda old: old["findings"][0].update(said))
