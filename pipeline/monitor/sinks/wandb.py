"""Weights & Biases: a run whose id is the key; offline unless `WANDB_MODE` says otherwise."""

import os
import shutil

from pipeline.monitor.sinks.sink import Scalars, TrackedRun


class WandbSink:
    """Tells Weights & Biases; a `Sink`.

    Online, W&B resumes the run of that id. Offline it cannot: each start makes another folder, and
    what a killed one had not yet written is lost. So the folders of earlier starts are removed, and
    the new one is told everything again: `wandb sync` has one run to upload.
    """

    def open(self, run: TrackedRun) -> int:
        """Begin or resume the run, and return its last step."""
        # read when it is imported: by itself, W&B tells its makers of every error
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        if mode != "online":
            for folder in (run.folder / "wandb").glob(f"offline-run-*-{run.key}"):
                shutil.rmtree(folder)
        self._run = wandb.init(
            project=run.project,
            id=run.key,
            name=run.name,
            dir=run.folder,
            config=run.settings,
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(silent=True, console="off"),
        )
        return self._run.step - 1

    def log(self, step: int, at: float, scalars: Scalars) -> None:
        """Log the numbers at their step, or the newest if that is past; W&B has its own clock."""
        del at
        self._run.log(dict(scalars), step=max(step, self._run.step))

    def close(self, *, finished: bool) -> None:
        """Write what is left; W&B calls a stopped run failed until it is resumed."""
        self._run.finish(exit_code=0 if finished else 1)
