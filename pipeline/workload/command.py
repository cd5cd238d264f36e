"""A command that takes the local steps of a round, as burn_p2p's checkpoint command does.

It reads job.json and leaves result.json; their paths are in its arguments, where it asks for them,
and in its environment. Behind it fits whatever starts processes of its own, such as torchrun.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.stage.artifacts import read_json, write_json
from pipeline.stage.given_files import check_file
from pipeline.workload.worker_process import LOG, MOST_LOG, WorkerError, last_line

JOB, RESULT = "job.json", "result.json"
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
      WorkerError: It cannot be started, takes too long, fails, or prints too much.
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
    with open(folder / LOG, "wb") as log:
        try:
            process = subprocess.Popen(
                arguments,
                cwd=folder,
                env={**environment, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise WorkerError(
                f"{name}: command: found {command[0]!r}, expected a program that starts: "
                f"{error.strerror}"
            ) from error
    try:
        _wait(name, process, folder / LOG, seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started, too
        process.wait()
    check_file(paths[RESULT], folder)
    return read_json(paths[RESULT])


def _wait(name: str, process: subprocess.Popen, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise WorkerError(
                f"{name}: command: still running after {seconds:g} seconds, expected its end"
            )
        if log.stat().st_size > MOST_LOG:
            raise WorkerError(f"{name}: command: more than {MOST_LOG:,} bytes of output")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    if process.returncode:
        last = last_line(log)
        raise WorkerError(
            f"{name}: command: found exit status {process.returncode}, expected 0"
            + (f": {last}" if last else "")
        )
