"""Changes of a publication by someone who makes all of its hashes agree afterwards."""

import re
from collections.abc import Callable
from pathlib import Path

from pipeline.recheck import outputs
from tests.parts.publication.published_run import TRANSCRIPT, change_json, rounds_sha256

HEADER = f"{TRANSCRIPT}/header.json"
SNAPSHOT = f"{TRANSCRIPT}/snapshots/{{:05}}/state.json"


def other_rate(tables: dict) -> None:
    tables["model"]["LLM"]["lr_schedule"]["Cosine"]["base_lr"] = 4e-3


def change_run(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Another run file, in the transcript's header too."""

    def changed(folder: Path) -> None:
        change_json(outputs.RUN, change)(folder)
        change_json(HEADER, lambda header: change(header["run"]))(folder)

    return changed


def another_machine(header: dict) -> None:
    header["environment"] |= {"platform": "gpu", "device_kind": "NVIDIA H100 80GB HBM3"}


def new_transcript_hash(folder: Path) -> None:
    """The verdict is of the rounds as they are."""
    found = rounds_sha256(folder)
    change_json(outputs.VERDICT, lambda v: v.update(transcript=found, sample_seed=found))(folder)


def change_card(folder: Path, pattern: str, said: str) -> None:
    path = folder / "README.md"
    text, count = re.subn(pattern, said, path.read_text(), count=1)
    assert count
    path.write_text(text)


def better(name: str, value: object) -> Callable[[Path], None]:
    """Another number in evaluate.json."""

    def changed(folder: Path) -> None:
        for file in (outputs.EVALUATED, outputs.RESULTS):
            change_json(file, lambda e: e.update({name: value}))(folder)

    return changed
