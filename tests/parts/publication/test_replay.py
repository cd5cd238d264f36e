"""The command `lockstep replay` repeats a finding with its bundle alone."""

import subprocess
from pathlib import Path

import pytest

from pipeline.stage.keys import PROJECT
from tests import tiny
from tests.pipeline.audit.bundle.bundled_run import bundles_of, flipped_run

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def flipped(tmp_path_factory) -> tuple[dict, dict[str, Path]]:
    """One of two peers sends the negative of its message, and nobody verifies."""
    return bundles_of(tiny.in_common(tmp_path_factory, "flipped", flipped_run))


def replay(path: Path, **environment: str) -> subprocess.CompletedProcess:
    """The command, as a third party gives it: where there is no data of the run."""
    return tiny.python("-m", "pipeline", "replay", path, cwd=path.parent, **environment)


def test_a_finding_is_confirmed_with_the_bundle_alone(flipped):
    verdict, found = flipped
    names = {finding["bundle"] for finding in verdict["findings"]}
    assert names == {f"bundles/{name}" for name in found} == {"bundles/00001-00003-peer-01"}
    done = replay(found["00001-00003-peer-01"])
    assert (done.returncode, done.stderr) == (0, "")
    (finding,) = verdict["findings"]
    assert done.stdout.splitlines() == [
        f"peer 1, round 2, message: {finding['detail']}",
        f"  found here: round 2, message: {finding['detail']}",
        "  confirmed",
        "1 of 1 findings confirmed, compared bit for bit",
    ]


def test_elsewhere_it_is_neither_confirmed_nor_denied_and_says_why(flipped):
    flags = f"{tiny.environment(PROJECT)['XLA_FLAGS']} --xla_cpu_enable_fast_math=false"
    done = replay(flipped[1]["00001-00003-peer-01"], XLA_FLAGS=flags)
    assert (done.returncode, done.stderr) == (3, "")
    assert "\n  not comparable here\n" in done.stdout
    assert "0 of 1 findings confirmed, not comparable here: xla_flags is" in done.stdout


def test_no_bundle_is_one_line(tmp_path):
    done = replay(tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: {tmp_path}/run.json: No such file or directory, expected JSON\n"
