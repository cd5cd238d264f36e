"""A command that takes the local steps of a round, as burn_p2p's checkpoint command does.

It reads job.json and leaves result.json; their paths are in its arguments, where it asks for them,
and in its environment. Behind it fits whatever starts processes of its own, such as torchrun.
"""

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.errors import LockstepError
from lockstep.files import read_json, write_json
from parts.workload.process.child_group import ChildGroup
from parts.workload.process.messages import WorkerError
from pipeline.stage.given_files import check_file

JOB, RESULT, LOG = "job.json", "result.json", "command.log"
VARIABLES = {JOB: "BURN_P2P_DILOCO_JOB_MANIFEST", RESULT: "BURN_P2P_DILOCO_RESULT_MANIFEST"}


def run(
    name: str,
    command: Sequence[str],
    job: Mapping[str, object],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
) -> dict:
    """Run a command in a folder of its own, and return what result.json says.

    Args:
      name: What errors call the workload.
      command: The program and its arguments; {job_manifest} and {result_manifest} are paths.
      job: Content of job.json.
      folder: Where both are, and the command's working directory.
      environment: All variables of its environment but those of the paths.
      seconds: How long it may take.

    Raises:
      WorkerError: It cannot be started, takes too long, or fails.
      LockstepError: There is no result.json, or no JSON in it.
    """
    paths = {JOB: folder / JOB, RESULT: folder / RESULT}
    write_json(paths[JOB], {**job, "result_manifest_path": str(paths[RESULT])})
    arguments = [
        word.replace("{job_manifest}", str(paths[JOB])).replace(
            "{result_manifest}", str(paths[RESULT])
        )
        for word in command
    ]
    variables = {variable: str(paths[file]) for file, variable in VARIABLES.items()}
    try:
        group = ChildGroup.start(arguments, folder, {**environment, **variables}, folder / LOG)
    except LockstepError as error:
        raise WorkerError(f"{name}: command: {error}") from None
    try:
        with suppress(subprocess.TimeoutExpired):
            group.child.wait(seconds)
        ended = group.ended()
    finally:
        group.kill()  # what it started, too
    if ended is None:
        raise WorkerError(
            f"{name}: command: still running after {seconds:g} seconds, expected its end"
        )
    if group.child.returncode:
        last = group.log.last_line()
        raise WorkerError(
            f"{name}: command: {ended}, expected status 0" + (f": {last}" if last else "")
        )
    check_file(paths[RESULT], folder)
    return read_json(paths[RESULT])
