"""What a release says of itself agrees, wherever it stands."""

import re

import yaml

import pipeline
from pipeline.stage.keys import PROJECT

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (PROJECT / ".github" / "workflows").glob("*.yml")
}


def test_version_changelog_and_citation_agree():
    changes = (PROJECT / "CHANGELOG.md").read_text()
    first, *_ = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    cited = yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"]
    assert pipeline.__version__ == first == cited


def test_workflows_call_the_commands_that_the_readme_has():
    jobs = WORKFLOWS["ci"]["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.split()[1] for command in commands}
    assert {"repro", "test", "lint", "docs", "dist"} == targets
    made = re.findall(r"^(\w[\w-]*):", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert targets <= {*made}


def test_only_the_job_that_publishes_may_do_more_than_read():
    assert {*WORKFLOWS} == {"ci", "release"}
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}
        for job_name, job in workflow["jobs"].items():
            more = {"id-token": "write"} if (name, job_name) == ("release", "publish") else None
            assert job.get("permissions") == more
            assert job["timeout-minutes"] <= 60
