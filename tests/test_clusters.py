"""The profiles for clusters, up to the scheduler's door."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import tomlkit
import yaml

from pipeline.stage.keys import OUT, PROJECT, RUN_FILE, STAGES
from tests import tiny
from tests.servers import kubernetes, slurm
from tests.test_resume import rounds_of


def test_every_stage_says_once_what_a_cluster_reserves_for_it():
    for name, stage in STAGES.items():
        assert {"cpus_per_task", "mem_mb", "runtime"} <= stage["meta"].keys(), name
        assert stage["meta"].keys() <= {"cpus_per_task", "mem_mb", "runtime", "gpu"}, name
    for profile in (PROJECT / "profiles").glob("*/profile.yaml"):
        said = yaml.safe_load(profile.read_text())
        for name, resources in said.get("set-resources", {}).items():
            assert not resources.keys() & STAGES[name]["meta"].keys(), profile


def test_a_stage_becomes_a_kubernetes_job_on_the_shared_volume(tmp_path):
    cluster, profile = tmp_path / "kubernetes", PROJECT / "profiles" / "kubernetes"
    environment = os.environ | kubernetes.install(cluster)
    for script, condition in (("exit 0", "success"), ("exit 1", "failed")):
        (tmp_path / "job.sh").write_text(f"test $PWD = {tmp_path} && {script}")
        submit = [profile / "submit", "train", "16", "64000", "1440", "1", tmp_path / "job.sh"]
        name = subprocess.check_output(submit, cwd=tmp_path, env=environment, text=True).strip()
        deadline, said = time.monotonic() + 10, "running"
        while said == "running" and time.monotonic() < deadline:
            status = [profile / "status", name]
            said = subprocess.check_output(status, env=environment, text=True).strip()
        assert said == condition
    job = json.loads((cluster / "lockstep-train-0.json").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    requests = {"cpu": 16, "memory": "64000M", "nvidia.com/gpu": 1}
    assert container["resources"]["requests"] == requests
    assert container["image"] == "registry/lockstep:1"
    assert job["spec"]["activeDeadlineSeconds"] == 1440 * 60
    # strict schemas want the status too
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/mnt"}]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "work"}


def test_a_kubernetes_job_that_was_deleted_has_failed_and_one_not_heard_of_runs(tmp_path):
    cluster = tmp_path / "kubernetes"
    environment = os.environ | kubernetes.install(cluster)
    status = [PROJECT / "profiles/kubernetes/status", "job.batch/lockstep-train-0"]
    assert subprocess.check_output(status, env=environment, text=True) == "failed\n"
    (cluster / "down").touch()
    assert subprocess.check_output(status, env=environment, text=True) == "running\n"


@pytest.mark.soak
def test_snakemake_runs_a_stage_as_a_kubernetes_job(tmp_path):
    pytest.importorskip("snakemake_executor_plugin_cluster_generic")
    project, cluster = tiny.make_project(tmp_path), tmp_path / "kubernetes"
    command = sys.executable, "-m", "snakemake", "--profile", "profiles/kubernetes", "convert"
    tiny.run(project, *command, **kubernetes.install(cluster))
    assert (cluster / "lockstep-convert-0").read_text() == "Complete\n"
    assert (project / OUT["convert"] / "params.safetensors").exists()


@pytest.mark.soak
def test_the_slurm_job_of_the_docs_trains_peers_as_its_tasks(tmp_path):
    project, whole = tiny.make_project(tmp_path), tmp_path / "whole"
    tiny.make(project / RUN_FILE, whole, "download", "convert", "train")
    page = (PROJECT / "docs/how-to/scale.md").read_text().split("## Tasks of a Slurm job")[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = re.search("```sh\n(.*?)```", page, re.DOTALL)[1].replace("5555", port)
    script = script.replace(". .venv/bin/activate", "").replace("$(hostname)", "127.0.0.1")
    run = tomlkit.parse((project / RUN_FILE).read_text())
    run["runtime"] |= {"carrier": "processes", "listen": f"127.0.0.1:{port}", "by_hand": [0, 1]}
    tiny.write_run(project / RUN_FILE, run)
    tiny.make(project / RUN_FILE, project, "download", "convert")
    tiny.run(project, "sh", "-c", script, **slurm.install(tmp_path / "slurm"), SLURM_NTASKS="2")
    made, expected = (tiny.contents(root / OUT["train"]) for root in (project, whole))
    assert made == expected


@pytest.mark.soak
def test_a_training_that_slurm_preempts_ends_with_the_same_bytes(tmp_path):
    pytest.importorskip("snakemake_executor_plugin_slurm")
    project, whole = tiny.make_project(tmp_path, config__total_steps=30), tmp_path / "whole"
    tiny.make(project / RUN_FILE, whole, "download", "convert", "train")
    tiny.make(project / RUN_FILE, project, "download", "convert")
    cluster = tmp_path / "slurm"
    snakemake = [sys.executable, "-m", "snakemake", "--profile", "profiles/slurm", "train"]
    quick = ["--slurm-init-seconds-before-status-checks=1", "--seconds-between-status-checks=1"]
    log = tmp_path / "log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            [*snakemake, *quick],
            cwd=project,
            env=tiny.environment(project) | slurm.install(cluster) | {"SLURM_ACCOUNT": "lab"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 120
        while rounds_of(project) < 10:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        (cluster / "preempt").touch()
        assert process.wait(timeout=180) == 0, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    (job,) = slurm.jobs(cluster)
    assert (job["state"], job["starts"]) == ("COMPLETED", 2), log.read_text()
    asked = " ".join(job["asked"])
    meta = STAGES["train"]["meta"]
    for option in (
        "-A lab",
        "-p gpu",
        "--requeue",
        "--signal=TERM@120",
        f"-t {meta['runtime']}",
        f"--mem {meta['mem_mb']}",
        f"--cpus-per-task={meta['cpus_per_task']}",
    ):
        assert option in asked
    made, expected = (tiny.contents(root / OUT["train"]) for root in (project, whole))
    assert made == expected
