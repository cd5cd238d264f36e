"""A bucket with a model in it: pushed by us or put there by others, and read by a stage."""

import json
from pathlib import Path

from lockstep.files import read_json
from pipeline.weights import bucket
from tests import tiny
from tests.pipeline.conversion import convert_in, refused
from tests.servers.bucket import Bucket

NAME, FOLDER = "ours", "runs/a"
WHERE = f"gs://{NAME}/{FOLDER}"
ABOUT = {"step": 7, "epoch": 2, "run": "0123456789ab"}
CHECKPOINT = {"bucket": NAME, "prefix": FOLDER}
JUNK = ("modeling.py", "pytorch_model.bin", "notes.json")


def push(folder: Path, prefix: str = FOLDER, **about: object) -> int:
    return bucket.push(sorted(folder.iterdir()), NAME, prefix, **ABOUT | about)


def put(served: Bucket, folder: Path) -> None:
    """As somebody else uploads it: without a manifest."""
    for path in folder.iterdir():
        served.put(f"{FOLDER}/{path.name}", path.read_bytes())


def put_manifest(served: Bucket, *names: str, **changes: object) -> int:
    """A manifest as Psyche writes it, of what is there now."""
    stored = [(name, served.find(f"{FOLDER}/{name}", None)) for name in names]
    files = [
        {"filename": name, "generation": o.generation, "size_bytes": len(o.content)} | changes
        for name, o in stored
        if o is not None
    ]
    metadata = {"timestamp": "2026-01-15T10:30:00Z", "epoch": 2, "step": 7, "run_id": "theirs"}
    content = json.dumps({"metadata": metadata, "files": files})
    return served.put(f"{FOLDER}/manifest.json", content.encode())


def read(root: Path, kind: str = "Gcs", **changes: object) -> Path:
    """Runs the stage convert; data/init."""
    root.mkdir(exist_ok=True)
    return convert_in(root, {kind: CHECKPOINT | changes})


def refusal(root: Path, **changes: object) -> str:
    root.mkdir(exist_ok=True)
    return refused(root, {"Gcs": CHECKPOINT | changes})


def source_of(out: Path) -> dict:
    return read_json(out / "source.json")


def cached(root: Path) -> dict[str, bytes]:
    """What the cache holds of the folder, locks aside."""
    files = tiny.contents(root / "data" / "store" / "gcs" / NAME / FOLDER)
    return {name: content for name, content in files.items() if not name.endswith(".lock")}


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])
