"""How a command runs one stage. Nothing heavy is imported before."""

import shutil
from importlib import import_module
from pathlib import Path

from lockstep.errors import LockstepError
from pipeline.stage import devices, logs, signals


def run_stage(name: str, run: Path, root: Path) -> None:
    """Run one stage, alone under its locks, unless its result exists already.

    Raises:
      LockstepError: the run file was edited meanwhile, in what the stage depends on.
    """
    from lockstep.machine import allocator
    from pipeline import runfile
    from pipeline.stage import descriptors, lock
    from pipeline.stage.artifacts import Paths

    allocator.tune()
    descriptors.check()
    settings = runfile.load(run)
    paths = Paths(name, run, root)
    key = paths.key  # read before any wait, as the settings are
    signals.watch_engine()
    with lock.hold(root / "data" / f".{name}.lock"), lock.hold(paths.runs / f"{key}.lock"):
        if paths.has_result():
            paths.publish()
            shutil.rmtree(paths.scratch, ignore_errors=True)  # left by a kill at the very end
            print(f"{name}: {root / paths.keys.made(name)} exists already")
        else:
            logs.to_stdout(settings.runtime.log_level.upper())
            devices.prepare(settings)
            import_module(f"{__package__}.{name}").run(settings, paths)
    # DVC reads the run file again after the stage: it would record what the stage did not use
    before, now = paths.keys.content(name), paths.keys.again().content(name)
    if changed := [part for part, digest in now.items() if before.get(part) != digest]:
        raise LockstepError(
            f"{run}: {', '.join(changed)} changed while stage {name} ran, expected as it was; "
            "its result stands for what was read at the start: put the file back, or run the "
            "engine again"
        )
