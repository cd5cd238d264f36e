"""A finished run of six peers with its auditor, what is found, and edits of its transcript."""

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
from lockstep.transcript.trees import load_nested, tree_hash
from lockstep.transcript.windows import Window
from pipeline import runfile
from pipeline.audit.audit import audit
from pipeline.audit.replay import Replay
from pipeline.audit.verdict import Finding
from tests.lockstep.swarm.simulated import PEERS, lab, run_of
from tests.pipeline.audit.bundle.bundled_run import change_json


@dataclass(frozen=True)
class Audited:
    """A finished run of six peers with messages of a form, and its auditor.

    What is audited is its transcript, or a copy of that in another folder.
    """

    run: runfile.Run
    folder: Path
    form: str = "signs"

    @cached_property
    def findings(self) -> list[Finding]:
        """What is found where nobody edits anything."""
        return self.audit()

    def replayer(self, folder: Path | None = None) -> Replay:
        return Replay(lab(self.form).setup(self.run), Transcript(folder or self.folder))

    def audit(self, folder: Path | None = None) -> list[Finding]:
        replayer = self.replayer(folder)
        return audit(replayer.setup, replayer.transcript)

    def replay(self, folder: Path | None = None) -> list[Finding]:
        windows = self.run.snapshots().windows
        return [found for window in windows for found in self.replay_of(window, folder)]

    def replay_of(self, window: Window, folder: Path | None = None) -> list[Finding]:
        return self.replayer(folder).window(window, range(PEERS), lambda: None).findings


def trained(
    folder: Path,
    *schedule: dict,
    form: str = "signs",
    snapshots: dict | None = None,
    **changes: object,
) -> Audited:
    """Train a run: `schedule` and `changes` as in `run_of`, and when there are snapshots."""
    run = run_of(form, *schedule, **changes)
    run = run.model_copy(update={"witness": run.witness.model_copy(update=snapshots)})
    lab(form).train(run, folder)
    return Audited(run, folder, form)


def rows(findings: list[Finding]) -> list[tuple[int, int | None, str]]:
    """Each finding in short: its round, whom it blames, its kind."""
    return [(found.round, found.peer, found.kind) for found in findings]


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


def edit_arrays(folder: Path, step: int, name: str, by: float = 1, *, hashed: bool = False) -> None:
    """Adds to one number of a snapshot's file; its recorded hash stays, unless it is `hashed`."""
    path = folder / "snapshots" / f"{step:05}" / f"{name}.safetensors"
    arrays = load_file(path)
    first = sorted(arrays)[0]
    arrays[first] = arrays[first].copy()
    arrays[first].flat[0] += by
    path.unlink()  # a hard link may stand elsewhere
    save_file({key: np.asarray(value, order="C") for key, value in arrays.items()}, path)
    if hashed:
        part, _, peer = name.partition("-")
        found = tree_hash(load_nested(path))

        def rehash(state: dict) -> None:
            if peer:
                state[part][int(peer)] = found
            else:
                state[part] = found

        record(folder, step, rehash)


def record(folder: Path, step: int, edit: Callable[[dict], object]) -> None:
    change_json(folder / "snapshots" / f"{step:05}" / "state.json", edit)


WHERE: dict[str, Callable[[dict], object]] = {
    "any": lambda e: e["round"]["step"] == 8,
    "late": lambda e: e["round"]["step"] == 1 and e["decision"]["late"],
    "checks": lambda e: e["checks"] and not (e["rulings"] or e["decision"]["late"]),
    "joined": lambda e: e["round"]["joined"],
    **{name: itemgetter(name) for name in ("others", "rulings", "silent")},
}
"""Which round is edited, by what there is in it."""


def of_all(field: str, value: object) -> Callable[[dict], None]:
    return lambda e: e.update({field: value})
