"""A scheduler of one machine that speaks Slurm's commands, each a link to this file by its name.

Jobs are files of the folder FAKE_SLURM. Where there is a file `preempt`, the job that runs gets
SIGTERM, some seconds, SIGKILL, and, as it asked for, another start.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

COMMANDS = ("sbatch", "sacct", "sacctmgr", "scontrol", "sinfo", "squeue", "srun", "scancel")


def install(folder: Path) -> dict[str, str]:
    """Write the commands to `folder`; return the environment in which they are found."""
    folder.mkdir()
    script = folder / "slurm"
    script.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    script.chmod(0o755)
    for name in COMMANDS:
        (folder / name).symlink_to(script)
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FAKE_SLURM": str(folder),
    }


def jobs(folder: Path) -> list[dict]:
    """Return the jobs in the order they were submitted."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("job-*.json"))]


def _note(folder: Path, job: dict) -> None:
    part = folder / f".{job['id']}.part"
    part.write_text(json.dumps(job))
    part.rename(folder / f"job-{job['id']:03}.json")


def _sbatch(folder: Path, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    for option in ("--wrap", "--output", "--job-name", "-D"):
        parser.add_argument(option, required=True)
    given, _ = parser.parse_known_args(arguments)
    job = {"id": len(jobs(folder)) + 1, "name": given.job_name, "asked": arguments, "starts": 0}
    _note(folder, job | {"state": "PENDING"})
    output = given.output.replace("%j", str(job["id"]))
    daemon = [folder / "slurm", "daemon", str(job["id"]), given.wrap, given.D, output]
    null = subprocess.DEVNULL
    subprocess.Popen(daemon, stdin=null, stdout=null, stderr=null, start_new_session=True)
    print(job["id"])


def _daemon(folder: Path, number: str, command: str, where: str, output: str) -> None:
    job, preempt = jobs(folder)[int(number) - 1], folder / "preempt"
    while job["state"] == "PENDING":
        job |= {"state": "RUNNING", "starts": job["starts"] + 1}
        _note(folder, job)
        with open(output, "ab") as log:
            process = subprocess.Popen(
                ["sh", "-c", command],
                cwd=where,
                env=os.environ | {"SLURM_JOB_ID": number},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        while process.poll() is None and not preempt.exists():
            time.sleep(0.02)
        if process.poll() is None:
            preempt.unlink()
            os.killpg(process.pid, signal.SIGTERM)
            time.sleep(5)
            with suppress(ProcessLookupError):  # all of it saved and ended in time
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _note(folder, job | {"state": "PREEMPTED"})
            time.sleep(2)
            job["state"] = "PENDING" if "--requeue" in job["asked"] else "PREEMPTED"
        else:
            job["state"] = "FAILED" if process.returncode else "COMPLETED"
        _note(folder, job)


def _main(called: str, arguments: list[str]) -> None:
    folder = Path(os.environ["FAKE_SLURM"])
    match called:
        case "slurm":
            _daemon(folder, *arguments[1:])
        case "sbatch":
            _sbatch(folder, arguments)
        case "srun":
            command = list(dropwhile(lambda argument: argument.startswith("-"), arguments))
            tasks = 1 if "-n1" in arguments else int(os.environ["SLURM_NTASKS"])
            environments = [os.environ | {"SLURM_PROCID": str(task)} for task in range(tasks)]
            running = [subprocess.Popen(command, env=environment) for environment in environments]
            sys.exit(max(process.wait() for process in running))
        case "sacct" | "squeue":
            name = arguments[arguments.index("--name") + 1]
            print(*(f"{j['id']}|{j['state']}" for j in jobs(folder) if j["name"] == name), sep="\n")
        case "sacctmgr":
            print("lab")
        case "scontrol":
            print("MinJobAge = 300 sec")


if __name__ == "__main__":
    _main(Path(sys.argv[0]).name, sys.argv[1:])
