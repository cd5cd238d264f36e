"""What a release says of itself agrees, wherever it stands."""

import re
from functools import partial

import yaml
from packaging.version import Version

import lockstep
from pipeline import version
from pipeline.stage.keys import PROJECT
from tests import tiny

WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (PROJECT / ".github" / "workflows").glob("*.yml")
}


def test_version_changelog_and_citation_agree():
    changes = (PROJECT / "CHANGELOG.md").read_text()
    first, *_ = re.findall(r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)
    cited = yaml.safe_load((PROJECT / "CITATION.cff").read_text())["version"]
    assert first == cited
    here, released = Version(lockstep.__version__), Version(cited)
    unreleased = re.search(r"^## \[Unreleased\]\n(.*?)^## ", changes, re.MULTILINE | re.DOTALL)
    if unreleased and unreleased[1].strip():
        assert here.is_devrelease and here > released
    else:
        assert here == released


def test_between_releases_the_version_says_the_commit_and_whether_the_source_is_another(
    tmp_path, monkeypatch
):
    git = partial(tiny.git, tmp_path)
    monkeypatch.setattr(version, "CHECKOUT", tmp_path)
    monkeypatch.setattr(version, "__version__", "1.2.0.dev0")
    assert version.with_commit() == "1.2.0.dev0"  # an installed library, say
    assert version.commit() is None
    (tmp_path / "pipeline").mkdir()
    (source := tmp_path / "pipeline" / "a.py").write_text("1")
    git("init", "-q")
    assert version.with_commit() == "1.2.0.dev0"  # no commit yet
    assert version.commit() is None
    git("add", "-A")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")[:12]
    (tmp_path / "dvc.lock").write_text("results")
    assert version.with_commit() == f"1.2.0.dev0+{commit}"
    assert version.commit() == git("rev-parse", "HEAD")
    source.write_text("2")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # whoever has made the checkout
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "another"))  # as in a hook of git
    assert version.with_commit() == f"1.2.0.dev0+{commit}.changed"
    assert version.commit() is None
    Version(version.with_commit())  # as packaging reads it
    monkeypatch.setattr(version, "__version__", "1.2.0")
    assert version.with_commit() == "1.2.0"


def test_workflows_call_the_commands_that_the_readme_has():
    jobs = WORKFLOWS["ci"]["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = {command.split()[1] for command in commands}
    assert {"repro", "test", "test-long", "lint", "docs", "dist"} == targets
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
