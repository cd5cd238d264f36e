"""A `kubectl` that runs each Job's command here, in FAKE_KUBERNETES' folder; it needs no image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml


def install(folder: Path) -> dict[str, str]:
    """Write the command to `folder`; return the environment in which it is found."""
    folder.mkdir()
    script = folder / "kubectl"
    script.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
    script.chmod(0o755)
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FAKE_KUBERNETES": str(folder),
        "LOCKSTEP_IMAGE": "registry/lockstep:1",
        "LOCKSTEP_CLAIM": "work",
        "LOCKSTEP_MOUNT": "/mnt",
    }


def _main(folder: Path, arguments: list[str]) -> None:
    if arguments[0] == "create":
        job = yaml.safe_load(sys.stdin)
        name = f"{job['metadata']['generateName']}{len(list(folder.glob('*.json')))}"
        (folder / f"{name}.json").write_text(json.dumps(job))
        (container,) = job["spec"]["template"]["spec"]["containers"]
        command = '$0 "$@" > $OUT.log 2>&1 && echo Complete > $OUT || echo Failed > $OUT'
        subprocess.Popen(
            ["sh", "-c", command, *container["command"]],
            cwd=container["workingDir"],
            env=os.environ | {"OUT": str(folder / name)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        print(f"job.batch/{name}")
    elif arguments[0] == "get":
        name = arguments[1].removeprefix("job.batch/")
        condition = folder / name
        if (folder / "down").exists():
            sys.exit("Unable to connect to the server")
        if (folder / f"{name}.json").exists():
            print("Job", condition.read_text().strip() if condition.exists() else "", end="")
        elif "--ignore-not-found" not in arguments:
            sys.exit(f'Error from server (NotFound): jobs.batch "{name}" not found')


if __name__ == "__main__":
    _main(Path(os.environ["FAKE_KUBERNETES"]), sys.argv[1:])
