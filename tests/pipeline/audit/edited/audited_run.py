"""A finished run of six peers with its auditor, and edits of its transcript."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from lockstep.protocol.round import Evidence
from lockstep.transcript.transcript import Transcript
from pipeline import runfile
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from tests.lockstep.swarm.simulated import lab


@dataclass(frozen=True)
class Audited:
    """A finished run of six peers, and its auditor."""

    run: runfile.Run
    folder: Path

    @cached_property
    def findings(self) -> list[Finding]:
        """What is found where nobody edits anything."""
        return self.audit(self.folder)

    def audit(self, folder: Path) -> list[Finding]:
        return audit(lab("signs").setup(self.run), Transcript(folder))

    def replay(self, folder: Path) -> list[Finding]:
        replay = Replay(lab("signs").setup(self.run), Transcript(folder))
        windows = self.run.snapshots().windows
        return [f for w in windows for f in replay.window(w, range(6), lambda: None).findings]


EVIDENCE = {field.name for field in fields(Evidence)}


def flat(entry: dict) -> dict:
    """A line of rounds.jsonl with the fields of its evidence beside its own."""
    return entry | entry.pop("evidence")


def edit_round(folder: Path, step: int, edit) -> None:
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    entry = flat(json.loads(lines[step - 1]))
    edit(entry)
    evidence = {name: entry.pop(name) for name in list(entry) if name in EVIDENCE}
    lines[step - 1] = json.dumps(entry | {"evidence": evidence})
    path.write_text("\n".join(lines) + "\n")


def edit_arrays(folder: Path, step: int, name: str, by: float = 1) -> None:
    """Adds to one number of a snapshot's file, and leaves its recorded hash."""
    path = folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
    arrays = load_file(path)
    first = sorted(arrays)[0]
    arrays[first] = arrays[first].copy()
    arrays[first].flat[0] += by
    path.unlink()  # a hard link may stand elsewhere
    save_file({key: np.ascontiguousarray(value) for key, value in arrays.items()}, path)


def record(folder: Path, step: int, edit) -> None:
    path = folder / "snapshots" / f"{step:05}" / "state.json"
    recorded = json.loads(path.read_text())
    edit(recorded)
    path.write_text(json.dumps(recorded))


def with_late(e: dict) -> bool:
    return e["round"]["step"] == 1 and e["decision"]["late"]


def with_checks(e: dict) -> bool:
    return e["checks"] and not (e["rulings"] or e["decision"]["late"])


with_other, with_ruling, with_silent = map(itemgetter, ("others", "rulings", "silent"))


def with_joined(e: dict) -> list[int]:
    return e["round"]["joined"]


def of_all(field: str, value: object) -> Callable[[dict], None]:
    return lambda e: e.update({field: value})
