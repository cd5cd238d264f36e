"""A tiny run of the torch language model of workloads/, and one that went through all stages."""

from pathlib import Path
from typing import NamedTuple

from lockstep.files import read_json
from parts.workload.description import code_hash
from pipeline import runfile
from tests import tiny

CONFIG = {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "dropout": 0.1}
FACTORY = "torch_language_model:GRU"
ROUNDS = 9
OWN_STEPS = {"DiLoCo": {**tiny.DILOCO_IN_4_BITS["DiLoCo"], "inner": "Workload"}}


def a_run(folder: Path, **changes: object) -> tuple[Path, Path]:
    given = {
        "workload__factory": FACTORY,
        "workload__config": CONFIG,
        "model__LLM__architecture": "HfAuto",
        "model__LLM__checkpoint": "Ephemeral",
        "runtime__worker_start_seconds": 900,  # torch may take long to import
    }
    return tiny.start(folder, **given | changes)


def verdict_of(root: Path) -> dict:
    return read_json(root / "data/verdict/verdict.json")


class Finished(NamedTuple):
    """A run through all stages: its file, its root and what was printed."""

    run_file: Path
    root: Path
    printed: str

    @property
    def same_run(self) -> dict:
        """The changes by which another run is this one, whose data are here."""
        data = {"model__LLM__data_location": {"Local": str(self.run_file.parent / "tokens")}}
        return data | {"config__total_steps": ROUNDS}

    @property
    def code(self) -> str:
        return code_hash(runfile.load(self.run_file))


def make(folder: Path) -> None:
    run_file, root = a_run(folder, config__total_steps=ROUNDS)
    (folder / "printed").write_text(tiny.make(run_file, root))


def read(folder: Path) -> Finished:
    return Finished(folder / "run.toml", folder / "root", (folder / "printed").read_text())
